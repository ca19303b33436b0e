#include "ballast/planner/draw_blueprint.h"

#include <functional>

#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/device/device.h"
#include "ballast/inputs/engine_inputs.h"
#include "ballast/planner/planner.h"

#include "src/planner/constraints.h"
#include "src/planner/search.h"

namespace ballast::planner {

engine::Blueprint draw_blueprint(const config::Config& config, const model::Architecture& model,
                                 const memory::Budgets& budgets, const model::KernelSizes& kernels,
                                 const Mesh& mesh) {
  using enum TensorClass;
  const PlacementRecipe recipe = {
      {activations, Tier::device}, {activations, Tier::host},
      {weights, Tier::host},       {optimizer, Tier::host},
      {weights, Tier::device},     {optimizer, Tier::device},
      {logits, Tier::device},      {intermediates, Tier::device, BlockOrder::last}};
  engine::Blueprint blueprint = inputs::outline(config, model, budgets, kernels, mesh);
  const auto constraints = read_constraints(config, model.blocks.size());
  const TierFiller filler(blueprint.problem, constraints, budgets,
                          inputs::named_speculation(config));
  engine::place(blueprint, leaves_choices(config)
                               ? fill_with_fewer_buffers(filler, recipe, config, blueprint.options)
                               : place_by_rule(filler, config, blueprint.options));
  return blueprint;
}

namespace {

Mesh mesh_of(const config::Config& config, const comm::Ranks* ranks) {
  return ranks == nullptr ? inputs::mesh_of(config, 1)
                          : inputs::mesh_of(config, ranks->world(), ranks->rank());
}

/// Draws with the kernels of this machine's device. `draw` is called with the model, the kernels,
/// and the mesh with this rank. If a config without choices does not fit, the error has
/// advice.
engine::Blueprint draw_here(
    const config::Config& config, const memory::Budgets& budgets, const comm::Ranks* ranks,
    const std::function<engine::Blueprint(const model::Architecture&, const model::KernelSizes&,
                                          const Mesh&)>& draw) {
  const model::Architecture model = inputs::model_of(config);
  const Mesh mesh = mesh_of(config, ranks);
  const auto kernels = [&](model::MicroBatchShape shape) {
    return model::kernel_memory(model, config.type, shape,
                                device::kind_of(inputs::device_options(config)),
                                config.ballast.compute_threads);
  };
  try {
    return draw(model, kernels(inputs::shape_of(config)), mesh);
  } catch (const Error& error) {
    if (error.category() != ErrorCategory::memory || leaves_choices(config)) throw;
    throw Error(ErrorCategory::memory, explain_refusal({.config = config,
                                                        .model = model,
                                                        .budgets = budgets,
                                                        .mesh = mesh,
                                                        .kernels = kernels}));
  }
}

}  // namespace

engine::Blueprint draw_blueprint(const config::Config& config, const comm::Ranks* ranks) {
  const memory::Budgets budgets = inputs::resolve_budgets(
      config, {config.ballast.device_bytes, config.ballast.host_bytes}, memory::available_memory(),
      ranks == nullptr ? 1 : ranks->world(), ranks == nullptr ? 0 : ranks->launch().local_rank);
  return draw_here(config, budgets, ranks,
                   [&](const auto& model, const auto& kernels, const Mesh& mesh) {
                     return draw_blueprint(config, model, budgets, kernels, mesh);
                   });
}

Drawn draw_chosen(const config::Config& config, const PlanChoices& chosen,
                  const comm::Ranks* ranks) {
  Drawn drawn;
  // The config to explain in a refusal; it has the chosen tiers once they are set.
  drawn.config = with_sizes(config, chosen, mesh_of(config, ranks).data);
  drawn.blueprint = draw_here(
      drawn.config, chosen.budgets, ranks,
      [&](const auto& model, const auto& kernels, const Mesh& mesh) {
        engine::Blueprint blueprint =
            inputs::outline(drawn.config, model, chosen.budgets, kernels, mesh);
        if (chosen.placement.blocks.size() != blueprint.problem.blocks.size()) {
          throw Error(ErrorCategory::config,
                      fmt::format("the plan is for {} blocks, but the model has {}",
                                  chosen.placement.blocks.size(), blueprint.problem.blocks.size()));
        }
        blueprint.options.order = chosen.order;
        blueprint.options.prefetches_experts = chosen.prefetches_experts;
        blueprint.options.buffers = chosen.buffers;
        drawn.config = settle(config, chosen, blueprint);
        engine::place(blueprint, chosen.placement);
        return blueprint;
      });
  return drawn;
}

}  // namespace ballast::planner
