#include <algorithm>

#include "src/schedule/movements.h"

// The part of Movements that fills and reads weights and states outside of training steps.

namespace ballast::schedule {

struct Movements::Home {
  std::uint32_t sub_group;  ///< of states
  Role role;
  Role source;  ///< the role of the source of a copy
  Tier tier;
  BufferId buffer;
  Bytes offset;         ///< of its first byte in all of these weights or states
  Bytes bytes;          ///< kept by this rank
  Bytes initial_bytes;  ///< the first that do not begin as zeros
  Action upload;
  Action offload;
};

/// One, or that of the trained weights and that of the frozen ones.
std::vector<Movements::Home> Movements::weight_homes(std::uint32_t block) const {
  const Bytes all = rank_.weights(block);
  const auto home = [&](BufferId buffer, Bytes begin, Bytes end) {
    return Home{.sub_group = 0,
                .role = Role::weights,
                .source = Role::weights_source,
                .tier = layout_.buffers[buffer].tier,
                .buffer = buffer,
                .offset = begin,
                .bytes = end - begin,
                .initial_bytes = end - begin,
                .upload = Action::upload_weights,
                .offload = Action::offload_weights};
  };
  if (!splits_home(block)) return {home(layout_.weight_home[block], 0, all)};
  const Bytes trained = rank_.updated_by_all(block);
  return {home(layout_.trained_home[block], 0, trained),
          home(layout_.weight_home[block], trained, all)};
}

Movements::Home Movements::state_home(std::uint32_t block, std::uint32_t group) const {
  return {.sub_group = group,
          .role = Role::states,
          .source = Role::states_source,
          .tier = at(block).optimizer,
          .buffer = layout_.state_home[block][group],
          .offset = 0,
          .bytes = rank_.states(block, group),
          .initial_bytes = work_.blocks[block].sub_groups[group].initial_state_bytes,
          .upload = Action::upload_states,
          .offload = Action::offload_states};
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

/// Calls `handle(home)` for the block's weights and, for training, each sub-group of its states.
template <class Handle>
void Movements::for_homes(std::uint32_t block, Homes homes, Handle handle) const {
  for (const Home& weights : weight_homes(block)) {
    if (homes.has(weights.tier)) handle(weights);
  }
  if (!has_states()) return;
  for (std::uint32_t g = 0; g < sub_groups(block); ++g) {
    if (const Home states = state_home(block, g); homes.has(states.tier)) handle(states);
  }
}

void Movements::emit_piece(Action action, std::uint32_t block, const Home& home, Bytes offset,
                           Bytes bytes, std::vector<Use> uses) {
  emit({.action = action,
        .block = block,
        .sub_group = home.sub_group,
        .bytes = bytes,
        .offset = offset,
        .uses = std::move(uses)});
}

/// The host buffer through which data of a home on NVMe pass.
BufferId Movements::staging_of(std::uint32_t block, const Home& home) {
  return home.role == Role::weights ? weight_staging_.take(block).buffer
                                    : state_slot(block, home.sub_group);
}

void Movements::fill(std::uint32_t block, Homes homes) {
  for_homes(block, homes, [&](const Home& home) { fill_home(block, home); });
}

void Movements::fill_home(std::uint32_t block, const Home& home) {
  const bool weights = home.role == Role::weights;
  const auto initialize = [&](BufferId place, Bytes offset, Bytes bytes) {
    emit_piece(Action::initialize, block, home, offset, bytes, {{home.role, place, true}});
  };
  switch (home.tier) {
    case Tier::host:
      return initialize(home.buffer, home.offset, home.bytes);
    case Tier::nvme: {
      const BufferId staging = staging_of(block, home);
      initialize(staging, home.offset, home.bytes);
      if (home.offset > 0) {  // frozen weights
        return copy_weights(
            Action::writeback_weights, block,
            {.from = {.buffer = staging}, .to = {.buffer = home.buffer}, .bytes = home.bytes});
      }
      const auto write = [&](Speculation slot) {
        if (weights) return writeback_weights(block, staging, 0, slot, {});
        writeback_states(block, home.sub_group, staging, 0, slot, {});
      };
      write(Speculation::none);
      // The other slot, so that later writes only overwrite it.
      if (speculates(block)) write(Speculation::speculates);
      return;
    }
    case Tier::device:
      // The device delivers its memory zeroed.
      in_pieces(home.initial_bytes, [&](Bytes offset, Bytes bytes) {
        initialize(layout_.passing_place, offset, bytes);
        emit_piece(home.upload, block, home, offset, bytes,
                   {{home.source, layout_.passing_place, false}, {home.role, home.buffer, true}});
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
    emit_piece(Action::read, block, home, offset, bytes, {{home.role, place, false}});
  };
  switch (home.tier) {
    case Tier::host:
      return read(home.buffer, home.offset, home.bytes);
    case Tier::nvme: {
      const BufferId staging = staging_of(block, home);
      if (weights) {
        copy_weights(
            Action::fetch_weights, block,
            {.from = {.buffer = home.buffer}, .to = {.buffer = staging}, .bytes = home.bytes});
      } else {
        fetch_states(block, home.sub_group, 0, {});
      }
      return read(staging, home.offset, home.bytes);
    }
    case Tier::device:
      in_pieces(home.bytes, [&](Bytes offset, Bytes bytes) {
        emit_piece(home.offload, block, home, offset, bytes,
                   {{home.source, home.buffer, false}, {home.role, layout_.passing_place, true}});
        read(layout_.passing_place, offset, bytes);
      });
  }
}

}  // namespace ballast::schedule
