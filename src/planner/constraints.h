#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include "ballast/config/config.h"

namespace ballast::planner {

/// The config's constraints on a block's placement; empty members are open.
struct PlacementConstraint {
  config::TierChoice weights;
  config::TierChoice optimizer;
  config::TierChoice activations;
  std::optional<step::Kept> kept;
  config::TierChoice gradients;
};

/// Returns one constraint per block of a model with `blocks` blocks. Throws Error(config) for a
/// rule about a block that does not exist.
std::vector<PlacementConstraint> read_constraints(const config::Config& config, std::size_t blocks);
/// Returns the constraints for the model of `config`.
std::vector<PlacementConstraint> read_constraints(const config::Config& config);

}  // namespace ballast::planner
