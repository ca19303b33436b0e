#include "tools/commands/train_run.h"

#include <algorithm>
#include <cctype>
#include <string_view>
#include <system_error>
#include <utility>

#include <fmt/format.h>

#include "ballast/checkpoint/checkpoints.h"
#include "ballast/comm/collective_try.h"
#include "ballast/comm/launch.h"
#include "ballast/config/resumption.h"
#include "ballast/core/error.h"
#include "ballast/train/used_directory.h"

#include "tools/command_line.h"
#include "tools/commands/run_directory.h"
#include "tools/process.h"
#include "tools/ranks.h"
#include "tools/usage/paths.h"

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

}  // namespace ballast::tools
