#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "ballast/config/config.h"
#include "ballast/setup/run_plan.h"

namespace ballast::train {

/// Options of the trace (write_trace()).
struct TraceRequest {
  std::filesystem::path file;         ///< "": no trace
  std::uint64_t steps = 10;           ///< number of first steps, including their updates
  bool overwrite = false;             ///< replace any file, not only a trace of `ballast train`
  std::filesystem::path config = {};  ///< file of the run's config, which is never replaced
};

/// Treatment of the files in the run directory.
enum class RunDirectory : std::uint8_t {
  fresh,        ///< there must be no such files
  overwritten,  ///< they belong to another run and are replaced
  continued,    ///< the run continues from one of its checkpoints
  automatic  ///< continue if there is a checkpoint; otherwise begin, replacing the files of a run
             ///< of this directory that was killed before its first checkpoint
};

/// Options of a run that are not part of its config.
struct RunOptions {
  TraceRequest trace;
  RunDirectory directory = RunDirectory::fresh;
  /// The checkpoint that the run continues from, or a run directory (its latest complete
  /// checkpoint). "": the run directory if `directory` is `continued`; otherwise the run begins.
  std::filesystem::path resume = {};
  std::vector<std::string> command;  ///< the command line, for run.json
  /// When true, a checkpoint is written after the current step, and this is set to false.
  std::atomic<bool>* checkpoint_now = nullptr;
  std::string resuming = {};  ///< command that resumes the run, for messages; "" if unknown
  /// Keys, sections of keys, or "all", that may differ from the run of `resume` although they
  /// change results (config::check_allowed_names()).
  std::vector<std::string> allowed_changes = {};
  setup::PlanSource source = {};  ///< files with rates or a plan
};

/// The end of a run: which step is its last one, and what must then be there. Nobody else compares
/// steps with ballast.steps.
class RunEnd {
 public:
  explicit RunEnd(const config::Config& config)
      : steps_(config.ballast.steps),
        saves_weights_(config.ballast.save_weights),
        writes_checkpoints_(config.ballast.writes_checkpoints()) {}

  /// Number of steps, which is the number of the last step.
  [[nodiscard]] std::uint64_t steps() const { return steps_; }
  [[nodiscard]] bool is_last(std::uint64_t step) const { return step == steps_; }
  /// Whether a run with `done` finished steps has no further step.
  [[nodiscard]] bool is_reached_by(std::uint64_t done) const { return done >= steps_; }
  /// Number of steps after `done` finished ones.
  [[nodiscard]] std::uint64_t left_after(std::uint64_t done) const {
    return is_reached_by(done) ? 0 : steps_ - done;
  }

  /// Whether nothing is left to do after the last step. `weights`: they are saved. `checkpoint`:
  /// the last step has one. It is the only result of a run that does not save weights.
  [[nodiscard]] bool is_complete(bool weights, bool checkpoint) const {
    return saves_weights_ ? weights : checkpoint || !writes_checkpoints_;
  }

 private:
  std::uint64_t steps_;
  bool saves_weights_;
  bool writes_checkpoints_;
};

/// Throws Error(usage) if the run directory `directory` has files of another run: metrics.jsonl,
/// config.json, run.json or weights. `ignored`: a name that may exist.
void refuse_used_directory(const std::filesystem::path& directory, std::string_view ignored = {});

}  // namespace ballast::train
