#include "ballast/planning/planner.h"

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "ballast/core/error.h"

#include "src/engine/outline.h"
#include "src/planning/planner.h"
#include "src/planning/refusal.h"
#include "src/planning/search.h"

namespace ballast::planning {
namespace {

using schedule::BlockPlacement;

/// The tier that most blocks have, the faster one when two are equally common.
Tier usual(const std::vector<BlockPlacement>& blocks, Tier BlockPlacement::*kind) {
  std::array<std::size_t, 3> count{};
  for (const BlockPlacement& block : blocks) ++count.at(static_cast<std::size_t>(block.*kind));
  return kTiers.at(
      static_cast<std::size_t>(std::max_element(count.begin(), count.end()) - count.begin()));
}

/// Whether more layers keep their intermediates than compute them again.
bool mostly_kept(const std::vector<BlockPlacement>& blocks) {
  const auto kept = std::count_if(blocks.begin(), blocks.end(), [](const BlockPlacement& block) {
    return block.keeps_intermediates;
  });
  return 2 * static_cast<std::size_t>(kept) + 2 > blocks.size();
}

/// Says `placement` as sections and, where blocks differ from them, rules over ranges of blocks.
void name_placement(config::Config& config, std::vector<BlockPlacement> blocks) {
  const BlockPlacement most = {usual(blocks, &BlockPlacement::weights),
                               usual(blocks, &BlockPlacement::optimizer),
                               usual(blocks, &BlockPlacement::activations), mostly_kept(blocks)};
  // Embedding and head have nothing to keep.
  blocks.front().keeps_intermediates = most.keeps_intermediates;
  blocks.back().keeps_intermediates = most.keeps_intermediates;
  config.zero.parameters.tier = most.weights;
  config.zero.optimizer.tier = most.optimizer;
  config.ballast.activations = most.activations;
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
    if (blocks[b].keeps_intermediates != most.keeps_intermediates) {
      rule.recompute = !blocks[b].keeps_intermediates;
    }
    config.ballast.placement.push_back(rule);
  }
}

config::Config settle(const Question& question, const Trial& trial) {
  config::Config config =
      with_micro_batches(question.config, trial.point.setting->micro_batch, question.world);
  name_placement(config, trial.placement.blocks);
  const bool layers_first = trial.point.options.order == schedule::Order::layer_major;
  config.ballast.order = layers_first ? "layer_major" : "micro_batch_major";
  config.zero.optimizer.buffer_count = trial.point.options.state_staging;
  config.zero.parameters.buffer_count = trial.point.options.weight_staging;
  config.ballast.device_weight_buffers = trial.point.options.weight_slots;
  config.ballast.activation_buffers = trial.point.options.activation_staging;
  return config;
}

Decision conclude(const Question& question, config::Config config, std::size_t simulated) {
  config.ballast.device_bytes = question.budgets.device;
  config.ballast.host_bytes = question.budgets.host;
  Decision decision;
  const model::MicroBatchShape shape = {config.batch.micro_batch, config.data.sequence_length};
  decision.blueprint = engine::draw_blueprint(config, question.model, question.budgets,
                                              question.kernel_memory_of(shape), question.world);
  decision.prediction =
      schedule::simulate(decision.blueprint.schedule, decision.blueprint.workload, question.rates);
  decision.config = std::move(config);
  decision.simulated = simulated + 1;
  return decision;
}

/// There is one plan only.
Decision predict(const Question& question) {
  static_cast<void>(micro_batch_sizes(question));  // checks the batch
  try {
    return conclude(question, question.config, 0);
  } catch (const Error& error) {
    if (error.category() != ErrorCategory::memory) throw;
    throw Error(ErrorCategory::memory, explain_refusal(question));
  }
}

}  // namespace

bool leaves_choices(const config::Config& config) {
  if (config.batch.automatic || config.ballast.order == "auto") return true;
  const std::size_t blocks = config.model.num_layers + 2;
  const std::vector<engine::Wish> wishes = engine::read_wishes(config, blocks);
  for (std::size_t b = 0; b < blocks; ++b) {
    if (!wishes[b].weights || !wishes[b].optimizer) return true;
    if (schedule::is_layer(b, blocks) && !wishes[b].activations) return true;
  }
  return false;
}

Decision decide_with(const Question& question) {
  if (!leaves_choices(question.config)) return predict(question);
  Search search(question);
  const std::optional<Trial> best = search.run();
  if (!best) throw Error(ErrorCategory::memory, explain_refusal(question));
  Decision decision = conclude(question, settle(question, *best), search.simulated());
  expects(decision.blueprint.placement.blocks == best->placement.blocks &&
              decision.blueprint.options == best->point.options,
          "planner: the decided config draws another plan than the one that was simulated");
  return decision;
}

}  // namespace ballast::planning
