#include "ballast/planner/planner.h"

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/inputs/engine_inputs.h"

#include "src/planner/constraints.h"
#include "src/planner/search.h"

namespace ballast::planner {
namespace {

using schedule::BlockPlacement;

/// The tier that most blocks have, the faster one when two are equally common.
Tier usual(const std::vector<BlockPlacement>& blocks, Tier BlockPlacement::*kind) {
  std::array<std::size_t, 3> count{};
  for (const BlockPlacement& block : blocks) ++count.at(static_cast<std::size_t>(block.*kind));
  return kTiers.at(
      static_cast<std::size_t>(std::max_element(count.begin(), count.end()) - count.begin()));
}

/// Whether more blocks keep their intermediates than recompute them.
bool mostly_kept(const schedule::Workload& work, const std::vector<BlockPlacement>& blocks) {
  std::size_t have = 0;
  std::size_t keep = 0;
  for (std::size_t b = 0; b < blocks.size(); ++b) {
    have += work.has_intermediates(b) ? 1 : 0;
    keep += blocks[b].keeps_intermediates ? 1 : 0;
  }
  return 2 * keep > have;
}

/// Writes a placement into `config`: the usual tiers as sections, other blocks as rules.
void name_placement(config::Config& config, const schedule::Workload& work,
                    std::vector<BlockPlacement> blocks) {
  std::vector<BlockPlacement> trained;
  for (std::size_t b = 0; b < blocks.size(); ++b) {
    if (!work.blocks[b].is_frozen()) trained.push_back(blocks[b]);
  }
  const BlockPlacement most = {usual(blocks, &BlockPlacement::weights),
                               usual(trained, &BlockPlacement::optimizer),
                               usual(blocks, &BlockPlacement::activations),
                               mostly_kept(work, blocks),
                               false,
                               usual(trained, &BlockPlacement::gradients)};
  // Named by their number, as they follow from the tiers.
  for (BlockPlacement& block : blocks) block.speculates = false;
  for (std::size_t b = 0; b < blocks.size(); ++b) {
    if (!work.has_intermediates(b)) blocks[b].keeps_intermediates = most.keeps_intermediates;
    if (!work.blocks[b].is_frozen()) continue;
    blocks[b].optimizer = most.optimizer;
    blocks[b].gradients = most.gradients;
  }
  config.zero.parameters.tier = most.weights;
  config.zero.optimizer.tier = most.optimizer;
  config.ballast.activations = most.activations;
  config.ballast.gradients = most.gradients;
  config.ballast.recompute = !most.keeps_intermediates;
  config.ballast.placement.clear();
  for (std::size_t b = 0; b < blocks.size(); ++b) {
    if (blocks[b] == most) continue;
    config::PlacementRule rule = {.first_block = b, .last_block = b};
    while (rule.last_block + 1 < blocks.size() && blocks[rule.last_block + 1] == blocks[b]) {
      ++rule.last_block;
    }
    b = rule.last_block;
    if (blocks[b].weights != most.weights) rule.weights = blocks[b].weights;
    if (blocks[b].optimizer != most.optimizer) rule.optimizer = blocks[b].optimizer;
    if (blocks[b].activations != most.activations) rule.activations = blocks[b].activations;
    if (blocks[b].gradients != most.gradients) rule.gradients = blocks[b].gradients;
    if (blocks[b].keeps_intermediates != most.keeps_intermediates) {
      rule.recompute = !blocks[b].keeps_intermediates;
    }
    config.ballast.placement.push_back(rule);
  }
}

config::Config settle(const PlanRequest& request, const Candidate& best) {
  config::Config config =
      with_micro_batches(request.config, best.point.setting->micro_batch, request.world);
  name_placement(config, best.point.setting->outline.workload, best.placement.blocks);
  config.ballast.order = inputs::name_of(best.point.options.order);
  config.zero.optimizer.buffer_count = best.point.options.state_staging;
  config.zero.parameters.buffer_count = best.point.options.weight_staging;
  config.ballast.device_weight_buffers = best.point.options.weight_slots;
  config.ballast.device_gradient_buffers = best.point.options.gradient_slots;
  config.ballast.activation_buffers = best.point.options.activation_staging;
  config.ballast.gradient_buffers = best.point.options.gradient_staging;
  config.ballast.expert_prefetch = best.point.options.prefetches_experts;
  config.model.expert_parallel = request.model.config.ranks_sharing_experts();
  const auto& blocks = best.placement.blocks;
  config.ballast.speculative_updates = static_cast<std::uint64_t>(std::count_if(
      blocks.begin(), blocks.end(), [](const BlockPlacement& block) { return block.speculates; }));
  return config;
}

void check_nvme(const engine::Blueprint& blueprint, const schedule::Rates& rates) {
  const Bytes needed = blueprint.ledger.total(Tier::nvme);
  if (rates.nvme_bytes == 0 || needed <= rates.nvme_bytes) return;
  throw Error(
      ErrorCategory::memory,
      fmt::format("rates '{}': nvme_space gives a rank {} on its drives, but the run needs {}",
                  rates.name, format_bytes(rates.nvme_bytes), format_bytes(needed)));
}

Decision conclude(const PlanRequest& request, config::Config config, engine::Blueprint blueprint,
                  schedule::Placement placement, std::size_t simulated) {
  config.ballast.device_bytes = request.budgets.device;
  config.ballast.host_bytes = request.budgets.host;
  config.zero.sub_group_size = blueprint.sub_group_size;
  engine::place(blueprint, std::move(placement));
  check_nvme(blueprint, request.rates);
  schedule::Prediction prediction = schedule::simulate(blueprint.schedule, request.rates);
  return {std::move(config), std::move(blueprint), std::move(prediction), simulated + 1};
}

/// The decision for a request without choices.
std::optional<Decision> decide_by_rule(const PlanRequest& request) {
  Setting setting(request, micro_batch_sizes(request).front());
  schedule::Options& options = setting.outline.options;
  schedule::Placement placement = place_by_rule(setting.filler, request.config, options);
  if (setting.filler.excess(placement, options) > 0) return std::nullopt;
  config::Config config = request.config;
  name_placement(config, setting.outline.workload, placement.blocks);
  config.ballast.order = inputs::name_of(options.order);
  return conclude(request, std::move(config), setting.outline, std::move(placement), 0);
}

std::optional<Decision> search_for(const PlanRequest& request) {
  Search search(request);
  const std::optional<Candidate> best = search.run();
  if (!best) return std::nullopt;
  engine::Blueprint blueprint = best->point.setting->outline;
  blueprint.options = best->point.options;
  return conclude(request, settle(request, *best), std::move(blueprint), best->placement,
                  search.simulated());
}

/// Whether each block of `ranks` consecutive experts could have one for each rank.
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

/// The request with expert parallelism, if the config leaves that open. Rules of placement name
/// blocks by numbers, which are others then.
std::optional<PlanRequest> sharing_experts(const PlanRequest& request) {
  const bool open = request.config.model.expert_parallel == 0;
  if (!open || request.world == 1 || !request.config.ballast.placement.empty()) return {};
  if (!can_share_experts(request.model, request.world)) return {};
  PlanRequest shared = request;
  shared.config.model.expert_parallel = request.world;
  shared.kernels = nullptr;
  shared.model = inputs::model_of(shared.config);
  return shared;
}

double tokens_per_second(const Decision& decision) {
  return static_cast<double>(decision.blueprint.workload.tokens_per_step()) /
         decision.prediction.step_seconds;
}

}  // namespace

bool leaves_choices(const config::Config& config) {
  if (config.batch.automatic) return true;
  const auto constraints = read_constraints(config, model::count_blocks(config.model));
  return std::any_of(constraints.begin(), constraints.end(),
                     [](const PlacementConstraint& one) { return !one.weights || !one.optimizer; });
}

std::optional<Decision> try_decide(const PlanRequest& request) {
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

Decision decide(const PlanRequest& request) {
  std::optional<Decision> decision = try_decide(request);
  if (!decision) throw Error(ErrorCategory::memory, explain_refusal(request));
  return std::move(*decision);
}

}  // namespace ballast::planner
