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
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    Swapped& group = swapped_in(pass);
    group = {.states = swapped_states(workload, placement, options, pass), .first_slot = slot};
    slot += group.states.size();
    for (std::size_t i = 0; i < group.states.size(); ++i) {
      if (group.states[i].sub_group == 0) ordinal_[group.states[i].block] = i;
    }
  }
}

OpId Movements::emit(Action action, std::uint32_t block, std::uint32_t micro, std::vector<Use> uses,
                     Bytes bytes, double flops, Bytes traffic) {
  return emit({.action = action,
               .block = block,
               .micro = micro,
               .bytes = bytes,
               .flops = flops,
               .traffic = traffic,
               .uses = std::move(uses)});
}

void Movements::upload_batch(std::uint32_t micro) {
  emit(Action::upload_batch, 0, micro,
       {{Role::batch_source, layout_.batch_host[micro], false},
        {Role::batch, layout_.batch_device[micro], true}},
       work_.batch_bytes);
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
      {Role::routing, layout_.routing_host[work_.first_tile(operation.block)], false});
}

BufferId Movements::weights_on_device(std::uint32_t block, Condition when) {
  const BlockWork& work = work_.blocks[block];
  if (!work.is_coded()) return kept_on_device(block, when);
  // What has been decoded stays valid: in a plan, an update of a block has all passes on one side.
  const Passage::Taken place = decoded_.take(block, when);
  if (!place.fill) return place.buffer;
  Operation decode = {.action = Action::decode_weights,
                      .block = block,
                      .traffic = work.weight_bytes + work.decoded_bytes,
                      .uses = {{Role::weights_source, kept_on_device(block, when), false},
                               {Role::weights, place.buffer, true}}};
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
    bring_weights(slot, Action::upload_weights, block, weights_on_host(block, when), when);
  }
  return slot.buffer;
}

/// The device buffer with this rank's share of split weights; moves it there if necessary.
BufferId Movements::share_on_device(std::uint32_t block, Condition when) {
  if (at(block).weights == Tier::device) return layout_.weight_home[block];
  const Passage::Taken slot = share_slots_.take(block, when);
  if (slot.fill)
    bring_weights(slot, Action::upload_weights, block, weights_on_host(block, when), when);
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
    copy_weights(Action::fetch_weights, block,
                 {.from = {.buffer = home},
                  .to = {.buffer = staging.buffer},
                  .bytes = rank_.weights(block) - rank_.updated_by_all(block),
                  .when = when,
                  .unless = staging.unless});
  } else {
    bring_weights(staging, Action::fetch_weights, block, home, when);
  }
  return staging.buffer;
}

void Movements::bring_weights(const Passage::Taken& place, Action action, std::uint32_t block,
                              BufferId from, Condition when) {
  // A home of their own on the tier that they all come from, or that the others passed through.
  const Tier tier = action == Action::fetch_weights ? Tier::nvme : Tier::host;
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
                         .block = block,
                         .bytes = copy.bytes,
                         .offset = copy.offset,
                         .uses = {{Role::weights_source, copy.from.buffer, false, copy.from.shard},
                                  {Role::weights, copy.to.buffer, true, copy.to.shard}}};
  add_condition(operation, copy.when, copy.unless);
  emit(std::move(operation));
}

/// Gathers split weights from this rank's group. If `from` is `to`, gathers updated shards in place
/// from all ranks that keep the same weights; never as codes, because the next update reads them.
void Movements::gather_weights(std::uint32_t block, BufferId from, BufferId to, Condition when,
                               std::optional<Condition> unless) {
  Operation gather = {.action = Action::gather_weights,
                      .block = block,
                      .bytes = rank_.updated_by_all(block) - rank_.updated_weights(block),
                      .uses = {{Role::weights, to, true}}};
  if (from != to) {
    const Bytes whole = rank_.whole_weights(block);
    gather.bytes = rank_.exchanged_in_group(whole);
    gather.uses.push_back({Role::weights_source, from, false});
    if (rank_.codes_weights()) {
      const Bytes codes = rank_.whole_codes(block);
      gather.bytes = rank_.exchanged_in_group(codes);
      gather.traffic = rank_.weight_share(block) + rank_.share_codes(block) + codes + whole;
      gather.uses.push_back({Role::workspace, layout_.codes, true});
    }
  }
  add_condition(gather, when, unless);
  emit(std::move(gather));
}

Movements::Range Movements::experts_ahead(std::uint32_t block) const {
  if (!options_.prefetches_experts || !work_.blocks[block].routes) return {};
  const std::uint32_t end = work_.last_tile(block) + 1;
  // The weights of the router, and of an expert for all rows, are used first.
  std::uint32_t slots = options_.weight_slots;
  std::uint32_t staging = options_.weight_staging;
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
  emit(Action::offload_activation, block, micro,
       {{Role::input, place, false}, {Role::output, host, true}}, work_.activation_bytes);
  if (!to_nvme) return;
  emit(Action::writeback_activation, block, micro,
       {{Role::input, host, false}, {Role::output, home, true}}, swapped_input_bytes(work_));
}

