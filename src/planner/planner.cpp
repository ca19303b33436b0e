#include "ballast/planner/planner.h"

#include <algorithm>
#include <array>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "ballast/calibrate/machine_files.h"
#include "ballast/core/error.h"
#include "ballast/device/device.h"
#include "ballast/inputs/engine_inputs.h"
#include "ballast/inputs/run_inputs.h"
#include "ballast/planner/plan_choices.h"

#include "src/planner/filling.h"
#include "src/planner/search.h"

namespace ballast::planner {

namespace {

void check_nvme(const engine::Blueprint& blueprint, const plan::Rates& rates) {
  const Bytes needed = blueprint.ledger.total(Tier::nvme);
  if (rates.nvme_bytes == 0 || needed <= rates.nvme_bytes) return;
  throw Error(
      ErrorCategory::memory,
      fmt::format("rates '{}': nvme_space gives a rank {} on its drives, but the run needs {}",
                  rates.name, format_bytes(rates.nvme_bytes), format_bytes(needed)));
}

Decision conclude(const PlanRequest& request, engine::Blueprint blueprint,
                  step::Placement placement, std::size_t simulated) {
  engine::place(blueprint, std::move(placement));
  check_nvme(blueprint, request.rates);
  plan::Prediction prediction = plan::simulate(blueprint.schedule, request.rates);
  config::Config config = settle(request.config, choices_of(blueprint), blueprint);
  return {std::move(config), std::move(blueprint), std::move(prediction), simulated + 1};
}

/// Returns the decision for a request without choices.
std::optional<Decision> decide_by_rule(const PlanRequest& request) {
  BatchChoice choice(request, micro_batch_sizes(request).front());
  step::Options& options = choice.outline.options;
  step::Placement placement = place_by_rule(choice.filler, request.config, options);
  if (choice.filler.excess(placement, options) > 0) return std::nullopt;
  return conclude(request, choice.outline, std::move(placement), 0);
}

std::optional<Decision> search_for(const PlanRequest& request) {
  PlanSearch search(request);
  const std::optional<Candidate> best = search.run();
  if (!best) return std::nullopt;
  engine::Blueprint blueprint = best->point.choice->outline;
  blueprint.options = best->point.options;
  return conclude(request, std::move(blueprint), best->placement, search.simulated());
}

/// Returns whether each block of `ranks` consecutive experts could have one per rank.
bool can_share_experts(const model::Architecture& model, std::uint32_t ranks) {
  if (model.quantization) return false;
  std::uint64_t most = 0;
  for (const model::BlockSpec& block : model.blocks) {
    if (block.content != model::BlockContent::expert) continue;
    most = std::max(most, block.expert + 1);
    if (block.frozen_elements > 0 && block.trained_elements() > 0) return false;
  }
  return most > 0 && most % ranks == 0;
}

/// Returns the request with expert parallelism, if the config leaves that open. Rules of placement
/// refer to block numbers, which then differ.
std::optional<PlanRequest> sharing_experts(const PlanRequest& request) {
  const bool open = request.config.ballast.expert_parallel == 0;
  if (!open || request.mesh.sharers() == 1 || !request.config.ballast.placement.empty()) return {};
  if (!can_share_experts(request.model, request.mesh.sharers())) return {};
  PlanRequest shared = request;
  shared.config.ballast.expert_parallel = request.mesh.sharers();
  shared.kernels = nullptr;
  shared.model = inputs::model_of(shared.config);
  return shared;
}

double tokens_per_second(const Decision& decision) {
  return static_cast<double>(decision.blueprint.problem.tokens_per_step()) /
         decision.prediction.step_seconds;
}

/// Returns the decision for a request that names the number of devices.
std::optional<Decision> decide_on_devices(const PlanRequest& request) {
  if (!leaves_choices(request.config)) return decide_by_rule(request);
  std::optional<Decision> best = search_for(request);
  if (const std::optional<PlanRequest> shared = sharing_experts(request)) {
    std::optional<Decision> other = search_for(*shared);
    if (other && best) other->simulated += best->simulated;
    if (other && (!best || tokens_per_second(*other) > tokens_per_second(*best))) return other;
    if (other) best->simulated = other->simulated;
  }
  return best;
}

}  // namespace

std::optional<Decision> try_decide(const PlanRequest& request) {
  const std::vector<std::uint32_t> counts = device_counts(request);
  std::optional<Decision> best;
  std::optional<Error> lacking;
  std::size_t simulated = 0;
  for (const std::uint32_t count : counts) {
    try {
      std::optional<Decision> other = decide_on_devices(on_devices(request, count));
      if (!other) continue;
      simulated += other->simulated;
      if (!best || tokens_per_second(*other) > tokens_per_second(*best)) best = std::move(other);
    } catch (const Error& error) {
      // A rate that only plans for this number of devices need may be missing.
      if (counts.size() == 1 || error.category() != ErrorCategory::config) throw;
      if (!lacking) lacking = error;
    }
  }
  if (!best && lacking) throw Error(*lacking);
  if (best) best->simulated = simulated;
  return best;
}

Decision decide(const PlanRequest& request) {
  std::optional<Decision> decision = try_decide(request);
  if (!decision) throw Error(ErrorCategory::memory, explain_refusal(request));
  return std::move(*decision);
}

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

engine::EngineOptions engine_options(const config::Config& config, const comm::Launch& launch) {
  const config::OptimizerSection& optimizer = config.optimizer;
  return {.device = std::string(config::name_of(config.ballast.device)),
          .device_numbers = config.ballast.devices,
          .compute_threads = config.ballast.compute_threads,
          .link_gbps = config.ballast.link_gbps,
          .kernels = calibrate::kernel_options(inputs::kernel_request(config),
                                               launch.world == launch.local_world),
          .update = inputs::updater_options(config),
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
          .swap = inputs::swap_options(config, launch),
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

}  // namespace ballast::planner
