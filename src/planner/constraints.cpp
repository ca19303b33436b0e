#include "src/planner/constraints.h"

#include <cstdint>

#include <fmt/format.h>

#include "ballast/core/error.h"

namespace ballast::planner {

std::vector<PlacementConstraint> read_constraints(const config::Config& config,
                                                  std::size_t blocks) {
  std::vector<PlacementConstraint> constraints(
      blocks, {config.zero.parameters.tier, config.zero.optimizer.tier, config.ballast.activations,
               config.ballast.kept, config.ballast.gradients});
  for (const auto& rule : config.ballast.placement) {
    if (rule.last_block >= blocks) {
      throw Error(ErrorCategory::config,
                  fmt::format("ballast.placement: block {} does not exist; the model has blocks 0 "
                              "to {}",
                              rule.last_block, blocks - 1));
    }
    for (std::uint64_t b = rule.first_block; b <= rule.last_block; ++b) {
      if (rule.weights) constraints[b].weights = rule.weights;
      if (rule.optimizer) constraints[b].optimizer = rule.optimizer;
      if (rule.activations) constraints[b].activations = rule.activations;
      if (rule.gradients) constraints[b].gradients = rule.gradients;
      if (rule.kept) constraints[b].kept = rule.kept;
    }
  }
  return constraints;
}

std::vector<PlacementConstraint> read_constraints(const config::Config& config) {
  return read_constraints(config, model::count_blocks(config.model, config.rank_split()));
}

}  // namespace ballast::planner
