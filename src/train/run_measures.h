#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "ballast/calibrate/machine_rates.h"
#include "ballast/core/machine.h"
#include "ballast/data/loader.h"
#include "ballast/setup/run_plan.h"
#include "ballast/train/metrics.h"
#include "ballast/train/run_events.h"

#include "src/train/run_engine.h"

namespace ballast::train {

/// A measured peak rate. Faster work proves that the measurement was disturbed, and raises the
/// peak, so that no share exceeds 1.
class ProvenPeak {
 public:
  explicit ProvenPeak(double measured) : peak_(measured) {}

  /// Returns `rate` as a share of the peak; 0 if either is unknown (0).
  double share_of(double rate) {
    if (peak_ <= 0.0 || !(rate > 0.0)) return 0.0;
    peak_ = std::max(peak_, rate);
    return rate / peak_;
  }
  [[nodiscard]] double value() const { return peak_; }

 private:
  double peak_;
};

/// Seconds to measure the GEMM peak before a run of `steps`, which must not take longer than
/// training a tiny model.
double seconds_to_measure(const engine::Blueprint& blueprint, std::uint64_t steps);

/// Times, bytes and counts of a run from its first step on. Steps that are repeated after going
/// back count each time.
class RunMeasures {
 public:
  /// `gemm_peak`: FLOP/s of matrix products on one rank.
  RunMeasures(const RestartableEngine& engine, double gemm_peak)
      : engine_(engine), gemm_peak_(gemm_peak) {}

  /// Marks the beginning of the first step.
  void begin();
  /// Marks the end of a step that trained on `batch`.
  StepMetrics step(const data::Batch& batch, const engine::StepResult& result, double rate);
  /// Marks the beginning of the next step after other work, such as an evaluation. The time of that
  /// work, and what lanes did in it, count for no step.
  void go_on();
  /// All updates were awaited, so the next steps fill the pipeline again.
  void unsettle() { settled_steps_ = 0; }
  void add_evaluation(double seconds) { evaluation_seconds_ += seconds; }
  /// Marks the end of the last step.
  void end() { seconds_ = seconds_so_far(); }

  /// Number of steps that have run.
  [[nodiscard]] std::uint64_t steps() const { return count_; }
  [[nodiscard]] bool ended() const { return seconds_ > 0.0; }
  /// Rate of matrix products, for a step of `step_seconds`, as a share of the GEMM peak or of the
  /// fastest rate so far; at most 1.
  [[nodiscard]] double gemm_share(double step_seconds);
  /// Mean seconds per step.
  [[nodiscard]] double pace() const;
  /// Seconds of steps and evaluations.
  [[nodiscard]] double busy_seconds() const { return training_seconds_ + evaluation_seconds_; }
  /// Bytes written to each swap path since begin().
  [[nodiscard]] std::vector<Bytes> written() const;
  /// Sets the measured fields: times, tokens, counts, totals. `prediction` may correct its rates.
  void summarize(RunSummary& summary, const calibrate::RunPrediction* prediction);
  /// Returns the bottleneck and the best improvement, in one or two sentences. After an interrupt,
  /// nobody wants to wait for the simulations that find an improvement.
  [[nodiscard]] std::string advice(const plan::LaneTotals& lanes, const setup::RunPlan& plan,
                                   bool interrupted) const;

 private:
  [[nodiscard]] double seconds_so_far() const;
  void add_lanes(StepMetrics& metrics);
  void add_devices(StepMetrics& metrics, const engine::EngineTotals& totals) const;
  void note(const StepMetrics& metrics);
  void note_without_targets(std::uint64_t step);

  const RestartableEngine& engine_;
  ProvenPeak gemm_peak_;
  std::chrono::steady_clock::time_point started_;
  std::chrono::steady_clock::time_point last_step_end_;
  double seconds_ = 0.0;  ///< from the first step to the end; 0 before the end
  double training_seconds_ = 0.0;
  double evaluation_seconds_ = 0.0;
  CpuWatch watch_;  ///< from the first step on
  std::vector<calibrate::MeasuredStep> steps_;
  std::uint64_t settled_steps_ = 0;  ///< steps since the start or the last wait for all updates
  std::uint64_t count_ = 0;          ///< steps
  std::uint64_t tokens_ = 0;         ///< tokens trained on, without padding
  std::uint64_t skipped_ = 0;
  std::uint64_t rolled_back_ = 0;
  std::uint64_t without_targets_ = 0;
  std::optional<double> last_loss_;
  std::optional<StepMetrics::Rewards> last_rewards_;
  engine::EngineTotals before_;  ///< totals at the beginning of the step
  std::vector<Bytes> filled_;    ///< bytes written to each NVMe path before the first step
};

}  // namespace ballast::train
