#include <algorithm>

#include "src/schedule/movements.h"

// The part of Movements that brings states, weights and gradients together for an update.

namespace ballast::schedule {

BufferId Movements::state_slot(std::uint32_t block) const {
  return layout_.state_staging[ordinal_[block] % layout_.state_staging.size()];
}

std::uint32_t Movements::states_ahead() const {
  return static_cast<std::uint32_t>(std::min(swapped_.size(), layout_.state_staging.size()));
}

void Movements::fetch_states_ahead(std::uint32_t ordinal) {
  fetch_states(swapped_[ordinal], 0);
}

void Movements::fetch_states(std::uint32_t block, std::uint32_t lag) {
  emit({.action = Action::fetch_states,
        .block = block,
        .lag = lag,
        .bytes = rank_.states(block),
        .uses = {{Role::states_source, layout_.state_home[block], false},
                 {Role::states, state_slot(block), true}}});
}

BufferId Movements::states_on_host(std::uint32_t block, std::uint32_t lag) {
  if (at(block).optimizer == Tier::host) return layout_.state_home[block];
  if (ordinal_[block] >= states_ahead()) fetch_states(block, lag);
  return state_slot(block);
}

/// The condition of an update: the gate's verdict, or its own block's statistics (eager).
Use Movements::permission(std::uint32_t block) const {
  if (options_.update == Update::gated) return {Role::verdict, layout_.verdict, false};
  return {Role::statistics, layout_.statistics_host[block], false};
}

void Movements::update(std::uint32_t block, std::uint32_t lag) {
  if (at(block).optimizer == Tier::device) {
    update_on_device(block, lag);
  } else {
    update_on_host(block, lag);
  }
}

void Movements::update_on_device(std::uint32_t block, std::uint32_t lag) {
  const bool split = rank_.splits_weights(block);
  const Tier home = at(block).weights;
  const BufferId home_buffer = layout_.weight_home[block];
  const bool shard = rank_.updates_shard(block);
  BufferId weights = home_buffer;
  if (home != Tier::device && !split) weights = weights_on_device(block);
  if (home != Tier::device && split) {
    const auto [slot, fill] = share_slots_.take(block);
    weights = slot;
    // The update reads only this rank's shard of the share.
    if (fill) {
      copy_weights(Action::upload_weights, block,
                   {.buffer = weights_on_host(block), .shard = shard},
                   {.buffer = slot, .shard = shard}, rank_.updated_weights(block));
    }
  }
  const bool shard_of_gradient = rank_.splits_states() && !rank_.splits_gradients();
  emit({.action = Action::update_on_device,
        .block = block,
        .lag = lag,
        .traffic = work_.blocks[block].update_traffic,
        .uses = {{Role::weights, weights, true, shard},
                 {Role::states, layout_.state_home[block], true},
                 {Role::gradient, layout_.gradient[block], false, shard_of_gradient},
                 permission(block)}});
  if (shard) gather_weights(block, weights, weights);
  if (home == Tier::host) {
    copy_weights(Action::offload_weights, block, {.buffer = weights}, {.buffer = home_buffer},
                 rank_.weights(block));
  }
  if (home == Tier::nvme) {
    const BufferId staging = weight_staging_.take(block).first;
    copy_weights(Action::offload_weights, block, {.buffer = weights}, {.buffer = staging},
                 rank_.weights(block));
    writeback(Action::writeback_weights, block, staging, lag);
  }
}

void Movements::update_on_host(std::uint32_t block, std::uint32_t lag) {
  const BlockPlacement& home = at(block);
  const BufferId states = states_on_host(block, lag);
  const BufferId home_buffer = layout_.weight_home[block];
  const bool borrowed = home.weights == Tier::device;
  BufferId weights = home_buffer;
  if (home.weights == Tier::nvme) weights = weights_in_staging(block);
  if (borrowed) {
    weights = weight_staging_.take(block).first;
    copy_weights(Action::offload_weights, block,
                 {.buffer = home_buffer, .shard = rank_.updates_shard(block)}, {.buffer = weights},
                 rank_.updated_weights(block));
  }
  emit({.action = Action::update_on_host,
        .block = block,
        .lag = lag,
        .traffic = work_.blocks[block].update_traffic,
        .uses = {{Role::weights, weights, true, rank_.updates_shard(block) && !borrowed},
                 {Role::states, states, true},
                 {Role::gradient, layout_.gradient[block], false},
                 permission(block)}});
  return_weights(block, weights);
  if (home.weights == Tier::nvme) writeback(Action::writeback_weights, block, weights, lag);
  if (home.optimizer == Tier::nvme) writeback(Action::writeback_states, block, states, lag);
}

/// Copies the weights `updated` on the host to a home on the device, and gathers the shards of all
/// ranks that keep the same weights.
void Movements::return_weights(std::uint32_t block, BufferId updated) {
  const bool borrowed = at(block).weights == Tier::device;
  if (!borrowed && !rank_.updates_shard(block)) return;
  Passage& slots = rank_.splits_weights(block) ? share_slots_ : slots_;
  const BufferId device = borrowed ? layout_.weight_home[block] : slots.take(block).first;
  copy_weights(Action::upload_weights, block,
               {.buffer = updated, .shard = rank_.updates_shard(block) && !borrowed},
               {.buffer = device, .shard = rank_.updates_shard(block)},
               rank_.updated_weights(block));
  if (!rank_.updates_shard(block)) return;
  gather_weights(block, device, device);
  if (borrowed) return;
  copy_weights(Action::offload_weights, block, {.buffer = device}, {.buffer = updated},
               rank_.weights(block));
}

void Movements::writeback(Action action, std::uint32_t block, BufferId staging, std::uint32_t lag) {
  const bool weights = action == Action::writeback_weights;
  const BufferId home = weights ? layout_.weight_home[block] : layout_.state_home[block];
  emit({.action = action,
        .block = block,
        .lag = lag,
        .bytes = weights ? rank_.weights(block) : rank_.states(block),
        .uses = {{weights ? Role::weights_source : Role::states_source, staging, false},
                 {weights ? Role::weights : Role::states, home, true}}});
}

}  // namespace ballast::schedule
