#include "ballast/planner/planner.h"

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/inputs/engine_inputs.h"
#include "ballast/planner/plan_choices.h"

#include "src/planner/constraints.h"
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
    if (block.part != model::LayerPart::expert) continue;
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

}  // namespace ballast::planner
