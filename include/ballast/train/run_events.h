#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

#include "ballast/core/units.h"
#include "ballast/data/tokens.h"
#include "ballast/engine/blueprint.h"
#include "ballast/engine/engine.h"
#include "ballast/setup/forecast.h"
#include "ballast/train/metrics.h"

namespace ballast::train {

/// Facts known before the first step.
struct RunStart {
  const engine::Blueprint& blueprint;
  std::string device;
  std::string update_isa;        ///< instruction set of the CPU, or "on the GPU"
  std::string io_backend;        ///< "" if nothing is on NVMe
  double gemm_peak_flops = 0.0;  ///< all devices of the rank together
  double fill_seconds = 0.0;     ///< time to create the initial states and move them to their homes
  Bytes filled_on_nvme = 0;      ///< bytes of the initial states that were written to NVMe
  data::DataSummary data;
  std::string rate;  ///< learning rate, schedule and optimizer, in words
  std::uint64_t steps = 0;
  std::filesystem::path resumed;   ///< checkpoint that the run continues from; "" for a new run
  std::uint64_t resumed_step = 0;  ///< last step of that checkpoint
};

/// One finished step, for the progress display.
struct StepReport {
  const StepMetrics& metrics;
  std::uint64_t steps = 0;
  double gemm_share = 0.0;   ///< rate of matrix products as a share of the GEMM peak
  double eta_seconds = 0.0;  ///< remaining time at the mean pace so far
};

/// A run that has finished or was interrupted after its first step.
struct RunSummary {
  const engine::Blueprint& blueprint;
  std::uint64_t steps = 0;          ///< finished steps
  std::uint64_t planned_steps = 0;  ///< more than `steps` if the run was interrupted
  bool interrupted = false;
  std::uint64_t skipped = 0;
  std::uint64_t went_back = 0;     ///< returns to a checkpoint (ballast.on_error, ballast.spike)
  std::uint64_t rolled_back = 0;   ///< steps whose speculative updates were undone and repeated
  double seconds = 0.0;            ///< from the first step to the end, including evaluations
  double training_seconds = 0.0;   ///< time of the steps alone
  double tokens_per_second = 0.0;  ///< over the steps alone
  double gemm_share = 0.0;
  /// Predicted step time, from this machine's cached rates. Empty without them and with several
  /// ranks.
  std::optional<double> predicted_seconds;
  double step_seconds = 0.0;        ///< median step time after warm-up, or the mean of all steps
  bool corrected_rates = false;     ///< whether this run corrected the cached rates
  std::optional<double> last_loss;  ///< loss of the last step; empty if it has no target
  std::optional<StepMetrics::Rewards>
      last_rewards;                   ///< rewards of the last step, when trained on pairs
  std::uint64_t without_targets = 0;  ///< steps without a target, and so without a loss
  std::optional<double> held_out_loss;
  engine::EngineTotals totals;
  std::optional<setup::Wear> wear;   ///< empty if no step wrote to NVMe
  Bytes peak_resident = 0;           ///< peak resident memory of the process
  std::filesystem::path weights;     ///< folder of the saved weights; "" if there is none
  std::filesystem::path checkpoint;  ///< latest checkpoint written by this run; "" if none
  bool lacks_checkpoint = false;     ///< the run writes checkpoints, but the last step has none
  std::filesystem::path trace;       ///< file of the trace; "" if there is none
  std::filesystem::path
      moved_to;        ///< new name of the run directory, if it was renamed during the run
  std::string advice;  ///< bottleneck and best improvement, in one or two sentences
};

/// A run that an earlier process has completed.
struct FinishedRun {
  std::filesystem::path directory;
  std::uint64_t steps = 0;
  std::optional<double> last_loss;        ///< loss of the last step; empty if it was not a number
  std::filesystem::path weights = {};     ///< folder of the saved weights; "" if there is none
  std::filesystem::path checkpoint = {};  ///< latest checkpoint; "" if there is none
};

/// Receives the events of a run, on the training thread of rank 0.
class Observer {
 public:
  virtual ~Observer() = default;
  /// The plan fits. Nothing is allocated yet.
  virtual void planned(const engine::Blueprint& blueprint, const std::string& device) = 0;
  virtual void started(const RunStart& start) = 0;
  virtual void stepped(const StepReport& report) = 0;
  /// Initial weights are being read: `done` of `total` bytes. One call at a time, from any thread,
  /// while the training thread waits.
  virtual void reading(Bytes /*done*/, Bytes /*total*/) {}
  /// Trained weights are being written.
  virtual void saving(Bytes /*done*/, Bytes /*total*/) {}
  /// Called also after an interrupt, and if saving the weights failed.
  virtual void finished(const RunSummary& summary) = 0;
  /// With RunDirectory::automatic: nothing is left to do. No other event follows.
  virtual void already_finished(const FinishedRun& /*run*/) {}
};

}  // namespace ballast::train