BufferId Movements::input_for_backward(std::uint32_t block, std::uint32_t micro) {
  const BufferId home = layout_.input_home[block][place_among(micro)];
  if (!input_leaves(work_, place_, block)) return home;
  auto& [uploaded, there] = uploaded_[micro];
  if (there != kNoBuffer && uploaded == block) return there;
  BufferId host = home;
  if (at(block).activations == Tier::nvme) {
    host = activation_staging_.next();
    emit(Action::fetch_activation, block, micro,
         {{Role::input, home, false}, {Role::output, host, true}}, swapped_input_bytes(work_));
  }
  const BufferId slot = activation_slots_.next();
  emit(Action::upload_activation, block, micro,
       {{Role::input, host, false}, {Role::output, slot, true}}, work_.activation_bytes);
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
  if (sums != kNoBuffer) uses.push_back({Role::accumulator, sums, true});
}

void Movements::deliver_gradient(std::uint32_t block) {
  const BlockWork& size = work_.blocks[block];
  if (size.is_frozen()) return;
  const bool on_device = at(block).optimizer == Tier::device;
  const BufferId home = layout_.gradient[block];
  BufferId packed = on_device && !rank_.splits_gradients(block) ? home : gradient_slots_.next();
  std::vector<Use> uses = {{Role::accumulator, layout_.accumulator[block], false},
                           {Role::gradient, packed, true}};
  const Use statistics = {Role::statistics, layout_.statistics_device[block], true};
  // With several ranks, reduce_gradient() computes the statistics of the sum.
  if (!rank_.several(block)) uses.push_back(statistics);
  Bytes traffic = size.accumulator_bytes + size.gradient_bytes;
  if (work_.trains_tied() && work_.is_embedding(block)) {
    uses.push_back({Role::output_accumulator, layout_.output_accumulator[block], false});
    traffic += work_.tied_accumulator_bytes;
  }
  emit_if_used({.action = Action::pack_gradient,
                .block = block,
                .traffic = traffic,
                .uses = std::move(uses)});
  if (rank_.several(block)) packed = reduce_gradient(block, packed);
  if (!on_device) {
    const bool swaps = swaps_gradient(work_, place_, block);
    delivered_ = swaps ? gradient_staging_.next() : home;
    emit_if_used({.action = Action::offload_gradient,
                  .block = block,
                  .bytes = rank_.updated_gradient(block),
                  .uses = {{Role::gradient_source, packed, false, rank_.splits_states(block)},
                           {Role::gradient, delivered_, true}}});
    if (swaps && home != kNoBuffer) {
      emit_if_used(
          {.action = Action::writeback_gradient,
           .block = block,
           .bytes = swapped_gradient_bytes(work_, block),
           .uses = {{Role::gradient_source, delivered_, false}, {Role::gradient, home, true}}});
    }
  }
  emit_if_used({.action = Action::offload_statistics,
                .block = block,
                .bytes = work_.statistics_bytes,
                .uses = {{Role::statistics_source, layout_.statistics_device[block], false},
                         {Role::statistics, layout_.statistics_host[block], true}}});
}

BufferId Movements::gradient_on_host(std::uint32_t block, std::uint32_t lag) {
  const BufferId home = layout_.gradient[block];
  if (!swaps_gradient(work_, place_, block)) return home;
  if (lag == 0) return delivered_;
  const BufferId staging = gradient_staging_.next();
  Operation fetch = {
      .action = Action::fetch_gradient,
      .block = block,
      .lag = lag,
      .bytes = swapped_gradient_bytes(work_, block),
      .uses = {{Role::gradient_source, home, false}, {Role::gradient, staging, true}}};
  add_condition(fetch, for_gradient(block, lag));
  emit(std::move(fetch));
  return staging;
}

/// Sums `packed` over the ranks, in place unless its home on the device holds only this rank's
/// shard. Returns the buffer with the sum.
BufferId Movements::reduce_gradient(std::uint32_t block, BufferId packed) {
  const bool moves = at(block).optimizer == Tier::device && rank_.splits_gradients(block);
  const BufferId reduced = moves ? layout_.gradient[block] : packed;
  std::vector<Use> uses = {{Role::gradient, reduced, true, !moves && rank_.splits_states(block)},
                           {Role::statistics, layout_.statistics_device[block], true},
                           {Role::workspace, layout_.arriving, true}};
  if (moves) uses.push_back({Role::gradient_source, packed, false});
  // An all-reduce is a reduce-scatter and an all-gather.
  const Bytes once = rank_.exchanged(rank_.whole_gradient(block));
  emit_if_used({.action = Action::reduce_gradient,
                .block = block,
                .bytes = rank_.splits_states(block) ? once : 2 * once,
                .uses = std::move(uses)});
  return reduced;
}

OpId Movements::gate(bool training) {
  emit(Action::offload_losses, 0, 0,
       {{Role::losses_source, layout_.losses_device, false},
        {Role::losses, layout_.losses_host, true}},
       work_.losses_bytes);
  std::vector<Use> uses = {{Role::losses, layout_.losses_host, false},
                           {Role::verdict, layout_.verdict, true}};
  if (training) {
    for (const BufferId id : layout_.statistics_host) {
      if (id != kNoBuffer) uses.push_back({Role::statistics, id, false});
    }
    for (const BufferId id : layout_.routing_host) {
      if (id != kNoBuffer) uses.push_back({Role::routing, id, false});
    }
  }
  return emit(Action::gate, 0, 0, std::move(uses));
}

}  // namespace ballast::schedule
