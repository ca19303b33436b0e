#include <utility>

#include "ballast/step/labels.h"

#include "src/step/movements.h"

// The part of Movements that moves gradient sums between micro-batches, and complete gradients to
// their updates.

namespace ballast::step {

void Movements::emit_if_used(Operation operation) {
  add_condition(operation, for_gradient(operation.block));
  emit(std::move(operation));
}

void Movements::keep_row_gradients(std::uint32_t table, std::uint32_t micro, BufferId written,
                                   BufferId tokens) {
  const BufferId kept = row_gradients_.next();
  emit({.action = Action::offload,
        .payload = Payload::value,
        .block = table,
        .micro = micro,
        .label = step::label_of(step::MovedValue::row_gradients),
        .bytes = program_.blocks[table].row_gradients,
        .uses = {{Role::source, written, false}, {Role::target, kept, true}}});
  kept_rows_[table].push_back({kept, tokens});
}

void Movements::bring_sum(model::SumId sum, std::uint32_t micro) {
  sums_[sum] = sum_rings_[layout_.values.ring_of[sum]].next();
  if (micro > 0) move_sum(Action::upload, sum, micro);
}

void Movements::offload_sum(model::SumId sum, std::uint32_t micro) {
  move_sum(Action::offload, sum, micro);
}

void Movements::move_sum(Action action, model::SumId sum, std::uint32_t micro) {
  const BufferId home = layout_.values.sums_on_host[sum];
  const bool up = action == Action::upload;
  emit({.action = action,
        .payload = Payload::value,
        .block = program_.sums[sum].block,
        .micro = micro,
        .label = step::label_of(step::MovedValue::gradient_sum),
        .bytes = program_.sums[sum].bytes,
        .uses = {{Role::source, up ? home : sums_[sum], false},
                 {Role::target, up ? sums_[sum] : home, true}}});
}

void Movements::deliver_gradient(std::uint32_t block) {
  if (!placed_.is_trained(block)) return;
  if (!placed_.packs_on_device(block)) {
    scatter(block, next_delivered(block));
    return writeback_delivered(block);
  }
  BufferId packed = pack_on_device(block);
  if (rank_.is_distributed(block)) packed = reduce_gradient(block, packed);
  if (at(block).optimizer != Tier::device) offload_gradient(block, packed);
  emit_if_used({.action = Action::offload,
                .payload = Payload::statistics,
                .block = block,
                .clears_when_idle = true,
                .bytes = problem_.statistics_bytes,
                .uses = {{Role::source, layout_.statistics_device[block], false},
                         {Role::target, layout_.statistics_host[block], true}}});
}

/// Returns the device buffer with the packed gradient.
BufferId Movements::pack_on_device(std::uint32_t block) {
  const bool on_device = at(block).optimizer == Tier::device;
  const BufferId packed = on_device && !rank_.shards_gradients(block)
                              ? layout_.gradient[block]
                              : caches_of(block).gradient_slots.next();
  if (placed_.is_trained_table(block)) {
    const BufferId scattered = scattered_.next();
    scatter(block, scattered);
    emit({.action = Action::upload,
          .payload = Payload::gradient,
          .block = block,
          .bytes = rank_.padded_gradient(block),
          .uses = {{Role::source, scattered, false}, {Role::target, packed, true}}});
    return packed;
  }
  std::vector<Use> uses = {{Role::target, packed, true}};
  // With several ranks, reduce_gradient() computes the statistics of the sum.
  if (!rank_.is_distributed(block)) {
    uses.push_back({Role::statistics, layout_.statistics_device[block], true});
  }
  Bytes traffic = problem_.blocks[block].gradient_bytes;
  const std::vector<model::SumId>& sums = problem_.index->sums_of(block);
  for (const model::SumId sum : sums) {
    const Role role = sum == sums.front() ? Role::source : Role::added_gradient;
    uses.push_back({role, sums_[sum], false});
    traffic += program_.sums[sum].bytes;
  }
  for (const KeptRows& rows : kept_rows_[block]) uses.push_back({Role::tokens, rows.tokens, false});
  kept_rows_[block].clear();
  // An update on the device reads the gradient there.
  emit_if_used({.action = Action::pack,
                .payload = Payload::gradient,
                .block = block,
                .clears_when_idle = on_device,
                .traffic = traffic,
                .uses = std::move(uses)});
  return packed;
}

/// Packs the gradient of a table in the host buffer `packed`, with its statistics unless it is then
/// summed over the ranks.
void Movements::scatter(std::uint32_t block, BufferId packed) {
  std::vector<Use> uses = {{Role::target, packed, true}};
  if (!rank_.is_distributed(block)) {
    uses.push_back({Role::statistics, layout_.statistics_host[block], true});
  }
  Bytes traffic = rank_.padded_gradient(block);
  for (const KeptRows& rows : kept_rows_[block]) {
    uses.push_back({Role::source, rows.gradient, false});
    uses.push_back({Role::tokens, rows.tokens, false});
    traffic += program_.blocks[block].row_gradients;
  }
  kept_rows_[block].clear();
  emit({.action = Action::scatter,
        .payload = Payload::gradient,
        .block = block,
        .traffic = traffic,
        .uses = std::move(uses)});
}

void Movements::offload_gradient(std::uint32_t block, BufferId packed) {
  emit_if_used({.action = Action::offload,
                .payload = Payload::gradient,
                .block = block,
                .clears_when_idle = true,
                .bytes = rank_.updated_gradient(block),
                .uses = {{Role::source, packed, false, rank_.shards_states(block)},
                         {Role::target, next_delivered(block), true}}});
  writeback_delivered(block);
}

/// Returns the host buffer for a packed gradient that an update on the host will read.
BufferId Movements::next_delivered(std::uint32_t block) {
  delivered_ = placed_.swaps_gradient(block) ? gradient_staging_.next() : layout_.gradient[block];
  return delivered_;
}

void Movements::writeback_delivered(std::uint32_t block) {
  const BufferId home = layout_.gradient[block];
  if (!placed_.swaps_gradient(block) || home == kNoBuffer) return;
  emit_if_used({.action = Action::writeback,
                .payload = Payload::gradient,
                .block = block,
                .bytes = placed_.swapped_gradient_bytes(block),
                .uses = {{Role::source, delivered_, false}, {Role::target, home, true}}});
}

BufferId Movements::gradient_on_host(std::uint32_t block, std::uint32_t lag) {
  const BufferId home = layout_.gradient[block];
  if (!placed_.swaps_gradient(block)) return home;
  if (lag == 0) return delivered_;
  const BufferId staging = gradient_staging_.next();
  Operation fetch = {.action = Action::fetch,
                     .payload = Payload::gradient,
                     .block = block,
                     .lag = lag,
                     .clears_when_idle = true,
                     .bytes = placed_.swapped_gradient_bytes(block),
                     .uses = {{Role::source, home, false}, {Role::target, staging, true}}};
  add_condition(fetch, for_gradient(block, lag));
  emit(std::move(fetch));
  return staging;
}

/// Sums `packed` over the ranks, in place unless its home on the device has only this rank's shard.
/// Returns the buffer with the sum.
BufferId Movements::reduce_gradient(std::uint32_t block, BufferId packed) {
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

OpId Movements::gate(bool training) {
  std::vector<Use> uses = {{Role::losses, layout_.values.report_on_host, false},
                           {Role::decision, layout_.decision, true}};
  if (training) {
    for (const BufferId id : layout_.statistics_host) {
      if (id != kNoBuffer) uses.push_back({Role::statistics, id, false});
    }
    for (const model::ValueId value : problem_.index->values().counts) {
      uses.push_back({Role::counts, layout_.values.counts[value], false});
    }
  }
  return emit({.action = Action::gate, .uses = std::move(uses)});
}

}  // namespace ballast::step
