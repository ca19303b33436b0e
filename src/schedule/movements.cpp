#include "src/schedule/movements.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace ballast::schedule {

Movements::Movements(std::string name, const Workload& workload, const Placement& placement,
                     const Options& options, const Layout& layout, std::uint32_t micro_batches)
    : work_(workload),
      place_(placement),
      options_(options),
      layout_(layout),
      rank_(workload),
      emitter_(std::move(name), layout.buffers.size(), micro_batches),
      slots_(layout.weight_slots),
      share_slots_(layout.share_slots),
      decoded_(layout.decoded),
      weight_staging_(layout.weight_staging),
      gradient_slots_(layout.gradient_slots),
      activation_slots_(layout.activation_slots),
      activation_staging_(layout.activation_staging),
      gradient_staging_(layout.gradient_staging),
      uploaded_(micro_batches, {0, kNoBuffer}),
      ordinal_(workload.blocks.size(), 0) {
  std::size_t slot = 0;
  for (const UpdatedIn pass : {UpdatedIn::forward, UpdatedIn::backward}) {
    Swapped& group = swapped_in(pass);
    group = {.states = swapped_states(workload, placement, options, pass), .first_slot = slot};
    slot += group.states.size();
    for (std::size_t i = 0; i < group.states.size(); ++i) {
      if (group.states[i].sub_group == 0) ordinal_[group.states[i].block] = i;
    }
  }
}

void Movements::compute(model::Kernel kernel, std::uint32_t block, std::uint32_t micro,
                        std::vector<Use> uses, double flops, Bytes traffic) {
  emit({.block = block,
        .micro = micro,
        .label = label_of(kernel),
        .speed = speed_of(kernel),
        .flops = flops,
        .traffic = traffic,
        .uses = std::move(uses)});
}

void Movements::move_value(Action action, MovedValue value, std::uint32_t block,
                           std::uint32_t micro, BufferId from, BufferId to, Bytes bytes) {
  emit({.action = action,
        .payload = Payload::value,
        .block = block,
        .micro = micro,
        .label = label_of(value),
        .bytes = bytes,
        .uses = {{Role::source, from, false}, {Role::target, to, true}}});
}

void Movements::upload_batch(std::uint32_t micro) {
  move_value(Action::upload, MovedValue::batch, 0, micro, layout_.batch_host[micro],
             layout_.batch_device[micro], work_.batch_bytes);
}

// Weights.

Condition Movements::for_pass(std::uint32_t block) const {
  if (!work_.blocks[block].is_expert) return {};
  const bool step = options_.order == Order::layer_major;
  return {.rows = step ? Condition::Rows::in_step : Condition::Rows::in_micro_batch,
          .micro = step ? 0 : passing_,
          .any_rank = rank_.keeps_part_of_weights(block)};
}

Condition Movements::for_gradient(std::uint32_t block, std::uint32_t lag) const {
  if (!work_.blocks[block].is_expert) return {};
  return {.rows = lag > 0 ? Condition::Rows::in_step_before : Condition::Rows::in_step,
          .any_rank = rank_.several()};
}

Condition Movements::for_update(std::uint32_t block, std::uint32_t lag) const {
  return options_.expert_updates == ExpertUpdates::all ? Condition() : for_gradient(block, lag);
}

void Movements::add_condition(Operation& operation, Condition condition,
                              std::optional<Condition> unless) const {
  operation.condition = condition;
  operation.unless = unless;
  const BlockWork& work = work_.blocks[operation.block];
  const auto likelihood = [&](const Condition& rows) {
    if (rows.always()) return 1.0;
    const bool one = rows.rows == Condition::Rows::in_micro_batch;
    const double tokens = static_cast<double>(work_.micro_batch_tokens) *
                          (one ? 1.0 : static_cast<double>(work_.micro_batches)) *
                          (rows.any_rank ? static_cast<double>(work_.world) : 1.0);
    return 1.0 - std::pow(1.0 - work.token_share, tokens);
  };
  const double there = unless ? likelihood(*unless) : 0.0;
  operation.likelihood = static_cast<float>(likelihood(condition) * (1.0 - there));
  if (!condition.reads_routing() && !(unless && unless->reads_routing())) return;
  operation.uses.push_back(
      {Role::counts, layout_.routing_host[work_.first_tile(operation.block)], false});
}

