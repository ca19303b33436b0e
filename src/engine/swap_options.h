#pragma once

#include "ballast/comm/launch.h"
#include "ballast/config/config.h"
#include "ballast/state/swap_plan.h"

namespace ballast::engine {

/// What the config says about swapping: the paths of both offload sections in order, none twice, or
/// the run directory; each with the settings of its entry in aio.paths, or else those of aio. Ranks
/// of one machine are dealt its paths in turn, so that each has some to itself; when there are
/// fewer paths than ranks, each has one and several ranks share it.
state::SwapOptions swap_options(const config::Config& config, const comm::Launch& launch = {});

}  // namespace ballast::engine
