#include "src/step/update_mover.h"

#include <algorithm>
#include <utility>

#include "ballast/step/labels.h"

namespace ballast::step {

UpdateMover::UpdateMover(MoveContext& plan, WeightMover& weights, GradientMover& gradients)
    : Mover(plan), weights_(weights), gradients_(gradients), ordinal_(problem_.blocks.size(), 0) {
  std::size_t slot = 0;
  for (const UpdatedIn pass : {UpdatedIn::forward, UpdatedIn::backward}) {
    SwappedGroup& group = swapped_in(pass);
    group = {.states = placed_.swapped_states(pass), .first_slot = slot};
    slot += group.states.size();
    for (std::size_t i = 0; i < group.states.size(); ++i) {
      if (group.states[i].sub_group == 0) ordinal_[group.states[i].block] = i;
    }
  }
}

std::size_t UpdateMover::slot_of(const SwappedGroup& group, std::size_t ordinal) const {
  return (group.first_slot + ordinal) % layout_.state_staging.size();
}

BufferId UpdateMover::state_slot(std::uint32_t block, std::uint32_t group) const {
  return layout_
      .state_staging[slot_of(swapped_in(placed_.update_pass(block)), ordinal_[block] + group)];
}

std::uint32_t UpdateMover::states_ahead(UpdatedIn pass) const {
  return static_cast<std::uint32_t>(
      std::min(swapped_in(pass).states.size(), layout_.state_staging.size()));
}

bool UpdateMover::has_room_ahead(UpdatedIn pass, std::uint32_t ordinal) const {
  const SwappedGroup& other =
      swapped_in(pass == UpdatedIn::forward ? UpdatedIn::backward : UpdatedIn::forward);
  const std::size_t slot = slot_of(swapped_in(pass), ordinal);
  for (std::size_t i = other.updated; i < other.states.size(); ++i) {
    if (slot_of(other, i) == slot) return false;
  }
  return true;
}

void UpdateMover::fetch_states_ahead(UpdatedIn pass, std::uint32_t ordinal) {
  const SwappedStates& states = swapped_in(pass).states[ordinal];
  // States for the backward pass are fetched before all routers have chosen.
  fetch_states(states.block, states.sub_group, 0,
               pass == UpdatedIn::backward ? Condition() : plan_.for_update(states.block, 0));
}

bool UpdateMover::has_states_ahead(std::uint32_t block, std::uint32_t group) const {
  return at(block).optimizer == Tier::nvme &&
         ordinal_[block] + group < states_ahead(placed_.update_pass(block));
}

Speculation UpdateMover::speculation(std::uint32_t block, std::uint32_t lag) const {
  if (!placed_.speculates(block)) return Speculation::none;
  return lag == 0 ? Speculation::speculates : Speculation::redoes;
}

void UpdateMover::fetch_states(std::uint32_t block, std::uint32_t group, std::uint32_t lag,
                               Condition when) {
  const Speculation speculation = this->speculation(block, lag);
  const bool again = speculation == Speculation::redoes;
  const Use source = again ? Use{Role::undo_states, layout_.state_undo[block][group]}
                           : Use{Role::source, layout_.state_home[block][group]};
  Operation fetch = {.action = Action::fetch,
                     .payload = Payload::states,
                     .block = block,
                     .sub_group = group,
                     .lag = lag,
                     .speculation = speculation,
                     .bytes = rank_.states(block, group),
                     .uses = {source, {Role::target, state_slot(block, group), true}}};
  plan_.emit_if(when, std::move(fetch));
}

BufferId UpdateMover::states_on_host(std::uint32_t block, std::uint32_t group, std::uint32_t lag) {
  if (at(block).optimizer == Tier::host) return layout_.state_home[block][group];
  const bool again = speculation(block, lag) == Speculation::redoes;
  if (again || !has_states_ahead(block, group)) {
    fetch_states(block, group, lag, plan_.for_update(block, lag));
  }
  ++swapped_in(placed_.update_pass(block)).updated;
  return state_slot(block, group);
}

/// Adds the permission for an update: the gate's decision, or the statistics of its block (eager),
/// or none (speculative).
void UpdateMover::add_permission(Operation& update) const {
  if (update.speculation == Speculation::speculates) return;
  update.uses.push_back(placed_.options.update == Update::gated
                            ? Use{Role::decision, layout_.decision, false}
                            : Use{Role::statistics, layout_.statistics_host[update.block], false});
}

void UpdateMover::update(std::uint32_t block, std::uint32_t lag) {
  if (!placed_.is_trained(block)) return;
  if (at(block).optimizer == Tier::device) {
    update_on_device(block, lag);
  } else {
    update_on_host(block, lag);
  }
}

void UpdateMover::update_on_device(std::uint32_t block, std::uint32_t lag) {
  const bool split = rank_.shards_weights(block);
  const Tier home = at(block).weights;
  const BufferId home_buffer = layout_.weight_home[block];
  const bool shard = rank_.updates_shard(block);
  const Condition when = plan_.for_update(block, lag);
  BufferId weights = home_buffer;
  if (home != Tier::device && !split) weights = weights_.kept_on_device(block, when);
  if (home != Tier::device && split) {
    const auto [slot, fill, unless] = weights_.slots_of(block).take(block, when);
    weights = slot;
    // The update reads only this rank's shard of the share.
    if (fill) {
      weights_.copy(Action::upload, block,
                    {.from = {.buffer = weights_.on_host(block, when), .shard = shard},
                     .to = {.buffer = slot, .shard = shard},
                     .bytes = rank_.updated_weights(block),
                     .when = when,
                     .unless = unless});
    }
  }
  const bool shard_of_gradient = rank_.shards_states(block) && !rank_.shards_gradients(block);
  for (std::uint32_t g = 0; g < sub_groups(block); ++g) {
    emit_update({.action = Action::update_on_device,
                 .block = block,
                 .sub_group = g,
                 .lag = lag,
                 .uses = {{Role::weights, weights, true, shard},
                          {Role::states, layout_.state_home[block][g], true},
                          {Role::gradient, layout_.gradient[block], false, shard_of_gradient}}});
  }
  if (shard) weights_.gather(block, weights, weights, when);
  if (home == Tier::device) return;
  // If states are on the device, trained weights with a separate home are in host memory.
  const bool own_home = has_separate_trained_home(block);
  const bool to_nvme = home == Tier::nvme && !own_home;
  const BufferId host = to_nvme    ? weights_.take_staging(block, when)
                        : own_home ? layout_.trained_home[block]
                                   : home_buffer;
  weights_.copy(Action::offload, block,
                {.from = {.buffer = weights},
                 .to = {.buffer = host},
                 .bytes = rank_.trained_weights(block),
                 .when = when});
  if (to_nvme) writeback_weights(block, host, lag, Speculation::none, when);
}

/// Adds the operands that every update has to its weights, states and gradient.
void UpdateMover::emit_update(Operation update) {
  update.traffic = problem_.blocks[update.block].sub_groups[update.sub_group].update_traffic;
  add_permission(update);
  add_undo(update);
  const Condition when = plan_.for_update(update.block, update.lag);
  plan_.emit_if(when, std::move(update));
}

/// Returns the host buffer in which an update finds the weights of `block`.
BufferId UpdateMover::weights_for_update(std::uint32_t block, std::uint32_t lag) {
  const BufferId home_buffer = layout_.weight_home[block];
  const bool on_device = at(block).weights == Tier::device;
  const Speculation speculation = this->speculation(block, lag);
  const Condition when = plan_.for_update(block, lag);
  if (at(block).weights == Tier::host) return home_buffer;
  if (has_separate_trained_home(block, Tier::host)) return layout_.trained_home[block];
  if (!on_device && speculation != Speculation::redoes) return weights_.in_staging(block, when);
  const BufferId staging = weights_.take_staging(block, when);
  const bool split = has_separate_trained_home(block);
  if (split) weights_.bring_frozen({.buffer = staging}, Action::fetch, block, home_buffer, when);
  Operation bring = {.action = on_device ? Action::offload : Action::fetch,
                     .payload = Payload::weights,
                     .block = block,
                     .lag = lag,
                     .speculation = speculation,
                     .bytes = on_device ? rank_.updated_weights(block)
                              : split   ? rank_.trained_weights(block)
                                        : rank_.resident_weights(block),
                     .uses = {{Role::target, staging, true}}};
  // Also before a repetition, which restores the weights but not the padding after them.
  bring.uses.push_back(on_device ? Use{Role::source, home_buffer, false, rank_.updates_shard(block)}
                                 : Use{Role::undo_weights, layout_.weight_undo[block], false});
  plan_.emit_if(when, std::move(bring));
  return staging;
}

/// Adds the undo buffers in host memory: a speculative update writes them, the repetition reads
/// them.
void UpdateMover::add_undo(Operation& update) const {
  if (update.speculation == Speculation::none) return;
  const bool writes = update.speculation == Speculation::speculates;
  const auto add = [&](Role role, BufferId undo, Bytes bytes) {
    if (layout_.buffers[undo].tier != Tier::host) return;
    update.uses.push_back({role, undo, writes});
    // Read and written. Copying first and then updating from the cache takes the same time.
    update.traffic += 2 * bytes;
  };
  double block = 0.0;
  for (const SubGroup& group : problem_.blocks[update.block].sub_groups) {
    block += static_cast<double>(group.update_traffic);
  }
  const double part = static_cast<double>(update.traffic) / std::max(1.0, block);
  const BufferId weights = layout_.weight_undo[update.block];
  add(Role::undo_weights, weights,
      static_cast<Bytes>(part * static_cast<double>(layout_.buffers[weights].bytes)));
  add(Role::undo_states, layout_.state_undo[update.block][update.sub_group],
      rank_.states(update.block, update.sub_group));
}

void UpdateMover::update_on_host(std::uint32_t block, std::uint32_t lag) {
  const BlockPlacement& home = at(block);
  BufferId states = states_on_host(block, 0, lag);
  const BufferId weights = weights_for_update(block, lag);
  const BufferId gradient = gradients_.on_host(block, lag);
  const bool shard = rank_.updates_shard(block) && home.weights != Tier::device;
  const Speculation speculation = this->speculation(block, lag);
  const Condition when = plan_.for_update(block, lag);
  const auto return_states = [&](std::uint32_t group) {
    if (home.optimizer != Tier::nvme) return;
    writeback_states(block, group, states, lag, speculation, when);
  };
  for (std::uint32_t g = 0; g < sub_groups(block); ++g) {
    if (g > 0) {
      return_states(g - 1);
      states = states_on_host(block, g, lag);
    }
    emit_update({.action = Action::update,
                 .block = block,
                 .sub_group = g,
                 .lag = lag,
                 .speculation = speculation,
                 .uses = {{Role::weights, weights, true, shard},
                          {Role::states, states, true},
                          {Role::gradient, gradient, false}}});
  }
  return_weights(block, weights, lag);
  if (home.weights == Tier::nvme && !has_separate_trained_home(block, Tier::host)) {
    writeback_weights(block, weights, lag, speculation, when);
  }
  return_states(sub_groups(block) - 1);
}

/// Copies the weights `updated` on the host to a home on the device, and gathers the shards of all
/// ranks that keep the same weights.
void UpdateMover::return_weights(std::uint32_t block, BufferId updated, std::uint32_t lag) {
  const bool borrowed = at(block).weights == Tier::device;
  if (!borrowed && !rank_.updates_shard(block)) return;
  const Condition when = plan_.for_update(block, lag);
  BufferCache& slots = weights_.slots_of(block);
  const BufferId device = borrowed ? layout_.weight_home[block] : slots.take(block, when).buffer;
  weights_.copy(Action::upload, block,
                {.from = {.buffer = updated, .shard = rank_.updates_shard(block) && !borrowed},
                 .to = {.buffer = device, .shard = rank_.updates_shard(block)},
                 .bytes = rank_.updated_weights(block),
                 .when = when});
  if (!rank_.updates_shard(block)) return;
  weights_.gather(block, device, device, when);
  if (borrowed) return;
  weights_.copy(Action::offload, block,
                {.from = {.buffer = device},
                 .to = {.buffer = updated},
                 .bytes = rank_.trained_weights(block),
                 .when = when});
  // Frozen weights after the updated ones did not pass through it.
  if (rank_.trained_weights(block) < rank_.resident_weights(block)) slots.forget(block);
}

void UpdateMover::writeback_weights(std::uint32_t block, BufferId staging, std::uint32_t lag,
                                    Speculation speculation, Condition when) {
  writeback({.action = Action::writeback,
             .payload = Payload::weights,
             .block = block,
             .lag = lag,
             .speculation = speculation,
             .bytes = has_separate_trained_home(block) ? rank_.trained_weights(block)
                                                       : rank_.resident_weights(block),
             .uses = {{Role::source, staging, false},
                      {Role::target,
                       has_separate_trained_home(block) ? layout_.trained_home[block]
                                                        : layout_.weight_home[block],
                       true}}},
            when);
}

void UpdateMover::writeback_states(std::uint32_t block, std::uint32_t group, BufferId staging,
                                   std::uint32_t lag, Speculation speculation, Condition when) {
  writeback({.action = Action::writeback,
             .payload = Payload::states,
             .block = block,
             .sub_group = group,
             .lag = lag,
             .speculation = speculation,
             .bytes = rank_.states(block, group),
             .uses = {{Role::source, staging, false},
                      {Role::target, layout_.state_home[block][group], true}}},
            when);
}

/// A speculative writeback makes the home the undo buffer and writes the other slot.
void UpdateMover::writeback(Operation writing, Condition when) {
  if (writing.speculation == Speculation::speculates) {
    const std::uint32_t block = writing.block;
    writing.uses.push_back(
        writing.payload == Payload::weights
            ? Use{Role::undo_weights, layout_.weight_undo[block], true}
            : Use{Role::undo_states, layout_.state_undo[block][writing.sub_group], true});
  }
  plan_.emit_if(when, std::move(writing));
}

}  // namespace ballast::step
