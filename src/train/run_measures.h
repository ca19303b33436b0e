#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <vector>

#include "ballast/calibrate/machine_rates.h"
#include "ballast/core/cpu.h"
#include "ballast/data/loader.h"
#include "ballast/train/metrics.h"
#include "ballast/train/run_events.h"

#include "src/train/proven_peak.h"
#include "src/train/run_engine.h"

namespace ballast::train {

/// Seconds for the measurement of the GEMM peak before a run of `steps`, which must not take longer
/// than the training of a tiny model.
double seconds_to_measure(const engine::Blueprint& blueprint, std::uint64_t steps);

/// Times, bytes and counts of a run, from its first step on. Steps that are repeated after going
/// back count as often as they ran.
class RunMeasures {
 public:
  /// `gemm_peak`: FLOP/s of the matrix products of one rank.
  RunMeasures(const RestartableEngine& engine, double gemm_peak)
      : engine_(engine), gemm_peak_(gemm_peak) {}

  /// The first step begins.
  void begin();
  /// A step has ended, which trained on `batch`.
  StepMetrics step(const data::Batch& batch, const engine::StepResult& result, double rate);
  /// The next step begins after work between steps, such as an evaluation. That work counts for no
  /// step, neither its time nor what the lanes did.
  void go_on();
  /// All updates were waited for: the next steps fill the pipeline again.
  void unsettle() { settled_steps_ = 0; }
  void add_evaluation(double seconds) { evaluation_seconds_ += seconds; }
  /// The last step has ended.
  void end() { seconds_ = seconds_so_far(); }

  /// How many have run.
  [[nodiscard]] std::uint64_t steps() const { return count_; }
  [[nodiscard]] bool ended() const { return seconds_ > 0.0; }
  /// Rate of the matrix products of a step that takes `step_seconds`, as a share of the GEMM peak:
  /// of the fastest rate seen so far, at most 1.
  [[nodiscard]] double gemm_share(double step_seconds);
  /// Mean seconds of a step.
  [[nodiscard]] double pace() const;
  /// Seconds of steps and evaluations.
  [[nodiscard]] double busy_seconds() const { return training_seconds_ + evaluation_seconds_; }
  /// Bytes written to each swap path since begin().
  [[nodiscard]] std::vector<Bytes> written() const;
  /// Sets what is measured: times, tokens, counts, totals. `prediction` may correct its rates.
  void summarize(RunSummary& summary, const calibrate::RunPrediction* prediction);

 private:
  [[nodiscard]] double seconds_so_far() const;
  void add_lanes(StepMetrics& metrics);
  void note(const StepMetrics& metrics);

  const RestartableEngine& engine_;
  ProvenPeak gemm_peak_;
  std::chrono::steady_clock::time_point started_;
  std::chrono::steady_clock::time_point last_step_end_;
  double seconds_ = 0.0;  ///< from the first step to the end; 0 before it
  double training_seconds_ = 0.0;
  double evaluation_seconds_ = 0.0;
  CpuWatch watch_;  ///< since the first step
  std::vector<calibrate::MeasuredStep> steps_;
  std::uint64_t settled_steps_ = 0;  ///< since the start or the last wait for all updates
  std::uint64_t count_ = 0;          ///< steps
  std::uint64_t tokens_ = 0;         ///< trained on, without padding
  std::uint64_t skipped_ = 0;
  std::uint64_t rolled_back_ = 0;
  double last_loss_ = 0.0;
  std::optional<StepMetrics::Rewards> last_rewards_;
  engine::EngineTotals before_;  ///< when the step began
  std::vector<Bytes> filled_;    ///< written to each NVMe path before the first step
};

}  // namespace ballast::train
