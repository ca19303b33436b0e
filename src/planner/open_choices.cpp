#include "ballast/planner/open_choices.h"

#include <algorithm>

#include "src/planner/constraints.h"

namespace ballast::planner {

bool leaves_choices(const config::Config& config) {
  if (config.batch.automatic || config.pipeline.stages == 0) return true;
  const auto constraints = read_constraints(config);
  return std::any_of(constraints.begin(), constraints.end(),
                     [](const PlacementConstraint& one) { return !one.weights || !one.optimizer; });
}

}  // namespace ballast::planner