BufferId Movements::weights_on_device(std::uint32_t block, Condition when) {
  const BlockWork& work = work_.blocks[block];
  if (!work.is_coded()) return kept_on_device(block, when);
  // What has been decoded stays valid: in a plan, an update of a block has all passes on one side.
  const Passage::Taken place = decoded_.take(block, when);
  if (!place.fill) return place.buffer;
  Operation decode = {.action = Action::decode,
                      .payload = Payload::weights,
                      .block = block,
                      .traffic = work.weight_bytes + work.decoded_bytes,
                      .uses = {{Role::source, kept_on_device(block, when), false},
                               {Role::target, place.buffer, true}}};
  add_condition(decode, when, place.unless);
  emit(std::move(decode));
  return place.buffer;
}

/// The device buffer with the whole weights of `block` as they are kept.
BufferId Movements::kept_on_device(std::uint32_t block, Condition when) {
  const bool split = rank_.splits_weights(block);
  if (at(block).weights == Tier::device && !split) return layout_.weight_home[block];
  const Passage::Taken slot = slots_.take(block, when);
  if (!slot.fill) return slot.buffer;
  if (split) {
    gather_weights(block, share_on_device(block, when), slot.buffer, when, slot.unless);
  } else {
    bring_weights(slot, Action::upload, block, weights_on_host(block, when), when);
  }
  return slot.buffer;
}

/// The device buffer with this rank's share of split weights; moves it there if necessary.
BufferId Movements::share_on_device(std::uint32_t block, Condition when) {
  if (at(block).weights == Tier::device) return layout_.weight_home[block];
  const Passage::Taken slot = share_slots_.take(block, when);
  if (slot.fill) bring_weights(slot, Action::upload, block, weights_on_host(block, when), when);
  return slot.buffer;
}

/// The host buffer with weights that live on the host or on NVMe.
BufferId Movements::weights_on_host(std::uint32_t block, Condition when) {
  return at(block).weights == Tier::nvme ? weights_in_staging(block, when)
                                         : layout_.weight_home[block];
}

/// Fetches weights from NVMe unless an update or an earlier fetch left them in staging. Where the
/// trained ones are in host memory, only the frozen ones pass through staging.
BufferId Movements::weights_in_staging(std::uint32_t block, Condition when) {
  const Passage::Taken staging = weight_staging_.take(block, when);
  if (!staging.fill) return staging.buffer;
  const BufferId home = layout_.weight_home[block];
  if (splits_home(block, Tier::host)) {
    copy_weights(Action::fetch, block,
                 {.from = {.buffer = home},
                  .to = {.buffer = staging.buffer},
                  .bytes = rank_.weights(block) - rank_.updated_by_all(block),
                  .when = when,
                  .unless = staging.unless});
  } else {
    bring_weights(staging, Action::fetch, block, home, when);
  }
  return staging.buffer;
}

void Movements::bring_weights(const Passage::Taken& place, Action action, std::uint32_t block,
                              BufferId from, Condition when) {
  // A home of their own on the tier that they all come from, or that the others passed through.
  const Tier tier = action == Action::fetch ? Tier::nvme : Tier::host;
  const bool split = splits_home(block, tier);
  if (split) bring_frozen(place, action, block, from, when);
  copy_weights(action, block,
               {.from = {.buffer = split ? layout_.trained_home[block] : from},
                .to = {.buffer = place.buffer},
                .bytes = split ? rank_.updated_by_all(block) : rank_.weights(block),
                .when = when,
                .unless = place.unless});
}

