#pragma once

#include <atomic>

#include "ballast/comm/communicator.h"
#include "ballast/config/config.h"
#include "ballast/data/data_summary.h"
#include "ballast/train/run_events.h"
#include "ballast/train/run_options.h"

namespace ballast::train {

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
