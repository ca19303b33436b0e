#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "ballast/planner/run_plan.h"

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
  planner::PlanSource source = {};  ///< files with rates or a plan
};

}  // namespace ballast::train
