#pragma once

#include <array>
#include <cstddef>
#include <filesystem>
#include <optional>
#include <span>
#include <string>

#include "ballast/config/config.h"
#include "ballast/engine/blueprint.h"
#include "ballast/model/architecture.h"
#include "ballast/schedule/rates.h"
#include "ballast/schedule/simulator.h"

namespace ballast::planning {

/// The rates of this machine for the model and paths of `config`: those of an earlier calibration
/// with the same calibration_key(), or of a new one, which takes a few seconds and is kept
/// for the next time. `recalibrate` asks for a new one. A file that cannot be read or written is
/// said in a log line and is no error. Throws Error like calibrate().
schedule::Rates machine_rates(const config::Config& config, const model::Architecture& model,
                              bool recalibrate = false);

/// A training step as it was: seconds in all, and those in which each lane was busy.
struct MeasuredStep {
  double seconds = 0.0;
  std::array<double, schedule::kLaneCount> busy_seconds{};
};

/// Steps from which rates are corrected, at least.
inline constexpr std::size_t kEnoughSteps = 20;

/// The median of `steps`, for the step and for each lane. Nothing when there are fewer than
/// kEnoughSteps, or when their quartiles are further apart than 15% of the median: then something
/// else ran beside them.
std::optional<MeasuredStep> typical_step(std::span<const MeasuredStep> steps);

/// `rates` with which `predicted` comes nearer to `measured`: those of each lane that takes at
/// least 1% of the predicted step are divided by how much longer it was busy than predicted. A lane
/// that was off by more than a factor of two keeps its rates: that is no error of a measurement.
schedule::Rates corrected(schedule::Rates rates, const schedule::Prediction& predicted,
                          const MeasuredStep& measured);

/// What the rates that are kept for `config` say of a run of one rank.
class RunPrediction {
 public:
  /// `config`: as machine_rates() had it; `blueprint`: of the run. Nothing when no rates are kept,
  /// when they lack one that the run needs, and for a run that is slowed down on purpose (serial,
  /// delayed). Measures nothing.
  static std::optional<RunPrediction> find(const config::Config& config,
                                           const engine::Blueprint& blueprint);

  [[nodiscard]] double step_seconds() const { return prediction_.step_seconds; }

  /// Keeps corrected() rates where the prediction is off by more than 5%. Whether it did.
  [[nodiscard]] bool correct(const MeasuredStep& measured) const;

 private:
  RunPrediction(std::string key, schedule::Rates rates, schedule::Prediction prediction);

  std::string key_;
  schedule::Rates rates_;
  schedule::Prediction prediction_;
};

/// Where the rates of that key are kept: $XDG_CACHE_HOME/ballast/rates-HASH.json, or in ~/.cache.
/// Empty when neither is there.
std::filesystem::path rates_cache_file(const std::string& key);

}  // namespace ballast::planning
