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

/// Request for a run.
struct TrainRequest {
  ConfigRequest config;
  std::filesystem::path out;               ///< empty: that of the config, or a new one
  std::uint64_t steps = 0;                 ///< 0: that of the config
  std::optional<std::uint64_t> seed = {};  ///< empty: that of the config
  train::TraceRequest trace;
  bool serial = false;
  bool overwrite = false;
  std::string resume;  ///< "": no; kFlagAlone: the run of `out`; otherwise the path to resume from
  std::vector<std::string> allowed_changes;  ///< see train::RunOptions
  planner::PlanSource source;                ///< file with rates or a plan
  std::vector<std::string> command;          ///< words of the request, for run.json
};

/// The config with the request's changes. Throws Error(config).
config::Config load_config(const TrainRequest& request, std::uint32_t world);

/// Throws Error(usage) for options that are missing or contradict each other, and for a run
/// directory with files of another run.
void check_run(const TrainRequest& request, const config::Config& config);

/// The command, or call, with which the caller continues the run.
std::string resuming_command(const TrainRequest& request, const config::Config& config);

/// Makes the observer of a run when its run directory is known.
using MakeObserver = std::function<train::Observer&(const config::Config&)>;

/// Whether --resume continues a run that ends before its first step: it has checkpoints already.
bool can_resume(const TrainRequest& request, const config::Config& config);

/// Trains `config`, the result of load_config() after check_run(). Makes a run directory if none is
/// named, and removes it if the run fails before it has written. interrupted() ends the run. Throws
/// Error.
train::Ending train_run(const TrainRequest& request, config::Config config,
                        const MakeObserver& observer, comm::Ranks* ranks = nullptr);

}  // namespace ballast::tools
