#include "ballast/planner/draw_blueprint.h"

#include "ballast/core/error.h"
#include "ballast/device/device.h"
#include "ballast/inputs/engine_inputs.h"
#include "ballast/planner/planner.h"

#include "src/planner/constraints.h"
#include "src/planner/search.h"

namespace ballast::planner {

engine::Blueprint draw_blueprint(const config::Config& config, const model::Architecture& model,
                                 const memory::Budgets& budgets, const model::KernelSizes& kernels,
                                 std::uint32_t world, std::uint32_t rank) {
  using enum Movable;
  const Program program = {
      {activations, Tier::device}, {activations, Tier::host},
      {weights, Tier::host},       {optimizer, Tier::host},
      {weights, Tier::device},     {optimizer, Tier::device},
      {logits, Tier::device},      {intermediates, Tier::device, Pattern::last}};
  engine::Blueprint blueprint = inputs::outline(config, model, budgets, kernels, world);
  blueprint.rank = rank;
  const auto constraints = read_constraints(config, model.blocks.size());
  const Filler filler(blueprint.workload, constraints, budgets, inputs::named_speculation(config));
  engine::place(blueprint, leaves_choices(config)
                               ? fill_with_fewer_buffers(filler, program, config, blueprint.options)
                               : place_by_rule(filler, config, blueprint.options));
  return blueprint;
}

engine::Blueprint draw_blueprint(const config::Config& config, const comm::Ranks* ranks) {
  const model::Architecture model = inputs::model_of(config);
  const memory::Budgets budgets = inputs::resolve_budgets(
      config, {config.ballast.device_bytes, config.ballast.host_bytes}, memory::available_memory(),
      ranks == nullptr ? 0 : ranks->launch().local_rank);
  const std::uint32_t world = ranks == nullptr ? 1 : ranks->world();
  const auto kernels = [&](model::MicroBatchShape shape) {
    return model::kernel_memory(
        model, config.type, shape,
        device::kind_of({.kind = config.ballast.device, .type = config.type}),
        config.ballast.compute_threads);
  };
  try {
    return draw_blueprint(config, model, budgets,
                          kernels({config.micro_sequences(), config.data.sequence_length}), world,
                          ranks == nullptr ? 0 : ranks->rank());
  } catch (const Error& error) {
    if (error.category() != ErrorCategory::memory || leaves_choices(config)) throw;
    throw Error(ErrorCategory::memory, explain_refusal({.config = config,
                                                        .model = model,
                                                        .budgets = budgets,
                                                        .world = world,
                                                        .kernels = kernels}));
  }
}

}  // namespace ballast::planner
