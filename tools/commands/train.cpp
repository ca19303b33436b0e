#include <algorithm>
#include <exception>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "ballast/comm/collective_try.h"
#include "ballast/comm/communicator.h"
#include "ballast/config/config.h"
#include "ballast/core/error.h"
#include "ballast/core/log.h"
#include "ballast/train/trainer.h"

#include "tools/command_line.h"
#include "tools/commands.h"
#include "tools/commands/train_run.h"
#include "tools/console/console.h"
#include "tools/console/ending_notice.h"
#include "tools/live/screen.h"
#include "tools/process.h"
#include "tools/ranks.h"
#include "tools/usage/exit_status.h"

namespace ballast::tools {
namespace {

constexpr std::uint64_t kMostSteps = std::uint64_t{1} << 40U;  // like ballast.steps

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
  if (status != 0) throw Reported{status};
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
    throw Reported{status};
  }
}

}  // namespace

void add_train(Command program) {
  auto arguments = std::make_shared<TrainArguments>();
  auto& a = *arguments;
  Command command = program.add_command("train", "Train the model of CONFIG");
  command.add_option("CONFIG", &a.request.config.file, "JSON config (keys: ballast config-keys)",
                     {.required = true, .takes = Names::file, .extensions = {".json"}});
  command.add_option("--set", &a.request.config.overrides, "Override a key: path.to.key=value",
                     {.single_argument = true, .takes = Names::setting});
  command.add_option("--steps", &a.request.steps, "Steps to train; overrides ballast.steps",
                     {.range = std::pair(std::uint64_t{1}, kMostSteps)});
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
                     "(optimizer.params.lr, optimizer, all; see configs/README.md)",
                     {.single_argument = true, .takes = Names::key});
  command.add_flag(
      "--live", &a.live,
      "Fill the terminal with the loss, memory, time left and busy lanes (computation, "
      "copies, I/O); q leaves this view, the run continues");
  command.add_flag("--print-config", &a.print_config, "Print the effective config and stop");
  command.set_action([arguments] { run_train(*arguments); });
}

}  // namespace ballast::tools
