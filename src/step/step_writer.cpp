#include "src/step/step_writer.h"

#include <algorithm>
#include <utility>

#include "ballast/step/labels.h"

namespace ballast::step {

using model::BlockId;
using model::Operand;
using model::OperandAccess;
using model::OperandKind;
using model::PassId;
using model::Stop;

namespace {

Speed speed_of(model::CostCurve curve) {
  switch (curve) {
    case model::CostCurve::backward:
      return Speed::backward;
    case model::CostCurve::head:
      return Speed::head;
    case model::CostCurve::forward:
      break;
  }
  return Speed::forward;
}

std::vector<bool> blocks_that_keep(const PlacedProblem& placed) {
  std::vector<bool> keeps;
  for (const BlockPlacement& block : placed.placement.blocks) {
    keeps.push_back(placed.trains() && block.kept == Kept::all);
  }
  return keeps;
}

}  // namespace

StepWriter::StepWriter(const std::string& name, const PlacedProblem& placed, const Layout& layout,
                       std::uint32_t micro_batches)
    : index_(*placed.problem.index),
      program_(index_.program()),
      placed_(placed),
      layout_(layout),
      micro_batches_(micro_batches),
      plan_(name, placed, layout, micro_batches),
      weights_(plan_),
      rows_(plan_, weights_),
      gradients_(plan_, rows_),
      updates_(plan_, weights_, gradients_),
      homes_(plan_, weights_, gradients_, updates_),
      values_(plan_, homes_, micro_batches),
      recomputation_(program_, blocks_that_keep(placed)),
      cleared_(program_.blocks.size(), false),
      ahead_of_backward_(updates_.states_ahead(UpdatedIn::backward), blocks()),
      ahead_of_forward_(updates_.states_ahead(UpdatedIn::forward),
                        blocks() - program_.first_differentiated) {}

std::vector<StepWriter::Group> StepWriter::groups() const {
  if (is_layer_major()) return {{0, micro_batches_}};
  std::vector<Group> groups;
  for (std::uint32_t m = 0; m < micro_batches_; ++m) {
    groups.push_back({m, m + 1, m + 1 == micro_batches_});
  }
  return groups;
}

void StepWriter::begin(const Group& group) {
  plan_.begin_passes(group.begin);
  recomputation_.restart();
  arrived_ = 0;
  at_head_ = false;
  brought_.assign(program_.sums.size(), false);
}

/// Blocks arrive in ascending order. Blocks whose weights move ahead arrive before that.
void StepWriter::arrive(const Stop& stop, const Group& group) {
  BlockId end = ahead_of(stop).end;
  for_operands(stop, [&](const Operand& operand) {
    const bool needed = operand.kind == OperandKind::weights || operand.kind == OperandKind::rows;
    if (needed) end = std::max(end, operand.number + 1);
  });
  for (; arrived_ < end; ++arrived_) {
    if (group.first() && applies_updates_ && is_updated_in_forward(arrived_)) {
      updates_.update(arrived_, 1);
    }
    if (group.last) fetch_states_ahead(UpdatedIn::backward, ahead_of_backward_, arrived_);
  }
}

void StepWriter::prefetch(const Stop& stop) {
  const auto [begin, end] = ahead_of(stop);
  for (BlockId b = begin; b < end; ++b) weights_.prefetch(b);
}

/// Returns the blocks that compute rows of a router of `stop` and have buffers for weights that
/// move before it has chosen.
ProgramIndex::Blocks StepWriter::ahead_of(const Stop& stop) const {
  if (!placed_.options.prefetches_experts) return {};
  for (const PassId id : stop.passes) {
    const model::Pass& pass = program_.passes[id];
    if (pass.reference > 0) continue;
    for (const Operand& operand : pass.operands) {
      if (operand.port == model::Port::routing) {
        return weights_.blocks_ahead(pass.block, operand.number);
      }
    }
  }
  return {};
}

void StepWriter::recompute(const Stop& stop, const Group& group) {
  recomputation_.before(stop, [&](const Stop& again) { compute(again, group); });
}

void StepWriter::clear_all_sums() {
  for (BlockId b = 0; b < blocks(); ++b) {
    if (cleared_sum(b) != model::kNone) clear(b);
  }
}

void StepWriter::clear_sums(const Stop& stop) {
  std::vector<BlockId> begun;
  for_operands(stop, [&](const Operand& operand) {
    if (operand.kind != OperandKind::gradient || !program_.sums[operand.number].clears) return;
    const BlockId block = program_.sums[operand.number].block;
    if (!cleared_[block]) begun.push_back(block);
    cleared_[block] = true;
  });
  std::sort(begun.begin(), begun.end());
  for (const BlockId block : begun) clear(block);
}

/// Sums whose homes are in host memory.
void StepWriter::bring_sums(const Stop& stop, const Group& group) {
  std::vector<model::SumId> begun;
  for_operands(stop, [&](const Operand& operand) {
    if (operand.kind != OperandKind::gradient || brought_[operand.number]) return;
    brought_[operand.number] = true;
    begun.push_back(operand.number);
  });
  for (const model::SumId sum : begun) {
    gradients_.bring_sum(sum, group.begin);
    if (group.first() && program_.sums[sum].clears) clear(program_.sums[sum].block);
  }
}

/// Sums of blocks whose gradients are complete for this micro-batch return to their homes.
void StepWriter::offload_sums(const Stop& stop, const Group& group) {
  for (const BlockId block : stop.finishes) {
    for (const model::SumId sum : index_.sums_of(block)) {
      if (brought_[sum]) gradients_.offload_sum(sum, group.begin);
    }
  }
}

void StepWriter::clear(BlockId block) {
  const model::SumId sum = cleared_sum(block);
  // With one micro-batch at a time, no router has chosen yet.
  plan_.emit_if(is_layer_major() ? plan_.for_gradient(block) : Condition(),
                {.action = Action::clear,
                 .payload = Payload::gradient,
                 .block = block,
                 .traffic = program_.sums[sum].cleared,
                 .uses = {{Role::target, gradients_.on_device(sum), true}}});
}

void StepWriter::compute(const Stop& stop, const Group& group) {
  for (std::uint32_t m = group.begin; m < group.end; ++m) {
    for (const PassId id : stop.passes) {
      const OpId emitted = compute(id, m);
      const model::Pass& pass = program_.passes[id];
      // Losses of only the reference model may precede the head of the trained model.
      const bool head = pass.block == program_.head && (pass.reference == 0 || !stop.backward);
      if (!head || std::exchange(at_head_, true)) continue;
      if (first_head_ == kNoOp) first_head_ = emitted;
      last_head_ = emitted;
    }
  }
}

OpId StepWriter::compute(PassId id, std::uint32_t micro) {
  const model::Pass& pass = program_.passes[id];
  const bool exchange = model::is_between_ranks(pass.kernel);
  Operation operation = {.action = exchange ? Action::exchange : Action::compute,
                         .group = exchange ? RankGroup::tensor : RankGroup::all,
                         .block = pass.block,
                         .micro = micro,
                         .label = step::label_of(id, pass),
                         .speed = speed_of(pass.curve),
                         .token_share = pass.token_share};
  model::PassCost cost = pass.cost;
  operation.uses.reserve(pass.operands.size());
  for (const Operand& operand : pass.operands) {
    if (!values_.binds(operand)) {
      cost += operand.absent;
      continue;
    }
    cost -= operand.spared;
    operation.uses.push_back({step::role_of(operand.port), bind(operand, id, micro),
                              operand.access != OperandAccess::reads});
  }
  operation.flops = cost.flops;
  operation.attention_flops = cost.attention_flops;
  operation.attention_backward_flops = cost.attention_backward_flops;
  operation.attention = program_.blocks[pass.block].attention;
  operation.traffic = cost.traffic;
  operation.adapter_traffic = cost.adapter_traffic;
  operation.bytes = cost.exchanged;
  const BufferId tokens = operation.buffer(step::role_of(model::Port::batch));
  const BufferId row_gradients = operation.buffer(step::role_of(model::Port::table_rows_gradient));
  const OpId emitted = plan_.emit(std::move(operation));
  values_.after(id, micro);
  for (const Operand& operand : pass.operands) {
    const bool adds = operand.kind == OperandKind::gradient;
    if (adds && program_.sums[operand.number].by_token) rows_.keep_tokens(pass.block, tokens);
  }
  if (row_gradients != kNoBuffer) {
    const auto rows =
        std::ranges::find(pass.operands, model::Port::table_rows_gradient, &Operand::port);
    rows_.keep_gradients(rows->number, micro, row_gradients, values_.batch_on_host(micro));
  }
  return emitted;
}

BufferId StepWriter::bind(const Operand& operand, PassId pass, std::uint32_t micro) {
  switch (operand.kind) {
    case OperandKind::weights:
      return weights_.on_device(operand.number);
    case OperandKind::rows:
      if (operand.access == OperandAccess::writes) return rows_.next_gradients(operand.number);
      return rows_.on_device(operand.number, micro, values_.batch_on_host(micro));
    case OperandKind::gradient:
      return gradients_.on_device(operand.number);
    case OperandKind::workspace:
      return layout_.devices[placed_.device_of(program_.passes[pass].block)].workspace;
    case OperandKind::value:
      break;
  }
  return values_.bind(operand, pass, micro);
}

void StepWriter::select_ahead(const Stop& stop, const Group& group) {
  for (std::uint32_t m = group.begin; m < group.end; ++m) {
    for_operands(stop, [&](const Operand& operand) {
      if (operand.kind != OperandKind::rows || operand.access != OperandAccess::reads) return;
      rows_.select_ahead(operand.number, m, values_.batch_on_host(m));
    });
  }
}

void StepWriter::finish(BlockId block) {
  gradients_.deliver(block);
  if (placed_.update_pass(block) == UpdatedIn::backward) updates_.update(block, 0);
  fetch_states_ahead(UpdatedIn::forward, ahead_of_forward_, blocks() - 1 - block);
}

/// Fetches states for the first updates of a pass during the preceding pass. States without a free
/// buffer follow at the next block.
void StepWriter::fetch_states_ahead(UpdatedIn pass, EventSpread& ahead, std::uint32_t at) {
  while (ahead.due(at) && updates_.has_room_ahead(pass, ahead.next())) {
    updates_.fetch_states_ahead(pass, ahead.take());
  }
}

/// Returns whether gated updates wait for the next step.
bool StepWriter::leaves_updates() const {
  for (BlockId b = 0; b < blocks(); ++b) {
    if (is_updated_in_forward(b)) return true;
  }
  return false;
}

}  // namespace ballast::step
