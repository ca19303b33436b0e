#include "src/step/gradient_mover.h"

#include <utility>

#include "ballast/step/labels.h"

namespace ballast::step {

GradientMover::GradientMover(MoveContext& plan, RowMover& rows)
    : Mover(plan),
      rows_(rows),
      on_device_(layout_.values.sums),
      staging_(layout_.gradient_staging),
      scattered_(layout_.scattered) {
  for (const DevicePlaces& places : layout_.devices) slots_.emplace_back(places.gradient_slots);
  for (const auto& ring : layout_.values.sum_rings) rings_.emplace_back(ring);
}

void GradientMover::emit_if_used(Operation operation) {
  const Condition used = plan_.for_gradient(operation.block);
  plan_.emit_if(used, std::move(operation));
}

void GradientMover::bring_sum(model::SumId sum, std::uint32_t micro) {
  on_device_[sum] = rings_[layout_.values.ring_of[sum]].next();
  if (micro > 0) move_sum(Action::upload, sum, micro);
}

void GradientMover::offload_sum(model::SumId sum, std::uint32_t micro) {
  move_sum(Action::offload, sum, micro);
}

void GradientMover::move_sum(Action action, model::SumId sum, std::uint32_t micro) {
  const BufferId home = layout_.values.sums_on_host[sum];
  const bool up = action == Action::upload;
  plan_.emit({.action = action,
              .payload = Payload::value,
              .block = program_.sums[sum].block,
              .micro = micro,
              .label = step::label_of(step::MovedValue::gradient_sum),
              .bytes = program_.sums[sum].bytes,
              .uses = {{Role::source, up ? home : on_device_[sum], false},
                       {Role::target, up ? on_device_[sum] : home, true}}});
}

void GradientMover::deliver(std::uint32_t block) {
  if (!placed_.is_trained(block)) return;
  if (!placed_.packs_on_device(block)) {
    rows_.scatter(block, next_delivered(block));
    return writeback_delivered(block);
  }
  BufferId packed = pack_on_device(block);
  if (rank_.is_distributed(block)) packed = reduce(block, packed);
  if (at(block).optimizer != Tier::device) offload(block, packed);
  emit_if_used({.action = Action::offload,
                .payload = Payload::statistics,
                .block = block,
                .clears_when_idle = true,
                .bytes = problem_.statistics_bytes,
                .uses = {{Role::source, layout_.statistics_device[block], false},
                         {Role::target, layout_.statistics_host[block], true}}});
}

BufferId GradientMover::pack_on_device(std::uint32_t block) {
  const bool on_device = at(block).optimizer == Tier::device;
  const BufferId packed = on_device && !rank_.shards_gradients(block)
                              ? layout_.gradient[block]
                              : slots_[placed_.device_of(block)].next();
  if (placed_.is_trained_table(block)) {
    const BufferId scattered = scattered_.next();
    rows_.scatter(block, scattered);
    plan_.emit({.action = Action::upload,
                .payload = Payload::gradient,
                .block = block,
                .bytes = rank_.padded_gradient(block),
                .uses = {{Role::source, scattered, false}, {Role::target, packed, true}}});
    return packed;
  }
  std::vector<Use> uses = {{Role::target, packed, true}};
  // With several ranks, reduce() computes the statistics of the sum.
  if (!rank_.is_distributed(block)) {
    uses.push_back({Role::statistics, layout_.statistics_device[block], true});
  }
  Bytes traffic = problem_.blocks[block].gradient_bytes;
  const std::vector<model::SumId>& sums = problem_.index->sums_of(block);
  for (const model::SumId sum : sums) {
    const Role role = sum == sums.front() ? Role::source : Role::added_gradient;
    uses.push_back({role, on_device_[sum], false});
    traffic += program_.sums[sum].bytes;
  }
  rows_.add_tokens(block, uses);
  // An update on the device reads the gradient there.
  emit_if_used({.action = Action::pack,
                .payload = Payload::gradient,
                .block = block,
                .clears_when_idle = on_device,
                .traffic = traffic,
                .uses = std::move(uses)});
  return packed;
}

void GradientMover::offload(std::uint32_t block, BufferId packed) {
  emit_if_used({.action = Action::offload,
                .payload = Payload::gradient,
                .block = block,
                .clears_when_idle = true,
                .bytes = rank_.updated_gradient(block),
                .uses = {{Role::source, packed, false, rank_.shards_states(block)},
                         {Role::target, next_delivered(block), true}}});
  writeback_delivered(block);
}

BufferId GradientMover::next_delivered(std::uint32_t block) {
  delivered_ = placed_.swaps_gradient(block) ? staging_.next() : layout_.gradient[block];
  return delivered_;
}

void GradientMover::writeback_delivered(std::uint32_t block) {
  const BufferId home = layout_.gradient[block];
  if (!placed_.swaps_gradient(block) || home == kNoBuffer) return;
  emit_if_used({.action = Action::writeback,
                .payload = Payload::gradient,
                .block = block,
                .bytes = placed_.swapped_gradient_bytes(block),
                .uses = {{Role::source, delivered_, false}, {Role::target, home, true}}});
}

BufferId GradientMover::on_host(std::uint32_t block, std::uint32_t lag) {
  const BufferId home = layout_.gradient[block];
  if (!placed_.swaps_gradient(block)) return home;
  if (lag == 0) return delivered_;
  const BufferId staging = staging_.next();
  Operation fetch = {.action = Action::fetch,
                     .payload = Payload::gradient,
                     .block = block,
                     .lag = lag,
                     .clears_when_idle = true,
                     .bytes = placed_.swapped_gradient_bytes(block),
                     .uses = {{Role::source, home, false}, {Role::target, staging, true}}};
  plan_.emit_if(plan_.for_gradient(block, lag), std::move(fetch));
  return staging;
}

BufferId GradientMover::reduce(std::uint32_t block, BufferId packed) {
  const bool moves = at(block).optimizer == Tier::device && rank_.shards_gradients(block);
  const BufferId reduced = moves ? layout_.gradient[block] : packed;
  std::vector<Use> uses = {{Role::target, reduced, true, !moves && rank_.shards_states(block)},
                           {Role::statistics, layout_.statistics_device[block], true},
                           {Role::scratch, places_of(block).received, true}};
  if (moves) uses.push_back({Role::source, packed, false});
  // An all-reduce is a reduce-scatter and an all-gather.
  const Bytes once = rank_.received_from_all(rank_.padded_gradient(block));
  // In place, the packing has already cleared it.
  emit_if_used({.action = Action::reduce,
                .payload = Payload::gradient,
                .block = block,
                .clears_when_idle = moves,
                .bytes = rank_.shards_states(block) ? once : 2 * once,
                .uses = std::move(uses)});
  return reduced;
}

OpId GradientMover::gate(bool training) {
  std::vector<Use> uses = {{Role::losses, layout_.values.report_on_host, false},
                           {Role::decision, layout_.decision, true}};
  if (training) {
    for (const BufferId id : layout_.statistics_host) {
      if (id != kNoBuffer) uses.push_back({Role::statistics, id, false});
    }
    for (const model::ValueId value : problem_.index->values().reported_counts) {
      uses.push_back({Role::counts, layout_.values.counts[value], false});
    }
  }
  return plan_.emit({.action = Action::gate, .uses = std::move(uses)});
}

}  // namespace ballast::step
