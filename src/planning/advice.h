#pragma once

#include <string>

#include "ballast/engine/engine.h"

namespace ballast::planning {

/// Says what bounds a run whose steps and evaluations took `seconds`, and what would help most.
std::string advise(const engine::Blueprint& blueprint, const schedule::LaneTotals& lanes,
                   double seconds);

}  // namespace ballast::planning
