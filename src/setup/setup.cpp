#include "ballast/setup/setup.h"

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include <fmt/format.h>

#include "ballast/calibrate/machine_files.h"
#include "ballast/core/error.h"
#include "ballast/device/device.h"
#include "ballast/setup/translate.h"

namespace ballast::setup {

planner::PlanRequest plan_request(const config::Config& config, std::uint32_t world) {
  const auto change = [asked = std::make_shared<const config::Config>(config),
                       world](const planner::Overrides& overrides) {
    return plan_request(config::parse(config::print(*asked), "/", "the change", overrides, world),
                        world);
  };
  return {.run = translate(config), .mesh = mesh_of(config, world), .change = change};
}

std::function<model::KernelSizes(model::MicroBatchShape)> kernels_here(engine::RunInputs run) {
  return [run = std::move(run)](model::MicroBatchShape shape) {
    return model::kernel_memory(run.model, run.type, shape, device::kind_of(run.devices.first()),
                                run.devices.compute_threads);
  };
}

namespace {

/// Calls `draw` with the run of `config`, the kernels of this machine's device, and the mesh with
/// this rank. If a config without choices does not fit, the error has advice.
engine::Blueprint draw_here(
    const config::Config& config, const memory::Budgets& budgets, const comm::Ranks* ranks,
    const std::function<engine::Blueprint(const engine::RunInputs&, const model::KernelSizes&,
                                          const Mesh&)>& draw) {
  const engine::RunInputs run = translate(config);
  const auto kernels = kernels_here(run);
  const Mesh mesh =
      ranks == nullptr ? mesh_of(config, 1) : mesh_of(config, ranks->world(), ranks->rank());
  try {
    return draw(run, kernels(run.batch.shape), mesh);
  } catch (const Error& error) {
    if (error.category() != ErrorCategory::memory || leaves_choices(config)) throw;
    planner::PlanRequest request = plan_request(config, mesh.ranks());
    request.budgets = budgets;
    request.mesh = mesh;
    request.kernels = kernels;
    throw Error(ErrorCategory::memory, planner::explain_refusal(request));
  }
}

}  // namespace

engine::Blueprint draw_blueprint(const config::Config& config, const comm::Ranks* ranks) {
  const memory::Budgets budgets = resolve_budgets(
      config, {config.ballast.device_bytes, config.ballast.host_bytes}, memory::available_memory(),
      ranks == nullptr ? 1 : ranks->world(), ranks == nullptr ? 0 : ranks->launch().local_rank);
  return draw_here(config, budgets, ranks,
                   [&](const auto& run, const auto& kernels, const Mesh& mesh) {
                     return planner::draw_blueprint(run, budgets, kernels, mesh);
                   });
}

Drawn draw_chosen(const config::Config& config, const PlanChoices& chosen,
                  const comm::Ranks* ranks) {
  Drawn drawn;
  // The config to explain in a refusal; it has the chosen tiers once they are set.
  const std::uint32_t world = ranks == nullptr ? 1 : ranks->world();
  drawn.config = with_sizes(config, chosen, mesh_of(config, world).data);
  drawn.blueprint = draw_here(
      drawn.config, chosen.budgets, ranks,
      [&](const auto& run, const auto& kernels, const Mesh& mesh) {
        engine::Blueprint blueprint = engine::outline(run, chosen.budgets, kernels, mesh);
        if (chosen.placement.blocks.size() != blueprint.problem.blocks.size()) {
          throw Error(ErrorCategory::config,
                      fmt::format("the plan is for {} blocks, but the model has {}",
                                  chosen.placement.blocks.size(), blueprint.problem.blocks.size()));
        }
        blueprint.options.order = chosen.order;
        blueprint.options.prefetches_experts = chosen.prefetches_experts;
        blueprint.options.buffers = chosen.buffers;
        blueprint.placement = chosen.placement;
        drawn.config = settle(config, blueprint);
        engine::place(blueprint, chosen.placement);
        return blueprint;
      });
  return drawn;
}

engine::Blueprint draw_evaluation(const config::Config& run) {
  config::Config config = run;
  config.sequence_parallel = 1;
  if (config.rank_split() != model::RankSplit()) {
    // One rank has all experts and tiles, so block numbers differ.
    config.ballast.expert_parallel = 1;
    config.tensor_parallel = 1;
    config.ballast.placement.clear();
  }
  const memory::Budgets budgets = resolve_budgets(
      config, {config.ballast.device_bytes, config.ballast.host_bytes}, memory::available_memory());
  const engine::RunInputs evaluated = translate(config);
  return planner::draw_evaluation(evaluated, budgets, kernels_here(evaluated));
}

engine::EngineOptions engine_options(const config::Config& config, const comm::Launch& launch) {
  const config::OptimizerSection& optimizer = config.optimizer;
  return {.device = std::string(config::name_of(config.ballast.device)),
          .device_numbers = config.ballast.devices,
          .compute_threads = config.ballast.compute_threads,
          .link_gbps = config.ballast.link_gbps,
          .kernels =
              calibrate::kernel_options(kernel_request(config), launch.world == launch.local_world),
          .update = updater_options(config),
          .hyper = {.beta1 = optimizer.beta1,
                    .beta2 = optimizer.beta2,
                    .epsilon = optimizer.eps,
                    .momentum = optimizer.momentum,
                    .nesterov = optimizer.nesterov,
                    .weight_decay = optimizer.weight_decay},
          .preference = config.ballast.preference,
          .gradient_clipping = config.gradient_clipping,
          .router_bias_update_speed = config.router_bias_update_speed,
          .seed = config.ballast.seed,
          .swap = swap_options(config, launch),
          .serial = config.ballast.serial,
          .nvtx = config.ballast.nvtx,
          .delay_seed = config.ballast.delay_seed};
}

engine::Engine make_engine(const config::Config& config, const std::atomic<bool>* interrupted,
                           comm::Ranks* ranks) {
  const comm::Launch launch = ranks == nullptr ? comm::Launch{} : ranks->launch();
  return engine::Engine(draw_blueprint(config, ranks), engine_options(config, launch), interrupted,
                        ranks);
}

}  // namespace ballast::setup
