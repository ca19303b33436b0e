#pragma once

#include <functional>
#include <string>
#include <vector>

#include "ballast/engine/blueprint.h"
#include "ballast/plan/rates.h"

namespace ballast::plans {

/// A run that the planner places.
struct PlannedRun {
  std::string name;         ///< a file in configs/, or a small model with every choice open
  std::string description;  ///< its configuration in a few words
  std::function<engine::Blueprint()> decide;
};

/// Runs whose plan takes less than a second. tools/dev/plan_decisions.sh has the runs of all of
/// configs/.
std::vector<PlannedRun> planned_runs();

/// A node of eight GPUs, and a desktop with a slow network, once with a GPU and once with cores
/// that compute, copy and update.
const std::vector<plan::Rates>& machines();

}  // namespace ballast::plans
