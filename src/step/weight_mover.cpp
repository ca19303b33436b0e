#include "src/step/weight_mover.h"

#include <utility>

#include "ballast/step/labels.h"

namespace ballast::step {

WeightMover::WeightMover(MoveContext& plan) : Mover(plan), staging_(layout_.weight_staging) {
  caches_.reserve(layout_.devices.size());
  for (const DevicePlaces& places : layout_.devices) {
    caches_.push_back({BufferCache(places.weight_slots), BufferCache(places.share_slots),
                       BufferCache(places.dequantized)});
  }
}

BufferId WeightMover::on_device(std::uint32_t block, Condition when) {
  const BlockSizes& sizes = problem_.blocks[block];
  if (!sizes.is_quantized()) return kept_on_device(block, when);
  // Dequantised weights stay valid: in a plan, an update of a block has all passes on one side.
  const BufferCache::Entry place = caches_of(block).dequantized.take(block, when);
  if (!place.fill) return place.buffer;
  plan_.emit_if(when,
                {.action = Action::decode,
                 .payload = Payload::weights,
                 .block = block,
                 .traffic = sizes.weight_bytes + sizes.dequantized_bytes,
                 .uses = {{Role::source, kept_on_device(block, when), false},
                          {Role::target, place.buffer, true}}},
                place.unless);
  return place.buffer;
}

/// Returns the device buffer with the whole weights of `block` as stored.
BufferId WeightMover::kept_on_device(std::uint32_t block, Condition when) {
  const bool split = rank_.shards_weights(block);
  if (at(block).weights == Tier::device && !split) return layout_.weight_home[block];
  const BufferCache::Entry slot = caches_of(block).slots.take(block, when);
  if (!slot.fill) return slot.buffer;
  if (split) {
    gather(block, share_on_device(block, when), slot.buffer, when, slot.unless);
  } else {
    bring(slot, Action::upload, block, on_host(block, when), when);
  }
  return slot.buffer;
}

/// Returns the device buffer with this rank's share of split weights; moves it there if necessary.
BufferId WeightMover::share_on_device(std::uint32_t block, Condition when) {
  if (at(block).weights == Tier::device) return layout_.weight_home[block];
  const BufferCache::Entry slot = caches_of(block).share_slots.take(block, when);
  if (slot.fill) bring(slot, Action::upload, block, on_host(block, when), when);
  return slot.buffer;
}

/// Returns the host buffer with weights that are on the host or on NVMe.
BufferId WeightMover::on_host(std::uint32_t block, Condition when) {
  return at(block).weights == Tier::nvme ? in_staging(block, when) : layout_.weight_home[block];
}

/// Fetches weights from NVMe unless an update or an earlier fetch left them in staging. If the
/// trained ones are in host memory, only the frozen ones pass through staging.
BufferId WeightMover::in_staging(std::uint32_t block, Condition when) {
  const BufferCache::Entry staging = staging_.take(block, when);
  if (!staging.fill) return staging.buffer;
  const BufferId home = layout_.weight_home[block];
  if (has_separate_trained_home(block, Tier::host)) {
    copy(Action::fetch, block,
         {.from = {.buffer = home},
          .to = {.buffer = staging.buffer},
          .bytes = rank_.resident_weights(block) - rank_.trained_weights(block),
          .when = when,
          .unless = staging.unless});
  } else {
    bring(staging, Action::fetch, block, home, when);
  }
  return staging.buffer;
}

void WeightMover::bring(const BufferCache::Entry& place, Action action, std::uint32_t block,
                        BufferId from, Condition when) {
  // A separate home, on the tier that they all come from, or through which the others passed.
  const Tier tier = action == Action::fetch ? Tier::nvme : Tier::host;
  const bool split = has_separate_trained_home(block, tier);
  if (split) bring_frozen(place, action, block, from, when);
  copy(action, block,
       {.from = {.buffer = split ? layout_.trained_home[block] : from},
        .to = {.buffer = place.buffer},
        .bytes = split ? rank_.trained_weights(block) : rank_.resident_weights(block),
        .when = when,
        .unless = place.unless});
}

/// Brings the frozen weights; the trained ones follow separately.
void WeightMover::bring_frozen(const BufferCache::Entry& place, Action action, std::uint32_t block,
                               BufferId from, Condition when) {
  const Bytes trained = rank_.trained_weights(block);
  copy(action, block,
       {.from = {.buffer = from},
        .to = {.buffer = place.buffer},
        .bytes = rank_.resident_weights(block) - trained,
        .when = when,
        .unless = place.unless,
        .offset = trained});
}

void WeightMover::copy(Action action, std::uint32_t block, const Copy& copy) {
  plan_.emit_if(copy.when,
                {.action = action,
                 .payload = Payload::weights,
                 .block = block,
                 .bytes = copy.bytes,
                 .offset = copy.offset,
                 .uses = {{Role::source, copy.from.buffer, false, copy.from.shard},
                          {Role::target, copy.to.buffer, true, copy.to.shard}}},
                copy.unless);
}

/// Gathers split weights from this rank's group. If `from` is `to`, gathers updated shards in place
/// from all ranks that keep the same weights; never as codes, because the next update reads them.
void WeightMover::gather(std::uint32_t block, BufferId from, BufferId to, Condition when,
                         std::optional<Condition> unless) {
  const bool share = rank_.shards_weights(block);
  Operation gathering = {.action = Action::gather,
                         .payload = Payload::weights,
                         .group = share ? RankGroup::same_share : RankGroup::all,
                         .block = block,
                         .bytes = rank_.trained_weights(block) - rank_.updated_weights(block),
                         .uses = {{Role::target, to, true}}};
  if (from != to) {
    const Bytes whole = rank_.padded_weights(block);
    gathering.group = RankGroup::weight_copy;
    gathering.bytes = rank_.received_from_copy(whole);
    gathering.uses.push_back({Role::source, from, false});
    if (rank_.quantizes_gathers()) {
      const Bytes codes = rank_.gathered_codes(block);
      gathering.bytes = rank_.received_from_copy(codes);
      gathering.traffic =
          rank_.weight_partition(block) + rank_.partition_codes(block) + codes + whole;
      gathering.uses.push_back({Role::scratch, places_of(block).codes, true});
    }
  }
  plan_.emit_if(when, std::move(gathering), unless);
}

ProgramIndex::Blocks WeightMover::blocks_ahead(std::uint32_t router, model::ValueId routing) const {
  const ProgramIndex::Blocks counting = problem_.index->counting_in(routing);
  // The weights of the router, and of blocks for all rows, are used first.
  std::uint32_t slots = placed_.options.buffers.weight_slots;
  std::uint32_t staging = placed_.options.buffers.weight_staging;
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

void WeightMover::prefetch(std::uint32_t block) {
  Condition before = plan_.for_pass(block);
  if (before.rows == Condition::Rows::in_micro_batch && before.micro > 0) {
    --before.micro;
  } else {
    before.rows = Condition::Rows::in_step_before;
  }
  kept_on_device(block, before);
}

}  // namespace ballast::step
