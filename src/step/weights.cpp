#include <algorithm>
#include <cmath>
#include <utility>

#include "ballast/step/labels.h"

#include "src/step/movements.h"

namespace ballast::step {

Movements::Movements(std::string name, const PlacedProblem& placed, const Layout& layout,
                     std::uint32_t micro_batches)
    : placed_(placed),
      problem_(placed.problem),
      program_(problem_.program()),
      options_(placed.options),
      layout_(layout),
      rank_(placed.sizes),
      emitter_(std::move(name), layout.buffers.size(), micro_batches),
      weight_staging_(layout.weight_staging),
      sums_(layout.values.sums),
      gradient_staging_(layout.gradient_staging),
      table_rows_(layout.table_rows),
      row_gradients_(layout.row_gradients),
      scattered_(layout.scattered),
      kept_rows_(placed.problem.blocks.size()),
      ordinal_(problem_.blocks.size(), 0) {
  caches_.reserve(layout.devices.size());
  for (const DevicePlaces& places : layout.devices) caches_.emplace_back(places);
  for (const auto& ring : layout.values.sum_rings) sum_rings_.emplace_back(ring);
  std::size_t slot = 0;
  for (const UpdatedIn pass : {UpdatedIn::forward, UpdatedIn::backward}) {
    SwappedGroup& group = swapped_in(pass);
    group = {.states = placed.swapped_states(pass), .first_slot = slot};
    slot += group.states.size();
    for (std::size_t i = 0; i < group.states.size(); ++i) {
      if (group.states[i].sub_group == 0) ordinal_[group.states[i].block] = i;
    }
  }
}

Condition Movements::for_pass(std::uint32_t block) const {
  if (rows_of(block) == nullptr) return {};
  const bool step = options_.order == Order::layer_major;
  return {.rows = step ? Condition::Rows::in_step : Condition::Rows::in_micro_batch,
          .micro = step ? 0 : passing_,
          .any_rank = rank_.keeps_part_of_weights(block)};
}

Condition Movements::for_gradient(std::uint32_t block, std::uint32_t lag) const {
  if (rows_of(block) == nullptr) return {};
  return {.rows = lag > 0 ? Condition::Rows::in_step_before : Condition::Rows::in_step,
          .any_rank = rank_.is_distributed()};
}

Condition Movements::for_update(std::uint32_t block, std::uint32_t lag) const {
  return options_.expert_updates == ExpertUpdates::all ? Condition() : for_gradient(block, lag);
}

void Movements::add_condition(Operation& operation, Condition condition,
                              std::optional<Condition> unless) const {
  operation.condition = condition;
  operation.unless = unless;
  const model::RowCount* const counted = rows_of(operation.block);
  const auto likelihood = [&](const Condition& rows) {
    if (rows.always()) return 1.0;
    const bool one = rows.rows == Condition::Rows::in_micro_batch;
    const double tokens = static_cast<double>(problem_.micro_batch_tokens) *
                          (one ? 1.0 : static_cast<double>(problem_.micro_batches)) *
                          (rows.any_rank ? static_cast<double>(problem_.sharers) : 1.0);
    return 1.0 - std::pow(1.0 - counted->share, tokens);
  };
  const double there = unless ? likelihood(*unless) : 0.0;
  operation.likelihood = static_cast<float>(likelihood(condition) * (1.0 - there));
  if (!condition.reads_routing() && !(unless && unless->reads_routing())) return;
  operation.uses.push_back({Role::counts, layout_.values.counts[counted->routing], false});
}

BufferId Movements::weights_on_device(std::uint32_t block, Condition when) {
  const BlockSizes& sizes = problem_.blocks[block];
  if (!sizes.is_quantized()) return kept_on_device(block, when);
  // Dequantised weights stay valid: in a plan, an update of a block has all passes on one side.
  const BufferCache::Entry place = caches_of(block).dequantized.take(block, when);
  if (!place.fill) return place.buffer;
  Operation decode = {.action = Action::decode,
                      .payload = Payload::weights,
                      .block = block,
                      .traffic = sizes.weight_bytes + sizes.dequantized_bytes,
                      .uses = {{Role::source, kept_on_device(block, when), false},
                               {Role::target, place.buffer, true}}};
  add_condition(decode, when, place.unless);
  emit(std::move(decode));
  return place.buffer;
}

/// Returns the device buffer with the whole weights of `block` as stored.
BufferId Movements::kept_on_device(std::uint32_t block, Condition when) {
  const bool split = rank_.shards_weights(block);
  if (at(block).weights == Tier::device && !split) return layout_.weight_home[block];
  const BufferCache::Entry slot = caches_of(block).slots.take(block, when);
  if (!slot.fill) return slot.buffer;
  if (split) {
    gather_weights(block, share_on_device(block, when), slot.buffer, when, slot.unless);
  } else {
    bring_weights(slot, Action::upload, block, weights_on_host(block, when), when);
  }
  return slot.buffer;
}

/// Returns the device buffer with this rank's share of split weights; moves it there if necessary.
BufferId Movements::share_on_device(std::uint32_t block, Condition when) {
  if (at(block).weights == Tier::device) return layout_.weight_home[block];
  const BufferCache::Entry slot = caches_of(block).share_slots.take(block, when);
  if (slot.fill) bring_weights(slot, Action::upload, block, weights_on_host(block, when), when);
  return slot.buffer;
}

/// Returns the host buffer with weights that are on the host or on NVMe.
BufferId Movements::weights_on_host(std::uint32_t block, Condition when) {
  return at(block).weights == Tier::nvme ? weights_in_staging(block, when)
                                         : layout_.weight_home[block];
}

/// Fetches weights from NVMe unless an update or an earlier fetch left them in staging. If the
/// trained ones are in host memory, only the frozen ones pass through staging.
BufferId Movements::weights_in_staging(std::uint32_t block, Condition when) {
  const BufferCache::Entry staging = weight_staging_.take(block, when);
  if (!staging.fill) return staging.buffer;
  const BufferId home = layout_.weight_home[block];
  if (has_separate_trained_home(block, Tier::host)) {
    copy_weights(Action::fetch, block,
                 {.from = {.buffer = home},
                  .to = {.buffer = staging.buffer},
                  .bytes = rank_.resident_weights(block) - rank_.trained_weights(block),
                  .when = when,
                  .unless = staging.unless});
  } else {
    bring_weights(staging, Action::fetch, block, home, when);
  }
  return staging.buffer;
}

BufferId Movements::rows_on_device(std::uint32_t table, std::uint32_t micro, BufferId tokens) {
  BufferId selected = kNoBuffer;
  if (!ahead_.empty() && table_ahead_ == table) {
    selected = ahead_.front();
    ahead_.pop_front();
  } else {
    selected = select_rows(table, micro, tokens);
  }
  const BufferId place = caches_of(table).table_rows.next();
  emit({.action = Action::upload,
        .payload = Payload::value,
        .block = table,
        .micro = micro,
        .label = step::label_of(step::MovedValue::rows),
        .bytes = program_.blocks[table].selected,
        .uses = {{Role::source, selected, false}, {Role::target, place, true}}});
  return place;
}

/// Returns the host buffer with the rows.
BufferId Movements::select_rows(std::uint32_t table, std::uint32_t micro, BufferId tokens) {
  const BufferId selected = table_rows_.next();
  emit({.action = Action::select,
        .payload = Payload::value,
        .block = table,
        .micro = micro,
        .label = step::label_of(step::MovedValue::rows),
        .traffic = 2 * program_.blocks[table].selected,
        .uses = {{Role::source, weights_on_host(table, {}), false},
                 {Role::tokens, tokens, false},
                 {Role::target, selected, true}}});
  return selected;
}

void Movements::bring_weights(const BufferCache::Entry& place, Action action, std::uint32_t block,
                              BufferId from, Condition when) {
  // A separate home, on the tier that they all come from, or through which the others passed.
  const Tier tier = action == Action::fetch ? Tier::nvme : Tier::host;
  const bool split = has_separate_trained_home(block, tier);
  if (split) bring_frozen(place, action, block, from, when);
  copy_weights(action, block,
               {.from = {.buffer = split ? layout_.trained_home[block] : from},
                .to = {.buffer = place.buffer},
                .bytes = split ? rank_.trained_weights(block) : rank_.resident_weights(block),
                .when = when,
                .unless = place.unless});
}

/// Brings the frozen weights; the trained ones follow separately.
void Movements::bring_frozen(const BufferCache::Entry& place, Action action, std::uint32_t block,
                             BufferId from, Condition when) {
  const Bytes trained = rank_.trained_weights(block);
  copy_weights(action, block,
               {.from = {.buffer = from},
                .to = {.buffer = place.buffer},
                .bytes = rank_.resident_weights(block) - trained,
                .when = when,
                .unless = place.unless,
                .offset = trained});
}

void Movements::copy_weights(Action action, std::uint32_t block, const Copy& copy) {
  Operation operation = {.action = action,
                         .payload = Payload::weights,
                         .block = block,
                         .bytes = copy.bytes,
                         .offset = copy.offset,
                         .uses = {{Role::source, copy.from.buffer, false, copy.from.shard},
                                  {Role::target, copy.to.buffer, true, copy.to.shard}}};
  add_condition(operation, copy.when, copy.unless);
  emit(std::move(operation));
}

/// Gathers split weights from this rank's group. If `from` is `to`, gathers updated shards in place
/// from all ranks that keep the same weights; never as codes, because the next update reads them.
void Movements::gather_weights(std::uint32_t block, BufferId from, BufferId to, Condition when,
                               std::optional<Condition> unless) {
  const bool share = rank_.shards_weights(block);
  Operation gather = {.action = Action::gather,
                      .payload = Payload::weights,
                      .group = share ? RankGroup::same_share : RankGroup::all,
                      .block = block,
                      .bytes = rank_.trained_weights(block) - rank_.updated_weights(block),
                      .uses = {{Role::target, to, true}}};
  if (from != to) {
    const Bytes whole = rank_.padded_weights(block);
    gather.group = RankGroup::weight_copy;
    gather.bytes = rank_.received_from_copy(whole);
    gather.uses.push_back({Role::source, from, false});
    if (rank_.quantizes_gathers()) {
      const Bytes codes = rank_.gathered_codes(block);
      gather.bytes = rank_.received_from_copy(codes);
      gather.traffic = rank_.weight_partition(block) + rank_.partition_codes(block) + codes + whole;
      gather.uses.push_back({Role::scratch, places_of(block).codes, true});
    }
  }
  add_condition(gather, when, unless);
  emit(std::move(gather));
}

ProgramIndex::Blocks Movements::blocks_ahead(std::uint32_t router, model::ValueId routing) const {
  const ProgramIndex::Blocks counting = problem_.index->counting_in(routing);
  // The weights of the router, and of blocks for all rows, are used first.
  std::uint32_t slots = options_.buffers.weight_slots;
  std::uint32_t staging = options_.buffers.weight_staging;
  const auto take = [&](std::uint32_t b) {
    const bool passes = at(b).weights != Tier::device || rank_.shards_weights(b);
    const bool fetched = at(b).weights == Tier::nvme;
    if ((passes && slots == 0) || (fetched && staging == 0)) return false;
    slots -= passes ? 1 : 0;
    staging -= fetched ? 1 : 0;
    return true;
  };
  std::uint32_t next = router;
  while (next < counting.end && take(next)) ++next;
  if (next < counting.begin || counting.end == 0) return {};
  return {counting.begin, next};
}

void Movements::prefetch(std::uint32_t block) {
  Condition before = for_pass(block);
  if (before.rows == Condition::Rows::in_micro_batch && before.micro > 0) {
    --before.micro;
  } else {
    before.rows = Condition::Rows::in_step_before;
  }
  kept_on_device(block, before);
}

}  // namespace ballast::step
