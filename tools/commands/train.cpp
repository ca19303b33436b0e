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

#include "ballast/checkpoint/checkpoints.h"
#include "ballast/comm/agreement.h"
#include "ballast/comm/communicator.h"
#include "ballast/config/config.h"
#include "ballast/config/key_effects.h"
#include "ballast/core/error.h"
#include "ballast/train/run_options.h"
#include "ballast/train/trainer.h"

#include "tools/command_line.h"
#include "tools/commands/requests.h"
#include "tools/console/run_output.h"
#include "tools/console/terminal.h"
#include "tools/live/view.h"
#include "tools/program.h"
#include "tools/signals.h"
#include "tools/usage/words.h"

namespace ballast::tools {

namespace {

constexpr std::string_view kAutomatic = "auto";

/// Whether --resume=auto is given: the run of --out is continued or started.
bool is_automatic(const TrainRequest& request) {
  return request.resume == kAutomatic;
}

/// The path of --resume=DIR; "" without DIR.
std::filesystem::path resumed_path(const TrainRequest& request) {
  if (request.resume.empty() || request.resume == kFlagAlone || is_automatic(request)) return "";
  return std::filesystem::absolute(request.resume);
}

/// Whether the run of --out continues, or may continue. --resume=DIR may also start another run.
bool continues(const TrainRequest& request, const config::Config& config) {
  const std::filesystem::path& out = config.ballast.out;
  const std::filesystem::path from = resumed_path(request);
  if (from.empty()) return !request.resume.empty();
  return !out.empty() && checkpoint::is_of_run(from, out);
}

train::RunDirectory directory_of(const TrainRequest& request, const config::Config& config) {
  if (is_automatic(request)) return train::RunDirectory::automatic;
  if (continues(request, config)) return train::RunDirectory::continued;
  return request.overwrite ? train::RunDirectory::overwritten : train::RunDirectory::fresh;
}

/// Quotes a word for a shell's command line.
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

/// Refuses to train the whole run in each of several processes.
void refuse_several_runs(const TrainRequest& request) {
  std::string line = "ballast train CONFIG";
  if (request.config.caller == Caller::program) {
    line.clear();
    for (const std::string& word : request.command)
      line += (line.empty() ? "" : " ") + quoted(word);
  }
  const auto refuse = [&line](std::string_view name, std::uint32_t world, std::string_view unset) {
    throw Error(ErrorCategory::usage,
                fmt::format("{} started {} processes, each of which would train the whole run; "
                            "start its ranks with `mpirun -n {} {}`, or unset {} for a run of one "
                            "process",
                            name, world, world, line, unset));
  };
  const comm::Launch launch = comm::read_launch();
  if (launch.world > 1) refuse(launch.launcher, launch.world, "the variables of the launcher");
  const auto other = comm::find_other_launcher();
  if (other) refuse(other->name, other->world, other->variables);
}

}  // namespace

config::Config load_config(const TrainRequest& request, std::uint32_t world) {
  // Options are settings, because other keys may depend on them: "auto" of total_num_steps is the
  // number of steps.
  ConfigRequest whole = request.config;
  std::vector<std::string>& settings = whole.overrides;
  if (request.steps > 0) settings.push_back(fmt::format("ballast.steps={}", request.steps));
  if (request.seed) settings.push_back(fmt::format("ballast.seed={}", *request.seed));
  if (request.serial) settings.emplace_back("ballast.serial=true");
  config::Config config = whole.load(world);
  // No key depends on it, and a path need not be UTF-8.
  if (!request.out.empty()) config.ballast.out = std::filesystem::absolute(request.out);
  return config;
}

void check_run(const TrainRequest& request, const config::Config& config) {
  const Caller caller = request.config.caller;
  if (config.ballast.steps == 0) {
    throw Error(ErrorCategory::usage,
                fmt::format("{}: ballast.steps is missing or 0: set it or give {}",
                            request.config.file.string(), option(caller, "steps", "N")));
  }
  const std::filesystem::path from = resumed_path(request);
  if (const std::string wrong = path_mistake(Names::folder, from.string()); !wrong.empty()) {
    throw Error(ErrorCategory::usage, fmt::format("{}: {}", option(caller, "resume"), wrong));
  }
  if (!request.allowed_changes.empty() && request.resume.empty()) {
    throw Error(
        ErrorCategory::usage,
        fmt::format("{} is for {}: only a run that resumes has other settings to compare "
                    "with; remove it",
                    option(caller, caller == Caller::program ? "allow-change" : "allow_change"),
                    option(caller, "resume")));
  }
  if (!request.source.rates.empty() && !request.source.plan.empty()) {
    throw Error(ErrorCategory::usage,
                fmt::format("{} and {} exclude each other: a saved plan has its own rates",
                            option(caller, "rates"), option(caller, "plan")));
  }
  config::check_allowed_names(request.allowed_changes);
  const std::filesystem::path& out = config.ballast.out;
  const bool own = continues(request, config);
  if (own && out.empty()) {
    throw Error(ErrorCategory::usage,
                fmt::format("{} needs the directory of the run: give {}, ballast.out or {}",
                            option(caller, "resume"), option(caller, "out", "DIR"),
                            caller == Caller::program ? "--resume=DIR" : "resume=DIR"));
  }
  if (own && request.overwrite) {
    throw Error(ErrorCategory::usage,
                fmt::format("{} would replace the run that {} continues; give one of them",
                            option(caller, "overwrite"), option(caller, "resume")));
  }
  if (out.empty() || own) return;
  if (!request.overwrite) train::refuse_used_directory(out);
  std::error_code ignored;
  if (!request.config.text &&
      std::filesystem::equivalent(request.config.file, out / "config.json", ignored)) {
    throw Error(ErrorCategory::usage,
                fmt::format("{} would be replaced by the run's own config.json; choose another run "
                            "directory with {}",
                            request.config.file.string(), option(caller, "out")));
  }
}

std::string resuming_command(const TrainRequest& request, const config::Config& config) {
  const bool automatic = is_automatic(request);
  if (request.config.caller == Caller::python) {
    return fmt::format("ballast.train(..., out=\"{}\", resume={})", config.ballast.out.string(),
                       automatic ? "\"auto\"" : "True");
  }
  std::string line = launching_words(comm::read_launch());
  bool names_directory = false;
  bool first = true;
  for (const std::string& word : request.command) {
    const bool replaced = word == "--overwrite" || word.starts_with("--resume");
    if (replaced && !automatic) continue;
    line += (std::exchange(first, false) ? "" : " ") + quoted(word);
    names_directory = names_directory || word.starts_with("--out");
  }
  if (!names_directory) line += fmt::format(" --out {}", quoted(config.ballast.out.string()));
  return automatic ? line : line + " --resume";
}

bool can_resume(const TrainRequest& request, const config::Config& config) {
  const train::RunDirectory use = directory_of(request, config);
  return config.ballast.writes_checkpoints() &&
         (use == train::RunDirectory::continued || use == train::RunDirectory::automatic) &&
         !checkpoint::checkpoints_of(config.ballast.out).empty();
}

train::Ending train_run(const TrainRequest& request, config::Config config,
                        const MakeObserver& observer, comm::Ranks* ranks) {
  if (ranks == nullptr) refuse_several_runs(request);
  const bool is_root = ranks == nullptr || ranks->rank() == 0;
  const bool unnamed = config.ballast.out.empty();
  comm::collective_try(ranks, [&] {
    if (is_root && unnamed) config.ballast.out = create_run_directory(request.config.file);
  });
  if (is_root) log_notes(config);
  if (is_root && is_automatic(request) && !config.ballast.writes_checkpoints()) {
    log(LogLevel::info,
        "--resume=auto: without ballast.checkpoint_every there are no checkpoints, so a run that "
        "is killed begins again");
  }
  try {
    return train::train(config, observer(config), &interrupted(),
                        {.trace = request.trace,
                         .directory = directory_of(request, config),
                         .resume = resumed_path(request),
                         .command = request.command,
                         .checkpoint_now = &checkpoint_wanted(),
                         .resuming = resuming_command(request, config),
                         .allowed_changes = request.allowed_changes,
                         .source = request.source},
                        ranks);
  } catch (const Error&) {
    // Removes nothing if the run has written to it.
    std::error_code ignored;
    if (is_root && unnamed) std::filesystem::remove(config.ballast.out, ignored);
    throw;
  }
}

namespace {

constexpr std::uint64_t kMaxSteps = std::uint64_t{1} << 40U;  // like ballast.steps

struct TrainArguments {
  TrainRequest request;
  bool print_config = false;
  bool live = false;
};

/// Lines with the places of a run's files.
std::vector<std::string> places_of(const config::Config& config) {
  return {fmt::format("metrics in {}", (config.ballast.out / "metrics.jsonl").string())};
}

/// Describes how a signal ends a run during its steps.
const char* ending_in_steps(const config::Config& config) {
  return config.ballast.writes_checkpoints()
             ? "the run ends after the step that is running, with a checkpoint"
             : "the run ends in the step that is running, without a checkpoint "
               "(ballast.checkpoint_every)";
}

/// Returns the exit status.
int train_and_show(const TrainArguments& arguments, const config::Config& config,
                   comm::Ranks* ranks) {
  const TrainRequest& request = arguments.request;
  const bool launched = !comm::read_launch().launcher.empty();
  const bool live = arguments.live && !launched && Screen::available();
  if (arguments.live && !live && comm::read_launch().first()) {
    log(LogLevel::info, "--live needs a terminal for input and output; lines instead");
  }
  std::optional<Console> console;
  const auto show = [&](const config::Config& ready) -> train::Observer& {
    console.emplace(fmt::format("ballast train {}", request.config.file.string()),
                    ready.steps_per_print, launched, live, places_of(ready),
                    resuming_command(request, ready));
    // A launcher sends signals to its ranks even after the failure of one of them. So only a run
    // that will write a checkpoint prints a notice.
    const bool says =
        !launched || (ready.ballast.writes_checkpoints() && comm::read_launch().first());
    if (says) console->ends_in_steps(ending_in_steps(ready));
    if (!launched) announce_ending("the run ends before its first step");
    return *console;
  };
  try {
    const train::Ending ending = train_run(request, config, show, ranks);
    return ending == train::Ending::done ? 0 : kResumable;
  } catch (const Error& error) {
    if (error.category() != ErrorCategory::interrupted) throw;
    if (can_resume(request, config)) set_interrupt_status(kResumable);
    // The summary has reported the interrupt, and nobody reads about a closed pipe. Ranks have to
    // end each other.
    const bool reported = (console && console->summarized()) || interrupt_signal() == 0;
    if (reported && ranks == nullptr) return status_of(error);
    throw;
  }
}

void check_words(const std::vector<std::string>& words) {
  if (std::find(words.begin(), words.end(), "--resume=") == words.end()) return;
  throw Error(ErrorCategory::usage, "--resume=: must not be empty");
}

/// Trains as one of several ranks. Reads the config before joining, since it has the timeout. The
/// ranks agree on errors in it after joining.
void train_as_rank(const TrainArguments& arguments, const comm::Launch& launch) {
  const TrainRequest& request = arguments.request;
  std::optional<config::Config> config;
  std::exception_ptr mistake;
  try {
    config = load_config(request, launch.world);
    check_words(request.command);
    check_run(request, *config);
  } catch (...) {
    mistake = std::current_exception();
  }
  comm::JoinOptions options = {.interrupted = &interrupted()};
  // A signal then ends the run after the step, so no collective is abandoned.
  if (config && config->ballast.writes_checkpoints()) options.interrupted = nullptr;
  if (config) options.timeout_seconds = config->ballast.comm_timeout_seconds;
  int status = 0;
  run_as_rank(launch, options, [&](comm::Ranks& ranks) {
    comm::collective_try(&ranks, [&] {
      if (mistake) std::rethrow_exception(mistake);
    });
    status = train_and_show(arguments, *config, &ranks);
  });
  if (status != 0) throw ReportedFailure{status};
}

void run_train(TrainArguments arguments) {
  arguments.request.command = command_line();
  arguments.request.trace.overwrite = arguments.request.overwrite;
  arguments.request.trace.config = arguments.request.config.file;
  const TrainRequest& request = arguments.request;
  const comm::Launch launch = comm::read_launch();
  if (arguments.print_config) {
    const config::Config config = load_config(request, launch.world);
    if (!launch.first()) return;
    log_notes(config);
    fmt::print("{}\n", config::print(config));
    return;
  }
  if (launch.world > 1) {
    train_as_rank(arguments, launch);
    return;
  }
  const config::Config config = load_config(request, 1);
  check_words(request.command);
  check_run(request, config);
  if (const int status = train_and_show(arguments, config, nullptr); status != 0) {
    throw ReportedFailure{status};
  }
}

}  // namespace

void add_train(Command program) {
  auto arguments = std::make_shared<TrainArguments>();
  auto& a = *arguments;
  Command command = program.add_command("train", "Train the model of CONFIG");
  command.add_option("CONFIG", &a.request.config.file, "JSON config (keys: ballast config-keys)",
                     {.required = true, .takes = Names::file, .extensions = {".json"}});
  add_inputs(command, a.request.config);
  command.add_option("--steps", &a.request.steps, "Steps to train; overrides ballast.steps",
                     {.range = std::pair(std::uint64_t{1}, kMaxSteps)});
  command.add_option("--seed", &a.request.seed, "Random seed; overrides ballast.seed");
  command.add_option("--out", &a.request.out, "Run directory (default: a new one; see ballast.out)",
                     {.takes = Names::new_folder});
  command.add_option("--trace", &a.request.trace.file,
                     "Write a timeline of the first steps, for ui.perfetto.dev",
                     {.takes = Names::new_path, .value = "FILE"});
  command.add_option("--trace-steps", &a.request.trace.steps, "Steps to trace",
                     {.positive = true, .needs = "--trace", .show_default = true});
  command.add_option("--rates", &a.request.source.rates,
                     "Plan with the rates of this file, as ballast plan --rates does (default: "
                     "rates of this machine)",
                     {.takes = Names::file, .extensions = {".json"}});
  command.add_option("--plan", &a.request.source.plan,
                     "Run the plan that ballast plan --save has written",
                     {.takes = Names::file, .extensions = {".json"}});
  command.add_flag("--serial", &a.request.serial,
                   "Run one operation at a time, for debugging; results are the same");
  command.add_flag("--overwrite", &a.request.overwrite,
                   "Replace the files of another run in the run directory, and the file of --trace "
                   "even if it is of another kind");
  command.add_flag("--resume", &a.request.resume,
                   "Continue the run of --out from its latest intact checkpoint "
                   "(ballast.checkpoint_every), or start from DIR: a run, one of its checkpoints, "
                   "or a portable one (ballast export --states). DIR auto: continue the run of "
                   "--out, or start it if it has no checkpoint yet, for jobs that are requeued",
                   "DIR");
  command.add_option("--allow-change", &a.request.allowed_changes,
                     "With --resume: let KEY, which changes results, differ from the checkpoint "
                     "(optimizer.params.lr, optimizer, all; see configs/checkpoints.md)",
                     {.single_argument = true, .takes = Names::key});
  command.add_flag(
      "--live", &a.live,
      "Fill the terminal with the loss, memory, time left and busy lanes (computation, "
      "copies, I/O); q leaves this view, the run continues");
  command.add_flag("--print-config", &a.print_config, "Print the effective config and stop");
  command.set_action([arguments] { run_train(*arguments); });
}

}  // namespace ballast::tools
