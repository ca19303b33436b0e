#include <optional>
#include <utility>
#include <vector>

#include "ballast/core/error.h"
#include "ballast/device/device.h"
#include "ballast/inputs/engine_inputs.h"
#include "ballast/planner/draw_blueprint.h"
#include "ballast/planner/planner.h"

#include "src/planner/constraints.h"
#include "src/planner/search.h"

namespace ballast::planner {
namespace {

/// Only weights have a place; everything else is as step::build() requires.
std::vector<PlacementConstraint> weights_only(std::vector<PlacementConstraint> constraints) {
  for (PlacementConstraint& constraint : constraints) {
    constraint.optimizer = Tier::device;
    constraint.activations = Tier::device;
    constraint.gradients = Tier::host;
    constraint.kept = step::Kept::nothing;
  }
  return constraints;
}

/// Places the weights of a sized `blueprint`. Throws Error(memory).
engine::Blueprint place_weights(engine::Blueprint blueprint, const config::Config& config) {
  const PlacementRecipe recipe = {{.kind = TensorClass::weights, .tier = Tier::host},
                                  {.kind = TensorClass::weights, .tier = Tier::device}};
  const auto constraints = weights_only(read_constraints(config, blueprint.model.blocks.size()));
  const TierFiller filler(blueprint.problem, constraints, blueprint.budgets, 0);
  engine::place(blueprint, fill_with_fewer_buffers(filler, recipe, config, blueprint.options));
  return blueprint;
}

}  // namespace

engine::Blueprint draw_evaluation(const config::Config& run) {
  config::Config config = run;
  config.sequence_parallel = 1;
  if (config.rank_split() != model::RankSplit()) {
    // One rank has all experts and tiles, so block numbers differ.
    config.ballast.expert_parallel = 1;
    config.tensor_parallel = 1;
    config.ballast.placement.clear();
  }
  const model::Architecture model = inputs::model_of(config);
  const memory::Budgets budgets = inputs::resolve_budgets(
      config, {config.ballast.device_bytes, config.ballast.host_bytes}, memory::available_memory());
  std::optional<Error> refusal;
  for (const std::uint64_t size : micro_batch_sizes({.config = config, .model = model})) {
    const config::Config sized = with_micro_batches(config, size, 1);
    const model::KernelSizes kernels = model::kernel_memory(
        model, config.type, inputs::shape_of(sized),
        device::kind_of(inputs::device_options(config)), config.ballast.compute_threads);
    engine::Blueprint blueprint = inputs::outline(sized, model, budgets, kernels, {});
    blueprint.options.purpose = step::Purpose::evaluation;
    for (const step::Order order : orders(config, blueprint.options)) {
      blueprint.options.order = order;
      try {
        return place_weights(blueprint, config);
      } catch (const Error& error) {
        if (error.category() != ErrorCategory::memory) throw;
        refusal = error;
      }
    }
  }
  expects(refusal.has_value(), "evaluation: there is no micro-batch size");
  throw Error(*refusal);
}

}  // namespace ballast::planner
