#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "ballast/comm/communicator.h"
#include "ballast/config/config.h"
#include "ballast/engine/engine.h"
#include "ballast/planning/forecast.h"
#include "ballast/train/metrics.h"
#include "ballast/train/tokens.h"

namespace ballast::train {

/// What is known before the first step.
struct RunStart {
  const engine::Blueprint& blueprint;
  std::string device;
  std::string update_isa;  ///< of the CPU, or that the GPU updates
  std::string io_backend;  ///< "" when nothing is on NVMe
  double gemm_peak_flops = 0.0;
  std::uint64_t files = 0;
  TokenSplit split;
  std::uint64_t steps = 0;
};

/// One finished step for the progress display.
struct StepReport {
  const StepMetrics& metrics;
  std::uint64_t steps = 0;
  double gemm_share = 0.0;   ///< of the matrix products computed, as a share of the GEMM peak
  double eta_seconds = 0.0;  ///< to the end of the run at the recent pace
};

/// A finished run.
struct RunSummary {
  const engine::Blueprint& blueprint;
  std::uint64_t steps = 0;
  std::uint64_t skipped = 0;
  double seconds = 0.0;
  double tokens_per_second = 0.0;
  double gemm_share = 0.0;
  /// Of a step, by the rates kept for this machine; nothing when none are, and for several ranks.
  std::optional<double> predicted_seconds;
  double step_seconds = 0.0;     ///< of a step once the run has settled, median
  bool corrected_rates = false;  ///< those rates were off and are now nearer to this run
  double last_loss = 0.0;
  std::optional<double> held_out_loss;
  engine::EngineTotals totals;
  std::optional<planning::Wear>
      wear;                 ///< at the pace of the steps; nothing when nothing was written to NVMe
  Bytes peak_resident = 0;  ///< of the process
  std::string advice;       ///< what bounds the run and what would help, one or two sentences
};

/// Gets told how a run goes. Called from the training thread, on rank 0 only.
class Observer {
 public:
  virtual ~Observer() = default;
  /// The plan fits; nothing is allocated yet.
  virtual void planned(const engine::Blueprint& blueprint, const std::string& device) = 0;
  virtual void started(const RunStart& start) = 0;
  virtual void stepped(const StepReport& report) = 0;
  virtual void finished(const RunSummary& summary) = 0;
};

/// Which steps to trace, and where to (write_trace()).
struct TraceRequest {
  std::filesystem::path file;  ///< "": no trace
  std::uint64_t steps = 10;    ///< the first ones, their updates included
};

/// Trains as `config` says: lets the planner decide what it leaves open, plans, opens the data,
/// allocates, steps, evaluates, writes metrics.jsonl into config.ballast.out (made if need be).
/// `interrupted` (may be null) ends the run with Error(interrupted). Throws Error; what it had
/// allocated is gone then, swap file included. The trace is written once its steps are done, or
/// when the run fails before that.
///
/// `ranks`: the processes of the run, nullptr for this one alone. Collective: all run rank 0's
/// config, and rank 0 alone observes, and writes metrics and trace. What fails before the first
/// step is a comm::JointError; from then on each rank throws what it met.
void train(const config::Config& config, Observer& observer, const std::atomic<bool>* interrupted,
           const TraceRequest& trace = {}, comm::Ranks* ranks = nullptr);

}  // namespace ballast::train
