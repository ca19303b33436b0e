#include "src/step/move_context.h"

#include <cmath>

#include "ballast/step/labels.h"

namespace ballast::step {

MoveContext::MoveContext(std::string name, const PlacedProblem& placed, const Layout& layout,
                         std::uint32_t micro_batches)
    : placed(placed),
      layout(layout),
      emitter_(std::move(name), layout.buffers.size(), micro_batches) {}

Condition MoveContext::for_pass(std::uint32_t block) const {
  if (rows_of(block) == nullptr) return {};
  const bool step = placed.options.order == Order::layer_major;
  return {.rows = step ? Condition::Rows::in_step : Condition::Rows::in_micro_batch,
          .micro = step ? 0 : passing_,
          .any_rank = placed.sizes.keeps_part_of_weights(block),
          .any_model = rows_of(block)->reference_routing != model::kNone};
}

Condition MoveContext::for_gradient(std::uint32_t block, std::uint32_t lag) const {
  if (rows_of(block) == nullptr) return {};
  return {.rows = lag > 0 ? Condition::Rows::in_step_before : Condition::Rows::in_step,
          .any_rank = placed.sizes.is_distributed()};
}

Condition MoveContext::for_update(std::uint32_t block, std::uint32_t lag) const {
  return placed.options.expert_updates == ExpertUpdates::all ? Condition()
                                                             : for_gradient(block, lag);
}

double MoveContext::likelihood(const Condition& condition, std::uint32_t block) const {
  if (condition.always()) return 1.0;
  const Problem& problem = placed.problem;
  const bool one = condition.rows == Condition::Rows::in_micro_batch;
  const double tokens = static_cast<double>(problem.micro_batch_tokens) *
                        (one ? 1.0 : static_cast<double>(problem.micro_batches)) *
                        (condition.any_rank ? static_cast<double>(problem.sharers) : 1.0) *
                        (condition.any_model ? 2.0 : 1.0);
  return 1.0 - std::pow(1.0 - rows_of(block)->share, tokens);
}

OpId MoveContext::emit_if(Condition condition, Operation operation,
                          std::optional<Condition> unless) {
  operation.condition = condition;
  operation.unless = unless;
  const double there = unless ? likelihood(*unless, operation.block) : 0.0;
  operation.likelihood = static_cast<float>(likelihood(condition, operation.block) * (1.0 - there));
  const auto either = [&](auto holds) { return holds(condition) || (unless && holds(*unless)); };
  const auto count = [&](model::ValueId routing) {
    operation.uses.push_back({Role::counts, layout.values.counts[routing], false});
  };
  if (either([](const Condition& one) { return one.reads_routing(); })) {
    count(rows_of(operation.block)->routing);
  }
  // Follows the counts of the trained model.
  if (either([](const Condition& one) { return one.reads_routing() && one.any_model; })) {
    count(rows_of(operation.block)->reference_routing);
  }
  return emit(std::move(operation));
}

bool Mover::has_separate_trained_home(std::uint32_t block, Tier tier) const {
  const BufferId home = layout_.trained_home[block];
  return home != kNoBuffer && layout_.buffers[home].tier == tier;
}

}  // namespace ballast::step
