#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "ballast/comm/communicator.h"
#include "ballast/config/config.h"
#include "ballast/data/data_summary.h"
#include "ballast/engine/engine.h"
#include "ballast/planner/forecast.h"
#include "ballast/planner/run_plan.h"
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
  std::filesystem::path resumed;   ///< the checkpoint from which the run goes on; "" if it begins
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
  /// Initial weights are read: so many bytes of all. One call at a time, on any thread, while the
  /// training thread waits.
  virtual void reading(Bytes /*done*/, Bytes /*total*/) {}
  /// The trained weights are written.
  virtual void saving(Bytes /*done*/, Bytes /*total*/) {}
  /// Also after an interrupt, and if only the weights could not be saved.
  virtual void finished(const RunSummary& summary) = 0;
  /// With RunDirectory::automatic, instead of all others: nothing is left to do.
  virtual void already_finished(const FinishedRun& /*run*/) {}
};

/// Options of the trace (write_trace()).
struct TraceRequest {
  std::filesystem::path file;         ///< "": no trace
  std::uint64_t steps = 10;           ///< the first ones, their updates included
  bool overwrite = false;             ///< replaces any file, not only a trace of `ballast train`
  std::filesystem::path config = {};  ///< file of the run's config, which is never replaced
};

/// What a run does with the files in its run directory.
enum class RunDirectory : std::uint8_t {
  fresh,        ///< there must be none
  overwritten,  ///< they are of another run
  continued,    ///< the run continues from one of its checkpoints
  automatic     ///< continued if there is a checkpoint; otherwise the run begins, also in the files
                ///< of a run of this directory that was killed before its first checkpoint
};

/// Options of a run that are not part of its config.
struct RunOptions {
  TraceRequest trace;
  RunDirectory directory = RunDirectory::fresh;
  /// A checkpoint, or a run directory with checkpoints (its newest whole one), from which the run
  /// goes on. "": the run directory if that is continued, otherwise the run begins.
  std::filesystem::path resume = {};
  std::vector<std::string> command;  ///< the command line, for run.json
  /// When true, a checkpoint is written after the step that is running, and this is set to false.
  std::atomic<bool>* checkpoint_now = nullptr;
  std::string resuming = {};  ///< the command that resumes the run, for messages; "" if unknown
  /// Keys, sections of keys, or "all": what may differ from the run of `resume` although it changes
  /// results (config::check_allowed_names()).
  std::vector<std::string> allowed_changes = {};
  planner::PlanSource source = {};  ///< files with rates or a plan
};

/// Throws Error(usage) if the run directory `directory` has files of another run: metrics.jsonl,
/// config.json, run.json or weights.
void refuse_used_directory(const std::filesystem::path& directory);

/// Checks what `config` reads on this machine: model.weights, the training data, this rank's swap
/// paths. Throws Error naming the key.
void check_inputs(const config::Config& config);

/// Trains `config`: opens its inputs like check_inputs(), takes the run directory
/// (config.ballast.out, which it creates), plans the run (planner::plan_run()), allocates, steps,
/// evaluates, and writes metrics.jsonl, config.json, run.json and, at the end, weights/. A run that
/// fails before the end of its first step leaves none of these files. Throws Error after releasing
/// all memory and swap files; it names the newest checkpoint and RunOptions::resuming. Writes the
/// trace after its steps, or when the run fails before; if it cannot, that is a warning.
/// `interrupted` (may be null) ends the run in mid step with Error(interrupted), after a summary of
/// the steps before.
///
/// `ranks`: the processes of the run, nullptr for this one alone. Collective: all run rank 0's
/// config; rank 0 alone calls the observer and writes files. Failures before the first step are a
/// comm::JointError on all ranks; later ones are thrown by the rank that failed.
void train(const config::Config& config, Observer& observer, const std::atomic<bool>* interrupted,
           const RunOptions& options = {}, comm::Ranks* ranks = nullptr);

}  // namespace ballast::train
