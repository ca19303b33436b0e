#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <filesystem>
#include <functional>
#include <optional>
#include <span>
#include <string>

#include "ballast/calibrate/calibrate.h"
#include "ballast/engine/blueprint.h"
#include "ballast/engine/run_inputs.h"
#include "ballast/model/architecture.h"
#include "ballast/plan/rates.h"
#include "ballast/plan/simulator.h"
#include "ballast/text/json.h"

namespace ballast::calibrate {

/// Reads a rates file: JSON with comments, keys as in configs/rates/README.md, units in the names
/// of the keys. Throws Error(config): one line with the file, the key and the problem.
plan::Rates load_rates(const std::filesystem::path& file);

/// Returns load_rates() of a file that a user names, with rates for what it lacks
/// (plan::complete()).
plan::Rates given_rates(const std::filesystem::path& file);

/// Reads rates in the form of a rates file from a JSON value of the file `name`. Throws like
/// load_rates().
plan::Rates read_rates_json(const text::Json& object, const std::string& name);
text::Json rates_json(const plan::Rates& rates);

/// Writes `rates` so that load_rates() returns equal ones. Replaces the file atomically. Throws
/// Error(io).
void save_rates(const std::filesystem::path& file, const plan::Rates& rates);

/// Returns the cached rates with that key, named "this machine". Empty if there are none; logs a
/// warning if the file cannot be used.
std::optional<plan::Rates> read_rates(const std::string& key);

/// Writes the cache file of `key`. Returns whether it succeeded; otherwise logs a warning.
bool keep_rates(plan::Rates rates, const std::string& key);

/// Returns whether `fresh` rates are better than `kept` ones (nullptr: none): they were measured
/// without much other work, or with no more of it than the cached ones.
bool replaces(const plan::Rates& fresh, const plan::Rates* kept);

/// Returns "40 s", "3 minutes", "5 hours" or "12 days".
std::string describe_age(double seconds);

/// Number of this process's CPUs that other work keeps busy, observed for 60 ms.
double others_cpus_now();

/// Seconds since 1970, UTC.
double seconds_since_1970();

/// Sources of facts for machine_rates(), which tests replace.
struct RatesSource {
  std::function<Calibration(const engine::RunInputs&, const std::atomic<bool>* interrupted,
                            const CalibrationStart&)>
      measure = calibrate;
  std::function<double()> others_cpus = others_cpus_now;
  std::function<double()> now = seconds_since_1970;
  /// True if other ranks of the run wait on the same CPUs, which looks like other work.
  bool beside_ranks = false;
};

/// Returns the rates of an idle machine like this one, for the model and paths of `run`. Cached
/// rates with the same calibration_key() are used immediately; on a busy machine a line reports
/// this, with their age and the cost of the other work. Otherwise a calibration measures the parts
/// that are not cached under their part_key(), which takes a few seconds. On a busy machine it
/// corrects for the other work. Its rates are cached unless the cached ones were disturbed less.
/// They are measured again when the machine is quiet. `recalibrate` measures everything. Logs a
/// warning if the cache cannot be read or written. Throws Error like calibrate().
plan::Rates machine_rates(const engine::RunInputs& run, bool recalibrate = false,
                          const std::atomic<bool>* interrupted = nullptr,
                          const RatesSource& source = {});

/// Measured times of a training step: total seconds, and busy seconds per lane.
struct MeasuredStep {
  double seconds = 0.0;
  std::array<double, plan::kLaneCount> busy_seconds{};
};

/// Minimum number of steps for a correction of rates.
inline constexpr std::size_t kEnoughSteps = 20;

/// Returns the median of `steps`, for the step and for each lane. Empty for fewer than
/// kEnoughSteps, or if the quartiles differ by more than 15% of the median, because other work then
/// disturbed the run.
std::optional<MeasuredStep> typical_step(std::span<const MeasuredStep> steps);

/// Returns `rates`, corrected so that `predicted` approaches `measured`: the rates of each lane
/// that takes at least 1% of the predicted step are divided by the ratio of measured to predicted
/// busy time. A lane that differs by more than a factor of 16 keeps its rates, because that is not
/// an error of a rate.
plan::Rates corrected(plan::Rates rates, const plan::Prediction& predicted,
                      const MeasuredStep& measured);

/// Prediction for a run of one rank, from cached rates.
class RunPrediction {
 public:
  /// `asked`: as passed to machine_rates(). `blueprint`: of the run. `given`: rates with which the
  /// run was planned instead of cached ones, or nullptr. Empty if no rates are cached, if a rate
  /// that the run needs is missing, and for serial or delayed runs. Measures nothing.
  static std::optional<RunPrediction> find(const engine::RunInputs& asked,
                                           const engine::Blueprint& blueprint,
                                           const plan::Rates* given = nullptr);

  [[nodiscard]] double step_seconds() const { return prediction_.step_seconds; }
  [[nodiscard]] const plan::Prediction& prediction() const { return prediction_; }
  [[nodiscard]] const plan::Rates& rates() const { return rates_; }

  /// Caches corrected() rates if the prediction is off by more than 5%. Returns whether it did.
  /// Does nothing for steps during much other work (`others_share`: see CpuWatch) and for given
  /// rates.
  [[nodiscard]] bool correct(const MeasuredStep& measured, double others_share) const;

 private:
  RunPrediction(std::string key, plan::Rates rates, plan::Prediction prediction);

  std::string key_;  ///< "" for given rates
  plan::Rates rates_;
  plan::Prediction prediction_;
};

/// Describes how much the repetitions of the measurements of `rates` differed; "" if they were not
/// measured.
std::string describe_spread(const plan::Rates& rates);

/// Returns the cache file of `key`: $XDG_CACHE_HOME/ballast/rates-HASH.json, or the same below
/// ~/.cache. Empty if neither variable is set.
std::filesystem::path rates_cache_file(const std::string& key);

}  // namespace ballast::calibrate