/// Brings the frozen weights behind the trained ones, which follow.
void Movements::bring_frozen(const Passage::Taken& place, Action action, std::uint32_t block,
                             BufferId from, Condition when) {
  const Bytes trained = rank_.updated_by_all(block);
  copy_weights(action, block,
               {.from = {.buffer = from},
                .to = {.buffer = place.buffer},
                .bytes = rank_.weights(block) - trained,
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
  const bool share = rank_.splits_weights(block);
  Operation gather = {.action = Action::gather,
                      .payload = Payload::weights,
                      .group = share ? RankGroup::same_share : RankGroup::all,
                      .block = block,
                      .bytes = rank_.updated_by_all(block) - rank_.updated_weights(block),
                      .uses = {{Role::target, to, true}}};
  if (from != to) {
    const Bytes whole = rank_.whole_weights(block);
    gather.group = RankGroup::weight_copy;
    gather.bytes = rank_.exchanged_in_group(whole);
    gather.uses.push_back({Role::source, from, false});
    if (rank_.codes_weights()) {
      const Bytes codes = rank_.whole_codes(block);
      gather.bytes = rank_.exchanged_in_group(codes);
      gather.traffic = rank_.weight_share(block) + rank_.share_codes(block) + codes + whole;
      gather.uses.push_back({Role::scratch, layout_.codes, true});
    }
  }
  add_condition(gather, when, unless);
  emit(std::move(gather));
}

Movements::Range Movements::experts_ahead(std::uint32_t block) const {
  if (!options_.prefetches_experts || !work_.blocks[block].routes) return {};
  const std::uint32_t end = work_.last_tile(block) + 1;
  // The weights of the router, and of an expert for all rows, are used first.
  std::uint32_t slots = options_.buffers.weight_slots;
  std::uint32_t staging = options_.buffers.weight_staging;
  std::uint32_t next = block;
  const auto take = [&](std::uint32_t b) {
    const bool passes = at(b).weights != Tier::device || rank_.splits_weights(b);
    const bool fetched = at(b).weights == Tier::nvme;
    if ((passes && slots == 0) || (fetched && staging == 0)) return false;
    slots -= passes ? 1 : 0;
    staging -= fetched ? 1 : 0;
    return true;
  };
  while (next < end && !work_.blocks[next].is_expert && take(next)) ++next;
  const std::uint32_t first = next;
  if (first == end || !work_.blocks[first].is_expert) return {};
  while (next < end && take(next)) ++next;
  return {first, next};
}

void Movements::prefetch_expert(std::uint32_t block) {
  Condition before = for_pass(block);
  if (before.rows == Condition::Rows::in_micro_batch && before.micro > 0) {
    --before.micro;
  } else {
    before.rows = Condition::Rows::in_step_before;
  }
  kept_on_device(block, before);
}

// Activations.

BufferId Movements::intermediates(std::uint32_t block, std::uint32_t micro) const {
  const std::vector<BufferId>& kept = layout_.intermediates[block];
  return kept.empty() ? kNoBuffer : kept[place_among(micro)];
}

BufferId Movements::place_for_input(std::uint32_t block, std::uint32_t micro) {
  const auto& homes = layout_.input_home[block];
  if (homes.empty() || input_leaves(work_, place_, block)) return activation_slots_.next();
  return homes[place_among(micro)];
}

void Movements::store_input(std::uint32_t block, std::uint32_t micro, BufferId place) {
  if (!input_leaves(work_, place_, block)) return;
  const BufferId home = layout_.input_home[block][place_among(micro)];
  const bool to_nvme = at(block).activations == Tier::nvme;
  const BufferId host = to_nvme ? activation_staging_.next() : home;
  move_value(Action::offload, MovedValue::activation, block, micro, place, host,
             work_.activation_bytes);
  if (!to_nvme) return;
  move_value(Action::writeback, MovedValue::activation, block, micro, host, home,
             swapped_input_bytes(work_));
}

BufferId Movements::input_for_backward(std::uint32_t block, std::uint32_t micro) {
  const BufferId home = layout_.input_home[block][place_among(micro)];
  if (!input_leaves(work_, place_, block)) return home;
  auto& [uploaded, there] = uploaded_[micro];
  if (there != kNoBuffer && uploaded == block) return there;
  BufferId host = home;
  if (at(block).activations == Tier::nvme) {
    host = activation_staging_.next();
    move_value(Action::fetch, MovedValue::activation, block, micro, home, host,
               swapped_input_bytes(work_));
  }
  const BufferId slot = activation_slots_.next();
  move_value(Action::upload, MovedValue::activation, block, micro, host, slot,
             work_.activation_bytes);
  uploaded = block;
  there = slot;
  return slot;
}

// Gradients.

void Movements::emit_if_used(Operation operation) {
  add_condition(operation, for_gradient(operation.block));
  emit(std::move(operation));
}

void Movements::use_accumulator(std::vector<Use>& uses, std::uint32_t block) const {
  const BufferId sums = layout_.accumulator[block];
  if (sums != kNoBuffer) uses.push_back({role_of(model::Port::gradient), sums, true});
}

void Movements::deliver_gradient(std::uint32_t block) {
  const BlockWork& size = work_.blocks[block];
  if (size.is_frozen()) return;
  const bool on_device = at(block).optimizer == Tier::device;
  const BufferId home = layout_.gradient[block];
  BufferId packed = on_device && !rank_.splits_gradients(block) ? home : gradient_slots_.next();
  std::vector<Use> uses = {{Role::source, layout_.accumulator[block], false},
                           {Role::target, packed, true}};
  const Use statistics = {Role::statistics, layout_.statistics_device[block], true};
  // With several ranks, reduce_gradient() computes the statistics of the sum.
  if (!rank_.several(block)) uses.push_back(statistics);
  Bytes traffic = size.accumulator_bytes + size.gradient_bytes;
  if (work_.trains_tied() && work_.is_embedding(block)) {
    uses.push_back({Role::added_gradient, layout_.output_accumulator[block], false});
    traffic += work_.tied_accumulator_bytes;
  }
  // An update on the device reads the gradient there.
  emit_if_used({.action = Action::pack,
                .payload = Payload::gradient,
                .block = block,
                .clears_when_idle = on_device,
                .traffic = traffic,
                .uses = std::move(uses)});
  if (rank_.several(block)) packed = reduce_gradient(block, packed);
  if (!on_device) {
    const bool swaps = swaps_gradient(work_, place_, block);
    delivered_ = swaps ? gradient_staging_.next() : home;
    emit_if_used({.action = Action::offload,
                  .payload = Payload::gradient,
                  .block = block,
                  .clears_when_idle = true,
                  .bytes = rank_.updated_gradient(block),
                  .uses = {{Role::source, packed, false, rank_.splits_states(block)},
                           {Role::target, delivered_, true}}});
    if (swaps && home != kNoBuffer) {
      emit_if_used({.action = Action::writeback,
                    .payload = Payload::gradient,
                    .block = block,
                    .bytes = swapped_gradient_bytes(work_, block),
                    .uses = {{Role::source, delivered_, false}, {Role::target, home, true}}});
    }
  }
  emit_if_used({.action = Action::offload,
                .payload = Payload::statistics,
                .block = block,
                .clears_when_idle = true,
                .bytes = work_.statistics_bytes,
                .uses = {{Role::source, layout_.statistics_device[block], false},
                         {Role::target, layout_.statistics_host[block], true}}});
}

BufferId Movements::gradient_on_host(std::uint32_t block, std::uint32_t lag) {
  const BufferId home = layout_.gradient[block];
  if (!swaps_gradient(work_, place_, block)) return home;
  if (lag == 0) return delivered_;
  const BufferId staging = gradient_staging_.next();
  Operation fetch = {.action = Action::fetch,
                     .payload = Payload::gradient,
                     .block = block,
                     .lag = lag,
                     .clears_when_idle = true,
                     .bytes = swapped_gradient_bytes(work_, block),
                     .uses = {{Role::source, home, false}, {Role::target, staging, true}}};
  add_condition(fetch, for_gradient(block, lag));
  emit(std::move(fetch));
  return staging;
}

/// Sums `packed` over the ranks, in place unless its home on the device holds only this rank's
/// shard. Returns the buffer with the sum.
BufferId Movements::reduce_gradient(std::uint32_t block, BufferId packed) {
  const bool moves = at(block).optimizer == Tier::device && rank_.splits_gradients(block);
  const BufferId reduced = moves ? layout_.gradient[block] : packed;
  std::vector<Use> uses = {{Role::target, reduced, true, !moves && rank_.splits_states(block)},
                           {Role::statistics, layout_.statistics_device[block], true},
                           {Role::scratch, layout_.arriving, true}};
  if (moves) uses.push_back({Role::source, packed, false});
  // An all-reduce is a reduce-scatter and an all-gather.
  const Bytes once = rank_.exchanged(rank_.whole_gradient(block));
  // In place, the packing has already cleared it.
  emit_if_used({.action = Action::reduce,
                .payload = Payload::gradient,
                .block = block,
                .clears_when_idle = moves,
                .bytes = rank_.splits_states(block) ? once : 2 * once,
                .uses = std::move(uses)});
  return reduced;
}

OpId Movements::gate(bool training) {
  move_value(Action::offload, MovedValue::losses, 0, 0, layout_.losses_device, layout_.losses_host,
             work_.losses_bytes);
  std::vector<Use> uses = {{Role::losses, layout_.losses_host, false},
                           {Role::decision, layout_.verdict, true}};
  if (training) {
    for (const BufferId id : layout_.statistics_host) {
      if (id != kNoBuffer) uses.push_back({Role::statistics, id, false});
    }
    for (const BufferId id : layout_.routing_host) {
      if (id != kNoBuffer) uses.push_back({Role::counts, id, false});
    }
  }
  return emit({.action = Action::gate, .uses = std::move(uses)});
}

}  // namespace ballast::schedule
