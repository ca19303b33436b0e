#include "ballast/planner/planner.h"

#include <algorithm>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "ballast/core/error.h"

#include "src/planner/filling.h"
#include "src/planner/search.h"

namespace ballast::planner {

bool leaves_choices(const engine::RunInputs& run, std::size_t blocks) {
  if (run.batch.automatic || run.devices.open) return true;
  const auto constraints = read_constraints(run.constraints, blocks);
  return std::any_of(constraints.begin(), constraints.end(),
                     [](const PlacementConstraint& one) { return !one.weights || !one.optimizer; });
}

bool leaves_choices(const engine::RunInputs& run) {
  return leaves_choices(run, run.model.blocks.size());
}

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
  return {std::move(blueprint), std::move(prediction), simulated + 1};
}

/// Returns the decision for a request without choices.
std::optional<Decision> decide_by_rule(const PlanRequest& request) {
  BatchChoice choice(request, micro_batch_sizes(request).front());
  step::Options& options = choice.outline.options;
  step::Placement placement = place_by_rule(choice.filler, request.run, options);
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

/// Returns the request with expert parallelism, if the run leaves that open. Rules of placement
/// refer to block numbers, which then differ.
std::optional<PlanRequest> sharing_experts(const PlanRequest& request) {
  const engine::RunInputs& run = request.run;
  const std::uint32_t sharers = request.mesh.sharers();
  if (!run.constraints.open_expert_ranks || sharers == 1 || !run.constraints.rules.empty()) {
    return {};
  }
  if (!can_share_experts(run.model, sharers)) return {};
  PlanRequest shared = request;
  shared.run.constraints.open_expert_ranks = false;
  shared.kernels = nullptr;
  shared.run.model =
      run.trained_like(run.model.config, {.experts = sharers, .tensor = run.model.split.tensor});
  return shared;
}

double tokens_per_second(const Decision& decision) {
  return static_cast<double>(decision.blueprint.problem.tokens_per_step()) /
         decision.prediction.step_seconds;
}

/// Returns the decision for a request that names the number of devices.
std::optional<Decision> decide_on_devices(const PlanRequest& request) {
  if (!leaves_choices(request.run)) return decide_by_rule(request);
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

engine::Blueprint draw_blueprint(const engine::RunInputs& run, const memory::Budgets& budgets,
                                 const model::KernelSizes& kernels, const Mesh& mesh) {
  using enum TensorClass;
  const PlacementRecipe recipe = {
      {activations, Tier::device}, {activations, Tier::host},
      {weights, Tier::host},       {optimizer, Tier::host},
      {weights, Tier::device},     {optimizer, Tier::device},
      {logits, Tier::device},      {intermediates, Tier::device, BlockOrder::last}};
  engine::Blueprint blueprint = engine::outline(run, budgets, kernels, mesh);
  const auto constraints = read_constraints(run);
  const TierFiller filler(blueprint.problem, constraints, budgets,
                          run.constraints.speculative_updates.value_or(0));
  engine::place(blueprint, leaves_choices(run)
                               ? fill_with_fewer_buffers(filler, recipe, run, blueprint.options)
                               : place_by_rule(filler, run, blueprint.options));
  return blueprint;
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
engine::Blueprint place_weights(engine::Blueprint blueprint, const engine::RunInputs& run) {
  const PlacementRecipe recipe = {{.kind = TensorClass::weights, .tier = Tier::host},
                                  {.kind = TensorClass::weights, .tier = Tier::device}};
  const auto constraints = weights_only(read_constraints(run));
  const TierFiller filler(blueprint.problem, constraints, blueprint.budgets, 0);
  engine::place(blueprint, fill_with_fewer_buffers(filler, recipe, run, blueprint.options));
  return blueprint;
}

}  // namespace

engine::Blueprint draw_evaluation(
    const engine::RunInputs& run, const memory::Budgets& budgets,
    const std::function<model::KernelSizes(model::MicroBatchShape)>& kernels) {
  std::optional<Error> refusal;
  for (const std::uint64_t size : micro_batch_sizes({.run = run})) {
    const engine::BatchRule batch = run.batch.with_samples(size, 1);
    engine::Blueprint blueprint = engine::outline(run, batch, budgets, kernels(batch.shape), {});
    blueprint.options.purpose = step::Purpose::evaluation;
    for (const step::Order order : orders(run, blueprint.options)) {
      blueprint.options.order = order;
      try {
        return place_weights(blueprint, run);
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
