#pragma once

#include "ballast/engine/planner.h"

#include "src/engine/search.h"

namespace ballast::engine {

/// decide() with the workspace's size as the question says.
Decision decide_with(const Question& question);

/// find_improvements() with the workspace's size as the question says.
std::vector<Variant> find_improvements_with(const Decision& decision, const Question& question);

}  // namespace ballast::engine
