#pragma once

#include "ballast/comm/communicator.h"
#include "ballast/config/config.h"

namespace ballast::planning {

/// What all ranks run: rank 0's config, every "auto" decided by it. Budgets are a rank's share of
/// its machine, the same on all ranks; threads and NUMA node of the update are each rank's own.
/// Collective. However long rank 0 measures and plans, the others wait for it without a timeout as
/// long as it is alive. Throws comm::JointError, or what Ranks throws.
config::Config common_config(const config::Config& config, comm::Ranks& ranks);

}  // namespace ballast::planning
