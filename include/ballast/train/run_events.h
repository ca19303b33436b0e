#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

#include "ballast/core/units.h"
#include "ballast/data/data_summary.h"
#include "ballast/engine/blueprint.h"
#include "ballast/engine/engine.h"
#include "ballast/planner/forecast.h"
#include "ballast/train/metrics.h"

namespace ballast::train {

/// Facts that are known before the first step.
struct RunStart {
  const engine::Blueprint& blueprint;
  std::string device;
  std::string update_isa;  ///< of the CPU, or "on the GPU"
  std::string io_backend;  ///< "" if nothing is on NVMe
  double gemm_peak_flops = 0.0;
  double fill_seconds = 0.0;  ///< to make the initial states and move them home
  Bytes filled_on_nvme = 0;   ///< the bytes of them that were written to NVMe
  data::DataSummary data;
  std::uint64_t steps = 0;
  std::filesystem::path resumed;   ///< the checkpoint that the run continues; "" if it begins
  std::uint64_t resumed_step = 0;  ///< its last step
};

/// One finished step for the progress display.
struct StepReport {
  const StepMetrics& metrics;
  std::uint64_t steps = 0;
  double gemm_share = 0.0;   ///< rate of the matrix products as a share of the GEMM peak
  double eta_seconds = 0.0;  ///< to the end of the run at the mean pace so far
};

/// A run that has finished or was interrupted after its first step.
struct RunSummary {
  const engine::Blueprint& blueprint;
  std::uint64_t steps = 0;          ///< finished ones
  std::uint64_t planned_steps = 0;  ///< more than `steps` if the run was interrupted
  bool interrupted = false;
  std::uint64_t skipped = 0;
  std::uint64_t went_back = 0;     ///< times to a checkpoint (ballast.on_error, ballast.spike)
  std::uint64_t rolled_back = 0;   ///< steps whose speculative updates were undone and repeated
  double seconds = 0.0;            ///< from the first step to the end, with evaluations
  double training_seconds = 0.0;   ///< of the steps alone
  double tokens_per_second = 0.0;  ///< of the steps alone
  double gemm_share = 0.0;
  /// Predicted step time with this machine's cached rates; empty without them and for several
  /// ranks.
  std::optional<double> predicted_seconds;
  double step_seconds = 0.0;     ///< median step time after warm-up, or the mean of all steps
  bool corrected_rates = false;  ///< whether the cached rates were corrected by this run
  double last_loss = 0.0;
  std::optional<StepMetrics::Rewards> last_rewards;  ///< of the last step, when trained on pairs
  std::optional<double> held_out_loss;
  engine::EngineTotals totals;
  std::optional<planner::Wear> wear;  ///< empty if no step wrote to NVMe
  Bytes peak_resident = 0;            ///< of the process
  std::filesystem::path weights;      ///< the folder of the saved weights; "" if there is none
  std::filesystem::path checkpoint;   ///< the newest one that this run has written; "" if none
  std::filesystem::path trace;        ///< its file; "" if there is none
  std::filesystem::path moved_to;     ///< the run directory, if it was renamed meanwhile
  std::string advice;                 ///< bottleneck and best improvement, one or two sentences
};

/// A run whose last step an earlier process has finished.
struct FinishedRun {
  std::filesystem::path directory;
  std::uint64_t steps = 0;
  double last_loss = 0.0;
  std::filesystem::path weights = {};     ///< the folder of the saved weights; "" if there is none
  std::filesystem::path checkpoint = {};  ///< the newest one; "" if there is none
};

/// Receives the events of a run, on the training thread of rank 0.
class Observer {
 public:
  virtual ~Observer() = default;
  /// The plan fits; nothing is allocated yet.
  virtual void planned(const engine::Blueprint& blueprint, const std::string& device) = 0;
  virtual void started(const RunStart& start) = 0;
  virtual void stepped(const StepReport& report) = 0;
  /// Initial weights are read: `done` of `total` bytes. One call at a time, on any thread, while
  /// the training thread waits.
  virtual void reading(Bytes /*done*/, Bytes /*total*/) {}
  /// The trained weights are written.
  virtual void saving(Bytes /*done*/, Bytes /*total*/) {}
  /// Also after an interrupt, and if only the weights could not be saved.
  virtual void finished(const RunSummary& summary) = 0;
  /// With RunDirectory::automatic, instead of all others: nothing is left to do.
  virtual void already_finished(const FinishedRun& /*run*/) {}
};

}  // namespace ballast::train
