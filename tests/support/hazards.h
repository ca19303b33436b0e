#pragma once

#include <string>
#include <vector>

#include "ballast/plan/plan.h"

namespace ballast::plan {

/// Checks the rules for submitting `plans` one after the other: edges point backwards, and any two
/// operations that use a buffer, of which one writes, are ordered by edges, seams or a common
/// stream. Returns one line per breach.
std::vector<std::string> find_hazards(const Schedule& schedule,
                                      const std::vector<const Plan*>& plans);

}  // namespace ballast::plan
