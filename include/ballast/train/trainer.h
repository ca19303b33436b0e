#pragma once

#include <atomic>
#include <cstdint>

#include "ballast/comm/communicator.h"
#include "ballast/config/config.h"
#include "ballast/data/data_summary.h"
#include "ballast/train/run_events.h"
#include "ballast/train/run_options.h"

namespace ballast::train {

/// How a run has ended that has not failed.
enum class Ending : std::uint8_t {
  done,    ///< all steps are finished, and so is everything after them
  stopped  ///< earlier, with a checkpoint from which it can continue
};

/// Checks the inputs of `config` on this machine: model.weights, the training data, this rank's
/// swap paths. Throws Error with the key.
void check_inputs(const config::Config& config);

/// Trains `config`: opens its inputs like check_inputs(), takes the run directory
/// (config.ballast.out, which it creates), plans the run (planner::plan_run()), allocates, steps,
/// evaluates, and writes metrics.jsonl, config.json, run.json and, at the end, weights/. A run that
/// fails during its first step leaves none of these files. Throws Error after releasing all memory
/// and swap files; the message includes the latest checkpoint and RunOptions::resuming. Writes the
/// trace after its steps, or on an earlier failure; if this fails, it only warns. A run that writes
/// checkpoints and cannot write the one of its last step only warns if its weights are saved, and
/// otherwise throws Error(io).
///
/// `interrupted` (may be null) ends a run that writes checkpoints after the current step and
/// returns Ending::stopped, unless nothing is left to do then. It ends other runs within a step,
/// and all runs before they are planned, with Error(interrupted), after a summary of the earlier
/// steps.
///
/// `ranks`: the processes of the run; nullptr for a single one. Collective: all ranks run rank 0's
/// config; only rank 0 calls the observer and writes files. Failures before the first step are a
/// comm::JointError on all ranks; later ones are thrown by the rank that failed.
Ending train(const config::Config& config, Observer& observer, const std::atomic<bool>* interrupted,
             const RunOptions& options = {}, comm::Ranks* ranks = nullptr);

}  // namespace ballast::train
