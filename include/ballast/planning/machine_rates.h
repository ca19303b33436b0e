#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <filesystem>
#include <functional>
#include <optional>
#include <span>
#include <string>

#include "ballast/config/config.h"
#include "ballast/engine/blueprint.h"
#include "ballast/model/architecture.h"
#include "ballast/planning/calibrate.h"
#include "ballast/schedule/rates.h"
#include "ballast/schedule/simulator.h"

namespace ballast::planning {

/// calibrate(), or what stands for it in tests.
using Calibrator = std::function<Calibration(const config::Config&, const model::Architecture&,
                                             const std::atomic<bool>* interrupted)>;

/// The rates of this machine for the model and paths of `config`: cached ones with the same
/// calibration_key(), or (always with `recalibrate`) those of a new calibration, which takes a few
/// seconds and is cached, unless the machine was disturbed. Logs a warning then, and if the cache
/// cannot be read or written. Throws Error like calibrate().
schedule::Rates machine_rates(const config::Config& config, const model::Architecture& model,
                              bool recalibrate = false,
                              const std::atomic<bool>* interrupted = nullptr,
                              const Calibrator& measure = calibrate);

/// Measured times of a training step: total seconds, and busy seconds of each lane.
struct MeasuredStep {
  double seconds = 0.0;
  std::array<double, schedule::kLaneCount> busy_seconds{};
};

/// Fewest steps from which rates are corrected.
inline constexpr std::size_t kEnoughSteps = 20;

/// The median of `steps`, for the step and for each lane. Empty for fewer than kEnoughSteps, or if
/// the quartiles differ by more than 15% of the median: then other work disturbed the run.
std::optional<MeasuredStep> typical_step(std::span<const MeasuredStep> steps);

/// `rates` corrected so that `predicted` approaches `measured`: the rates of each lane that takes
/// at least 1% of the predicted step are divided by its measured over its predicted busy time. A
/// lane that differs by more than a factor of 16 keeps its rates: that is not an error of a rate.
schedule::Rates corrected(schedule::Rates rates, const schedule::Prediction& predicted,
                          const MeasuredStep& measured);

/// Prediction of a run of one rank with the cached rates.
class RunPrediction {
 public:
  /// `config`: as given to machine_rates(); `blueprint`: of the run. Empty if no rates are cached,
  /// if a rate that the run needs is missing, and for serial or delayed runs. Measures nothing.
  static std::optional<RunPrediction> find(const config::Config& config,
                                           const engine::Blueprint& blueprint);

  [[nodiscard]] double step_seconds() const { return prediction_.step_seconds; }
  [[nodiscard]] const schedule::Prediction& prediction() const { return prediction_; }
  [[nodiscard]] const schedule::Rates& rates() const { return rates_; }

  /// Caches corrected() rates if the prediction is off by more than 5%. Returns whether it did.
  /// Steps beside much other work (`others_share`: see CpuWatch) correct nothing.
  [[nodiscard]] bool correct(const MeasuredStep& measured, double others_share) const;

 private:
  RunPrediction(std::string key, schedule::Rates rates, schedule::Prediction prediction);

  std::string key_;
  schedule::Rates rates_;
  schedule::Prediction prediction_;
};

/// Cache file of `key`: $XDG_CACHE_HOME/ballast/rates-HASH.json, or the same below ~/.cache. Empty
/// if neither variable is set.
std::filesystem::path rates_cache_file(const std::string& key);

}  // namespace ballast::planning
