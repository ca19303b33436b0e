#pragma once

#include "ballast/planning/planner.h"

#include "src/planning/search.h"

namespace ballast::planning {

/// decide() with the workspace's size as the question says.
Decision decide_with(const Question& question);

/// find_improvements() with the workspace's size as the question says.
std::vector<Variant> find_improvements_with(const Decision& decision, const Question& question);

}  // namespace ballast::planning
