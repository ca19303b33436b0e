#include <algorithm>
#include <cctype>
#include <exception>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "ballast/comm/communicator.h"
#include "ballast/comm/together.h"
#include "ballast/config/config.h"
#include "ballast/core/error.h"
#include "ballast/core/log.h"
#include "ballast/train/checkpoints.h"
#include "ballast/train/trainer.h"

#include "tools/command_line.h"
#include "tools/commands.h"
#include "tools/console.h"
#include "tools/process.h"
#include "tools/ranks.h"
#include "tools/run_directory.h"

namespace ballast::tools {
namespace {

constexpr std::uint64_t kMostSteps = std::uint64_t{1} << 40U;  // like ballast.steps

struct TrainArguments {
  std::filesystem::path config;
  std::vector<std::string> overrides;
  std::filesystem::path out;
  std::uint64_t steps = 0;
  train::TraceRequest trace;
  bool serial = false;
  bool overwrite = false;
  std::string resume;  ///< "": no; kFlagAlone: the run of `out`; otherwise from where
  bool print_config = false;
};

/// Where --resume=DIR points; "" without DIR.
std::filesystem::path resumed_path(const TrainArguments& arguments) {
  if (arguments.resume.empty() || arguments.resume == kFlagAlone) return "";
  return std::filesystem::absolute(arguments.resume);
}

/// Whether the run of --out goes on; --resume=DIR may also begin another one.
bool continues(const TrainArguments& arguments, const config::Config& config) {
  const std::filesystem::path& out = config.ballast.out;
  const std::filesystem::path from = resumed_path(arguments);
  if (from.empty()) return !arguments.resume.empty();
  return !out.empty() && train::is_of_run(from, out);
}

config::Config load_config(const TrainArguments& arguments, std::uint32_t world) {
  config::Config config = config::load(arguments.config, arguments.overrides, world);
  if (arguments.steps > 0) config.ballast.steps = arguments.steps;
  if (arguments.serial) config.ballast.serial = true;
  if (!arguments.out.empty()) config.ballast.out = std::filesystem::absolute(arguments.out);
  return config;
}

void check_run(const TrainArguments& arguments, const config::Config& config) {
  const std::vector<std::string>& words = command_line();
  if (std::find(words.begin(), words.end(), "--resume=") != words.end()) {
    throw Error(ErrorCategory::usage, "--resume=: must not be empty");
  }
  if (config.ballast.steps == 0) {
    throw Error(
        ErrorCategory::usage,
        arguments.config.string() + ": ballast.steps is missing or 0: set it or give --steps N");
  }
  const std::filesystem::path& out = config.ballast.out;
  const bool own = continues(arguments, config);
  if (own && out.empty()) {
    throw Error(ErrorCategory::usage,
                "--resume: name the directory of the run with --out DIR or ballast.out, or give "
                "--resume=DIR");
  }
  if (own && arguments.overwrite) {
    throw Error(ErrorCategory::usage,
                "--overwrite would replace the run that --resume goes on with; give one of them");
  }
  if (out.empty() || own) return;
  if (!arguments.overwrite) train::refuse_used_directory(out);
  std::error_code ignored;
  if (std::filesystem::equivalent(arguments.config, out / "config.json", ignored)) {
    throw Error(ErrorCategory::usage,
                fmt::format("{} would be replaced by the run's own config.json; choose another run "
                            "directory with --out",
                            arguments.config.string()));
  }
}

train::RunDirectory directory_of(const TrainArguments& arguments, const config::Config& config) {
  if (continues(arguments, config)) return train::RunDirectory::continued;
  return arguments.overwrite ? train::RunDirectory::overwritten : train::RunDirectory::fresh;
}

/// A word of a shell's command line.
std::string quoted(const std::string& word) {
  const bool plain = std::all_of(word.begin(), word.end(), [](unsigned char c) {
    return std::isalnum(c) != 0 ||
           std::string_view("_-+=./,:@%").find(static_cast<char>(c)) != std::string_view::npos;
  });
  if (plain && !word.empty()) return word;
  std::string text = "'";
  for (const char c : word) text += c == '\'' ? "'\\''" : std::string(1, c);
  return text + "'";
}

/// The command that goes on with the run.
std::string resuming_command(const config::Config& config) {
  std::string line;
  bool names_directory = false;
  for (const std::string& word : command_line()) {
    if (word == "--overwrite" || word.starts_with("--resume")) continue;
    line += (line.empty() ? "" : " ") + quoted(word);
    names_directory = names_directory || word.starts_with("--out");
  }
  if (!names_directory) line += fmt::format(" --out {}", quoted(config.ballast.out.string()));
  return line + " --resume";
}

/// Lines that say where the files of a run are.
std::vector<std::string> places_of(const TrainArguments& arguments, const config::Config& config) {
  std::vector<std::string> lines = {
      fmt::format("metrics in {}", (config.ballast.out / "metrics.jsonl").string())};
  if (!arguments.trace.file.empty()) {
    lines.push_back(fmt::format("trace in {}", arguments.trace.file.string()));
  }
  return lines;
}

void train_and_show(const TrainArguments& arguments, config::Config config, comm::Ranks* ranks) {
  const bool first = ranks == nullptr || ranks->rank() == 0;
  const bool unnamed = config.ballast.out.empty();
  comm::together(ranks, [&] {
    if (first && unnamed) config.ballast.out = create_run_directory(arguments.config);
  });
  if (first) {
    for (const auto& line : config.ignored) log(LogLevel::info, "ignored: " + line);
    for (const auto& line : config.notes) log(LogLevel::info, line);
  }
  Console console(fmt::format("ballast train {}", arguments.config.string()),
                  config.steps_per_print, !comm::read_launch().launcher.empty(),
                  places_of(arguments, config), resuming_command(config));
  try {
    train::train(config, console, &interrupted(),
                 {.trace = arguments.trace,
                  .directory = directory_of(arguments, config),
                  .resume = resumed_path(arguments),
                  .command = command_line(),
                  .checkpoint_now = &checkpoint_wanted(),
                  .resuming = resuming_command(config)},
                 ranks);
  } catch (const Error& error) {
    // Removes nothing if the run has written to it.
    std::error_code ignored;
    if (first && unnamed) std::filesystem::remove(config.ballast.out, ignored);
    // The summary has said that it was interrupted. Ranks have to end each other.
    const bool interrupted = error.category() == ErrorCategory::interrupted;
    if (interrupted && console.summarized() && ranks == nullptr) throw Reported{status_of(error)};
    throw;
  }
}

/// Trains as one of several ranks. Reads the config before joining, since it has the timeout; the
/// ranks agree on errors in it after joining.
void train_as_rank(const TrainArguments& arguments, const comm::Launch& launch) {
  std::optional<config::Config> config;
  std::exception_ptr mistake;
  try {
    config = load_config(arguments, launch.world);
    check_run(arguments, *config);
  } catch (...) {
    mistake = std::current_exception();
  }
  comm::JoinOptions options = {.interrupted = &interrupted()};
  // A signal then ends the run after the step, so no collective is given up.
  if (config && config->ballast.writes_checkpoints()) options.interrupted = nullptr;
  if (config) options.timeout_seconds = config->ballast.comm_timeout_seconds;
  run_as_rank(launch, options, [&](comm::Ranks& ranks) {
    comm::together(&ranks, [&] {
      if (mistake) std::rethrow_exception(mistake);
    });
    train_and_show(arguments, std::move(*config), &ranks);
  });
}

void run_train(const TrainArguments& arguments) {
  const comm::Launch launch = comm::read_launch();
  if (arguments.print_config) {
    if (launch.first()) fmt::print("{}\n", config::print(load_config(arguments, launch.world)));
    return;
  }
  if (launch.world > 1) {
    train_as_rank(arguments, launch);
    return;
  }
  config::Config config = load_config(arguments, 1);
  check_run(arguments, config);
  train_and_show(arguments, std::move(config), nullptr);
}

}  // namespace

void add_train(Command program) {
  auto arguments = std::make_shared<TrainArguments>();
  auto& a = *arguments;
  Command command = program.add_command("train", "Train the model of CONFIG");
  command.add_option("CONFIG", &a.config, "JSON config (see configs/README.md)",
                     {.required = true});
  command.add_option("--set", &a.overrides, "Override a key: path.to.key=value",
                     {.single_argument = true});
  command.add_option("--steps", &a.steps, "Steps to train; overrides ballast.steps",
                     {.range = std::pair(std::uint64_t{1}, kMostSteps)});
  command.add_option("--out", &a.out, "Run directory (default: a new one; see ballast.out)");
  command.add_option("--trace", &a.trace.file,
                     "Write a timeline of the first steps, for ui.perfetto.dev");
  command.add_option("--trace-steps", &a.trace.steps, "Steps to trace",
                     {.positive = true, .needs = "--trace", .show_default = true});
  command.add_flag("--serial", &a.serial,
                   "Run one operation at a time, for debugging; results are the same");
  command.add_flag("--overwrite", &a.overwrite,
                   "Replace the files of another run in the run directory");
  command.add_flag("--resume", &a.resume,
                   "Go on with the run of --out from its newest whole checkpoint "
                   "(ballast.checkpoint_every), or from DIR: a run, one of its checkpoints, or a "
                   "portable one (ballast export --states)",
                   "DIR");
  command.add_flag("--print-config", &a.print_config, "Print the effective config and stop");
  command.set_action([arguments] { run_train(*arguments); });
}

}  // namespace ballast::tools
