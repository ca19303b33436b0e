#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <span>
#include <vector>

#include "ballast/core/dtype.h"
#include "ballast/engine/blueprint.h"
#include "ballast/engine/saved_states.h"
#include "ballast/schedule/rank_sizes.h"

#include "src/engine/lanes.h"
#include "src/engine/state_layout.h"

namespace ballast::engine {

/// The elements of an array that are in a piece. The array begins at `offset` of this rank's part;
/// each element has `width` bytes. No piece ends within an element.
struct Overlap {
  Overlap(const HomePiece& piece, Bytes offset, Bytes width, Elems elements) {
    const Bytes begin = std::max(piece.offset, offset);
    const Bytes end = std::min(piece.offset + piece.bytes.size(), offset + elements * width);
    if (begin >= end) return;
    first = (begin - offset) / width;
    count = (end - begin) / width;
    bytes = piece.bytes.subspan(begin - piece.offset, end - begin);
  }
  template <class T>
  [[nodiscard]] T get(Elems i) const {
    T value;
    std::memcpy(&value, bytes.data() + i * sizeof(T), sizeof(T));
    return value;
  }
  /// The bytes of elements [from, to) of the overlap.
  [[nodiscard]] HostBytes part(Elems from, Elems to) const {
    const Bytes width = bytes.size() / count;
    return bytes.subspan(from * width, (to - from) * width);
  }
  /// Writes part(master) of each, from element `at` of the overlap on.
  template <class Part>
  void put(Elems at, std::span<const float> masters, Part part) const {
    using T = decltype(part(0.0F));
    std::byte* const out = bytes.data() + at * sizeof(T);
    for (Elems i = 0; i < masters.size(); ++i) {
      const T value = part(masters[i]);
      std::memcpy(out + i * sizeof(T), &value, sizeof(T));
    }
  }

  Elems first = 0;  ///< index of the first one in the array
  Elems count = 0;
  HostBytes bytes;
};

/// This rank's part of a block, of its states those of one sub-group.
struct HeldBlock {
  HeldBlock(const Blueprint& blueprint, std::size_t block, std::uint32_t sub_group)
      : sizes(blueprint.workload),
        keeps_part(sizes.keeps_part_of_weights(static_cast<std::uint32_t>(block))),
        width(size_of(blueprint.type)),
        layout(state_layout(blueprint, block, sub_group)),
        shard(sub_group_range(blueprint, block, sub_group)),
        weights(weights_here(blueprint, block)),
        code_bytes(model::BlockCodes(blueprint.model, blueprint.model.blocks[block]).bytes) {}

  /// The elements whose weights are here; they include the rank's shard.
  [[nodiscard]] ShardRange weights_here(const Blueprint& blueprint, std::size_t block) const {
    const Elems whole = blueprint.model.blocks[block].plain_elements();
    if (!keeps_part) return {0, whole, whole};
    const auto number = static_cast<std::uint32_t>(block);
    if (!sizes.splits_weights(number)) return even_shard(blueprint, block, false);
    const Elems room = sizes.weights(number) / width;
    const Elems first = std::min(whole, blueprint.rank % sizes.group() * room);
    return {first, std::min(room, whole - first), room};
  }

  schedule::RankSizes sizes;
  bool keeps_part;  ///< of the weights
  Bytes width;      ///< of a weight
  StateLayout layout;
  ShardRange shard;    ///< elements of the sub-group, whose states are here
  ShardRange weights;  ///< elements whose weights are here, without those that are codes
  Bytes code_bytes;    ///< of the codes behind these
};

/// An array of a block in this rank's buffers: its entries `first` to `first + count` begin at
/// `offset` of the weights or of the states.
struct HeldArray {
  StateKind kind = StateKind::weights;
  Bytes offset = 0;
  Bytes width = 0;
  Elems first = 0;
  Elems count = 0;
};

/// The arrays of the block's weights or of the sub-group's states that are not empty, in ascending
/// order.
std::vector<HeldArray> held_arrays(const HeldBlock& held, bool states);

/// The entries of an array that belong to `elements` of the block.
ShardRange entries_of(StateKind kind, const ShardRange& elements);

}  // namespace ballast::engine
