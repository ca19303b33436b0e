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
#include "ballast/core/error.h"
#include "ballast/formats/file_formats.h"
#include "ballast/setup/forecast.h"
#include "ballast/train/trainer.h"

#include "tools/command_line.h"

namespace ballast::tools {

/// Caller that asks for a plan or a run. Errors name its options.
enum class Caller { program, python };

/// "--out DIR" or "out=DIR".
std::string option(Caller caller, const std::string& name, const std::string& value = "");

/// A config and changes to it.
struct ConfigRequest {
  std::filesystem::path file;
  /// JSON text instead of the file's content; the file then only gives the name. Paths in it are
  /// relative to the working directory.
  std::optional<std::string> text;
  std::filesystem::path model;        ///< model.path, relative to the working directory; "": none
  std::vector<std::string> data;      ///< training data instead of the config's
  std::uint64_t sequence_length = 0;  ///< 0: the config's; with `model` see train::usual_length()
  std::vector<std::string> overrides;
  Caller caller = Caller::program;

  /// Throws Error(config).
  [[nodiscard]] config::Config load(std::uint32_t world) const;
};

/// Adds the options that replace inputs of a config: --model, --data, --sequence-length and --set.
void add_inputs(Command& command, ConfigRequest& request);

/// If `file`, whose reader failed with `error`, is of another kind than `wanted`, throws
/// Error(config) with that kind. Otherwise returns.
void refuse_other_kind(const std::filesystem::path& file, formats::Settings wanted,
                       const Error& error);

/// Logs the DeepSpeed keys that are ignored, in one line, and those that have another meaning here.
/// The reasons why keys are ignored have the level debug.
void log_notes(const config::Config& config);

/// A name for a run directory, from `config` and the time, below the user's state directory. Does
/// not create it.
std::filesystem::path default_run_directory(const std::filesystem::path& config);

/// Creates default_run_directory(`config`), with a suffix if it exists already, so that no two runs
/// share one. Throws Error(io).
std::filesystem::path create_run_directory(const std::filesystem::path& config);

struct ForecastRequest {
  ConfigRequest config;
  std::filesystem::path rates;  ///< file of the machine's rates; "": measure this machine
  std::uint32_t world = 1;
  bool recalibrate = false;
};

/// Loads the config of `request`, with the tiles of planner::fitting_tiles(). Throws Error.
config::Config forecast_config(const ForecastRequest& request);

/// Predicts a run of `config`, the config of `request`. Measures this machine's rates unless they
/// are cached or given. Throws Error.
setup::Forecast forecast_of(const ForecastRequest& request, const config::Config& config);

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
  setup::PlanSource source;                  ///< file with rates or a plan
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
