#pragma once

#include <string>

#include "ballast/engine/engine.h"

namespace ballast::train {

/// Says what bounds a run of `seconds` over `steps` steps and what would help most.
std::string advise(const engine::Blueprint& blueprint, const schedule::LaneTotals& lanes,
                   double seconds, std::uint64_t steps);

}  // namespace ballast::train
