#pragma once

#include <atomic>

#include "ballast/comm/communicator.h"
#include "ballast/config/config.h"
#include "ballast/train/run_options.h"

namespace ballast::train {

/// Returns `config` with the numbers of tiles that it leaves open: those of the checkpoint from
/// which the run resumes, whatever its budgets, or else planner::settle_tiles(). Collective.
config::Config settle_tiles(const config::Config& config, comm::Ranks* ranks,
                            const std::atomic<bool>* interrupted, const RunOptions& options);

}  // namespace ballast::train
