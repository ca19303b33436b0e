#include <algorithm>

#include "src/schedule/movements.h"

// The part of Movements that fills and reads weights and states outside of training steps.

namespace ballast::schedule {

struct Movements::Home {
  Role role;
  Role source;  ///< the role of the source of a copy
  Tier tier;
  BufferId buffer;
  Bytes bytes;  ///< kept by this rank
  Action upload;
  Action offload;
};

Movements::Home Movements::weight_home(std::uint32_t block) const {
  return {Role::weights,          Role::weights_source,
          at(block).weights,      layout_.weight_home[block],
          rank_.weights(block),   Action::upload_weights,
          Action::offload_weights};
}

Movements::Home Movements::state_home(std::uint32_t block) const {
  return {
      Role::states,        Role::states_source,   at(block).optimizer,   layout_.state_home[block],
      rank_.states(block), Action::upload_states, Action::offload_states};
}

/// Calls `move(offset, bytes)` for each piece of `all` that fits into the passing place.
template <class Move>
void Movements::in_pieces(Bytes all, Move move) const {
  if (all == 0) return;
  const Bytes most = layout_.buffers[layout_.passing_place].bytes;
  for (Bytes offset = 0; offset < all; offset += most) {
    move(offset, std::min(most, all - offset));
  }
}

/// Calls `handle(home)` for the block's weights and, for training, its states.
template <class Handle>
void Movements::for_homes(std::uint32_t block, Homes homes, Handle handle) const {
  if (const Home weights = weight_home(block); homes.has(weights.tier)) handle(weights);
  if (!has_states()) return;
  if (const Home states = state_home(block); homes.has(states.tier)) handle(states);
}

void Movements::fill(std::uint32_t block, Homes homes) {
  for_homes(block, homes, [&](const Home& home) { fill_home(block, home); });
}

void Movements::fill_home(std::uint32_t block, const Home& home) {
  const bool weights = home.role == Role::weights;
  const auto initialize = [&](BufferId place, Bytes offset, Bytes bytes) {
    emit({.action = Action::initialize,
          .block = block,
          .bytes = bytes,
          .offset = offset,
          .uses = {{home.role, place, true}}});
  };
  switch (home.tier) {
    case Tier::host:
      return initialize(home.buffer, 0, home.bytes);
    case Tier::nvme: {
      const BufferId staging = weights ? weight_staging_.take(block).first : state_slot(block);
      initialize(staging, 0, home.bytes);
      const Action action = weights ? Action::writeback_weights : Action::writeback_states;
      writeback(action, block, staging, 0, Speculation::none);
      // The other slot, so that later writes only overwrite it.
      if (at(block).speculates) writeback(action, block, staging, 0, Speculation::speculates);
      return;
    }
    case Tier::device:
      // The device delivers its memory zeroed.
      in_pieces(weights ? home.bytes : work_.blocks[block].initial_state_bytes,
                [&](Bytes offset, Bytes bytes) {
                  initialize(layout_.passing_place, offset, bytes);
                  emit({.action = home.upload,
                        .block = block,
                        .bytes = bytes,
                        .offset = offset,
                        .uses = {{home.source, layout_.passing_place, false},
                                 {home.role, home.buffer, true}}});
                });
  }
}

void Movements::fill_activations() {
  if (layout_.activation_staging.empty()) return;
  const BufferId staging = activation_staging_.next();
  const Bytes bytes = swapped_input_bytes(work_);
  bool zero = false;
  for (std::uint32_t block = 1; block < layout_.input_home.size(); ++block) {
    const auto& homes = layout_.input_home[block];
    for (std::uint32_t micro = 0; micro < homes.size(); ++micro) {
      if (layout_.buffers[homes[micro]].tier != Tier::nvme) continue;
      if (!std::exchange(zero, true)) {
        emit(Action::initialize, block, 0, {{Role::output, staging, true}}, bytes);
      }
      emit(Action::writeback_activation, block, micro,
           {{Role::input, staging, false}, {Role::output, homes[micro], true}}, bytes);
    }
  }
}

void Movements::fill_gradients() {
  BufferId staging = kNoBuffer;
  for (std::uint32_t block = 0; block < layout_.gradient.size(); ++block) {
    const BufferId home = layout_.gradient[block];
    if (home == kNoBuffer || layout_.buffers[home].tier != Tier::nvme) continue;
    if (staging == kNoBuffer) {
      staging = gradient_staging_.next();
      emit(Action::initialize, block, 0, {{Role::output, staging, true}},
           layout_.buffers[staging].bytes);
    }
    emit(Action::writeback_gradient, block, 0,
         {{Role::gradient_source, staging, false}, {Role::gradient, home, true}},
         layout_.buffers[home].bytes);
  }
}

void Movements::read(std::uint32_t block, Homes homes) {
  for_homes(block, homes, [&](const Home& home) { read_home(block, home); });
}

void Movements::read_home(std::uint32_t block, const Home& home) {
  const bool weights = home.role == Role::weights;
  const auto read = [&](BufferId place, Bytes offset, Bytes bytes) {
    emit({.action = Action::read,
          .block = block,
          .bytes = bytes,
          .offset = offset,
          .uses = {{home.role, place, false}}});
  };
  switch (home.tier) {
    case Tier::host:
      return read(home.buffer, 0, home.bytes);
    case Tier::nvme:
      if (!weights) fetch_states(block, 0);
      return read(weights ? weights_in_staging(block) : state_slot(block), 0, home.bytes);
    case Tier::device:
      in_pieces(home.bytes, [&](Bytes offset, Bytes bytes) {
        emit({.action = home.offload,
              .block = block,
              .bytes = bytes,
              .offset = offset,
              .uses = {{home.source, home.buffer, false},
                       {home.role, layout_.passing_place, true}}});
        read(layout_.passing_place, offset, bytes);
      });
  }
}

}  // namespace ballast::schedule
