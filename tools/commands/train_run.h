#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ballast/comm/communicator.h"
#include "ballast/config/config.h"
#include "ballast/train/trainer.h"

#include "tools/commands/request.h"

namespace ballast::tools {

/// A run that is asked for.
struct TrainRequest {
  ConfigRequest config;
  std::filesystem::path out;               ///< "": that of the config, or a new one
  std::uint64_t steps = 0;                 ///< 0: those of the config
  std::optional<std::uint64_t> seed = {};  ///< nothing: that of the config
  train::TraceRequest trace;
  bool serial = false;
  bool overwrite = false;
  std::string resume;  ///< "": no; kFlagAlone: the run of `out`; otherwise from where
  std::vector<std::string> allowed_changes;  ///< of a resume: see train::RunOptions
  planner::PlanSource source;                ///< files with rates or a plan
  std::vector<std::string> command;          ///< the words that have asked for it, for run.json
};

/// The config with the request's changes. Throws Error(config).
config::Config load_config(const TrainRequest& request, std::uint32_t world);

/// Throws Error(usage) for options that are missing or contradict each other, and for a run
/// directory with files of another run.
void check_run(const TrainRequest& request, const config::Config& config);

/// How the caller goes on with the run: a command, or a call.
std::string resuming_command(const TrainRequest& request, const config::Config& config);

/// Makes the observer of a run, when its run directory is known.
using MakeObserver = std::function<train::Observer&(const config::Config&)>;

/// Trains `config`, which is load_config() and has passed check_run(). Makes a run directory if
/// none is named, and removes it if the run fails before it has written. interrupted() ends the
/// run. Throws Error.
void train_run(const TrainRequest& request, config::Config config, const MakeObserver& observer,
               comm::Ranks* ranks = nullptr);

}  // namespace ballast::tools
