#include <algorithm>

#include "src/schedule/movements.h"

// The part of Movements that brings weights and states of a block from the host to their homes, and
// from there to the host, outside of training steps.

namespace ballast::schedule {

struct Movements::Home {
  Role role;
  Role source;  ///< the role of what is copied to the home or from it
  Tier tier;
  BufferId buffer;
  Bytes bytes;  ///< that this rank keeps
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

/// Calls `move(offset, bytes)` for what passes through the passing place at a time.
template <class Move>
void Movements::in_pieces(const Home& home, Move move) const {
  if (home.bytes == 0) return;
  const Bytes most = layout_.buffers[layout_.passing_place].bytes;
  for (Bytes offset = 0; offset < home.bytes; offset += most) {
    move(offset, std::min(most, home.bytes - offset));
  }
}

void Movements::emit_piece(Action action, std::uint32_t block, std::vector<Use> uses, Bytes offset,
                           Bytes bytes) {
  Operation operation;
  operation.action = action;
  operation.block = block;
  operation.bytes = bytes;
  operation.offset = offset;
  operation.uses = std::move(uses);
  emitter_.emit(std::move(operation));
}

void Movements::fill(std::uint32_t block) {
  fill_home(block, weight_home(block));
  fill_home(block, state_home(block));
}

void Movements::fill_home(std::uint32_t block, const Home& home) {
  const bool weights = home.role == Role::weights;
  const auto initialize = [&](BufferId place, Bytes offset, Bytes bytes) {
    emit_piece(Action::initialize, block, {{home.role, place, true}}, offset, bytes);
  };
  switch (home.tier) {
    case Tier::host:
      return initialize(home.buffer, 0, home.bytes);
    case Tier::nvme: {
      const BufferId staging = weights ? weight_staging_.take(block).first : state_slot(block);
      initialize(staging, 0, home.bytes);
      const Action action = weights ? Action::writeback_weights : Action::writeback_states;
      return writeback(action, block, staging, 0);
    }
    case Tier::device:
      in_pieces(home, [&](Bytes offset, Bytes bytes) {
        initialize(layout_.passing_place, offset, bytes);
        emit_piece(home.upload, block,
                   {{home.source, layout_.passing_place, false}, {home.role, home.buffer, true}},
                   offset, bytes);
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
        emit_piece(Action::initialize, block, {{Role::output, staging, true}}, 0, bytes);
      }
      emit(Action::writeback_activation, block, micro,
           {{Role::input, staging, false}, {Role::output, homes[micro], true}}, bytes);
    }
  }
}

void Movements::read(std::uint32_t block) {
  read_home(block, weight_home(block));
  read_home(block, state_home(block));
}

void Movements::read_home(std::uint32_t block, const Home& home) {
  const bool weights = home.role == Role::weights;
  const auto read = [&](BufferId place, Bytes offset, Bytes bytes) {
    emit_piece(Action::read, block, {{home.role, place, false}}, offset, bytes);
  };
  switch (home.tier) {
    case Tier::host:
      return read(home.buffer, 0, home.bytes);
    case Tier::nvme:
      if (!weights) fetch_states(block, 0);
      return read(weights ? weights_in_staging(block) : state_slot(block), 0, home.bytes);
    case Tier::device:
      in_pieces(home, [&](Bytes offset, Bytes bytes) {
        emit_piece(home.offload, block,
                   {{home.source, home.buffer, false}, {home.role, layout_.passing_place, true}},
                   offset, bytes);
        read(layout_.passing_place, offset, bytes);
      });
  }
}

}  // namespace ballast::schedule
