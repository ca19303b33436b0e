#include "src/step/home_mover.h"

#include <algorithm>
#include <utility>

#include "ballast/step/labels.h"

namespace ballast::step {

/// Returns one home, or a home of the trained weights and one of the frozen weights.
std::vector<HomeMover::Home> HomeMover::weight_homes(std::uint32_t block) const {
  const Bytes all = rank_.resident_weights(block);
  const auto home = [&](BufferId buffer, Bytes begin, Bytes end) {
    return Home{.payload = Payload::weights,
                .sub_group = 0,
                .tier = layout_.buffers[buffer].tier,
                .buffer = buffer,
                .offset = begin,
                .bytes = end - begin,
                .initial_bytes = end - begin};
  };
  if (!has_separate_trained_home(block)) return {home(layout_.weight_home[block], 0, all)};
  const Bytes trained = rank_.trained_weights(block);
  return {home(layout_.trained_home[block], 0, trained),
          home(layout_.weight_home[block], trained, all)};
}

HomeMover::Home HomeMover::state_home(std::uint32_t block, std::uint32_t group) const {
  return {.payload = Payload::states,
          .sub_group = group,
          .tier = at(block).optimizer,
          .buffer = layout_.state_home[block][group],
          .offset = 0,
          .bytes = rank_.states(block, group),
          .initial_bytes = problem_.blocks[block].sub_groups[group].initial_state_bytes};
}

/// Calls `move(offset, bytes)` for each piece of `all` that fits in the passing place.
template <class Move>
void HomeMover::in_pieces(Bytes all, Move move) const {
  if (all == 0) return;
  const Bytes most = layout_.buffers[layout_.fill_staging].bytes;
  for (Bytes offset = 0; offset < all; offset += most) {
    move(offset, std::min(most, all - offset));
  }
}

/// Calls `handle(home)` for the block's weights and, for training, each sub-group of its states.
template <class Handle>
void HomeMover::for_homes(std::uint32_t block, Homes homes, Handle handle) const {
  for (const Home& weights : weight_homes(block)) {
    if (homes.has(weights.tier)) handle(weights);
  }
  if (!placed_.trains()) return;
  for (std::uint32_t g = 0; g < problem_.blocks[block].sub_groups.size(); ++g) {
    if (const Home states = state_home(block, g); homes.has(states.tier)) handle(states);
  }
}

void HomeMover::emit_piece(Action action, std::uint32_t block, const Home& home, Bytes offset,
                           Bytes bytes, std::vector<Use> uses) {
  plan_.emit({.action = action,
              .payload = home.payload,
              .block = block,
              .sub_group = home.sub_group,
              .bytes = bytes,
              .offset = offset,
              .uses = std::move(uses)});
}

/// Returns the host buffer through which data of a home on NVMe pass.
BufferId HomeMover::staging_of(std::uint32_t block, const Home& home) {
  return home.payload == Payload::weights ? weights_.take_staging(block)
                                          : updates_.state_slot(block, home.sub_group);
}

void HomeMover::fill(std::uint32_t block, Homes homes) {
  for_homes(block, homes, [&](const Home& home) { fill_home(block, home); });
}

void HomeMover::fill_home(std::uint32_t block, const Home& home) {
  const bool weights = home.payload == Payload::weights;
  const auto initialize = [&](BufferId place, Bytes offset, Bytes bytes) {
    emit_piece(Action::initialize, block, home, offset, bytes, {{Role::target, place, true}});
  };
  switch (home.tier) {
    case Tier::host:
      return initialize(home.buffer, home.offset, home.bytes);
    case Tier::nvme: {
      const BufferId staging = staging_of(block, home);
      initialize(staging, home.offset, home.bytes);
      if (home.offset > 0) {  // frozen weights
        return weights_.copy(
            Action::writeback, block,
            {.from = {.buffer = staging}, .to = {.buffer = home.buffer}, .bytes = home.bytes});
      }
      const auto write = [&](Speculation slot) {
        if (weights) return updates_.writeback_weights(block, staging, 0, slot, {});
        updates_.writeback_states(block, home.sub_group, staging, 0, slot, {});
      };
      write(Speculation::none);
      // Writes the other slot, so that later writes only overwrite it.
      if (placed_.speculates(block)) write(Speculation::speculates);
      return;
    }
    case Tier::device:
      // Device memory is zeroed initially.
      in_pieces(home.initial_bytes, [&](Bytes offset, Bytes bytes) {
        initialize(layout_.fill_staging, offset, bytes);
        emit_piece(
            Action::upload, block, home, offset, bytes,
            {{Role::source, layout_.fill_staging, false}, {Role::target, home.buffer, true}});
      });
  }
}

void HomeMover::fill_with_zeros(Payload payload, std::uint32_t block, BufferId staging,
                                Bytes bytes) {
  plan_.emit({.action = Action::initialize,
              .payload = payload,
              .block = block,
              .bytes = bytes,
              .uses = {{Role::target, staging, true}}});
}

void HomeMover::fill_gradients() {
  BufferId staging = kNoBuffer;
  for (std::uint32_t block = 0; block < layout_.gradient.size(); ++block) {
    const BufferId home = layout_.gradient[block];
    if (home == kNoBuffer || layout_.buffers[home].tier != Tier::nvme) continue;
    if (staging == kNoBuffer) {
      staging = gradients_.next_staging();
      fill_with_zeros(Payload::gradient, block, staging, layout_.buffers[staging].bytes);
    }
    plan_.emit({.action = Action::writeback,
                .payload = Payload::gradient,
                .block = block,
                .bytes = layout_.buffers[home].bytes,
                .uses = {{Role::source, staging, false}, {Role::target, home, true}}});
  }
}

void HomeMover::read(std::uint32_t block, Homes homes) {
  for_homes(block, homes, [&](const Home& home) { read_home(block, home); });
}

void HomeMover::read_home(std::uint32_t block, const Home& home) {
  const bool weights = home.payload == Payload::weights;
  const auto read = [&](BufferId place, Bytes offset, Bytes bytes) {
    emit_piece(Action::read, block, home, offset, bytes, {{Role::source, place, false}});
  };
  switch (home.tier) {
    case Tier::host:
      return read(home.buffer, home.offset, home.bytes);
    case Tier::nvme: {
      const BufferId staging = staging_of(block, home);
      if (weights) {
        weights_.copy(
            Action::fetch, block,
            {.from = {.buffer = home.buffer}, .to = {.buffer = staging}, .bytes = home.bytes});
      } else {
        updates_.fetch_states(block, home.sub_group, 0, {});
      }
      return read(staging, home.offset, home.bytes);
    }
    case Tier::device:
      in_pieces(home.bytes, [&](Bytes offset, Bytes bytes) {
        emit_piece(
            Action::offload, block, home, offset, bytes,
            {{Role::source, home.buffer, false}, {Role::target, layout_.fill_staging, true}});
        read(layout_.fill_staging, offset, bytes);
      });
  }
}

}  // namespace ballast::step
