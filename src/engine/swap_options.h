#pragma once

#include "ballast/config/config.h"
#include "ballast/state/swap_plan.h"

namespace ballast::engine {

/// What the config says about swapping: the paths of both offload sections in order, none twice, or
/// the run directory; each with the settings of its entry in aio.paths, or else those of aio.
state::SwapOptions swap_options(const config::Config& config);

}  // namespace ballast::engine
