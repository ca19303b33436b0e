#pragma once

#include <cstddef>
#include <cstring>
#include <span>
#include <utility>
#include <vector>

#include "ballast/core/dtype.h"
#include "ballast/engine/blueprint.h"
#include "ballast/engine/home_piece.h"
#include "ballast/engine/state_range.h"
#include "ballast/step/rank_sizes.h"

#include "src/engine/lanes.h"
#include "src/engine/state_layout.h"

namespace ballast::engine {

/// This rank's part of a block, with the states of one sub-group.
struct HeldBlock {
  HeldBlock(const Blueprint& blueprint, std::size_t block, std::uint32_t sub_group);

  step::RankSizes sizes;
  bool keeps_part;  ///< whether the rank keeps only a part of the weights
  Bytes width;      ///< bytes per weight
  StateLayout layout;
  ShardRange shard;    ///< elements of the sub-group, whose states are here
  ShardRange weights;  ///< elements whose weights are here, except quantised ones
  Bytes code_bytes;    ///< size of the codes, which follow the weights
};

/// An array of a block in this rank's buffers, or some of its entries: `first` to `first + count`
/// begin at `offset` of the weights or of the states.
struct HeldArray {
  StateKind kind = StateKind::weights;
  Bytes offset = 0;
  Bytes width = 0;
  Elems first = 0;
  Elems count = 0;

  [[nodiscard]] Bytes bytes() const { return count * width; }
  /// Returns entries [begin, end).
  [[nodiscard]] HeldArray entries(Elems begin, Elems end) const;
  /// Returns the entries in bytes [begin, end) of the weights or states. Neither bound is within an
  /// entry.
  [[nodiscard]] HeldArray between(Bytes begin, Bytes end) const;
};

/// Returns the nonempty arrays of the block's weights or of the sub-group's states, ascending.
std::vector<HeldArray> held_arrays(const HeldBlock& held, bool states);

/// Returns the entries of an array that belong to `elements` of the block.
ShardRange entries_of(StateKind kind, const ShardRange& elements);

/// Returns the arrays that a layout keeps, ascending.
std::vector<std::pair<StateKind, StateArray>> state_arrays(const StateLayout& layout);

/// Entries of an array in a piece.
struct PieceArray {
  HeldArray array;
  HostBytes bytes;

  template <class T>
  [[nodiscard]] T get(Elems i) const {
    T value;
    std::memcpy(&value, bytes.data() + i * sizeof(T), sizeof(T));
    return value;
  }
  /// Returns the bytes of entries [from, to).
  [[nodiscard]] HostBytes part(Elems from, Elems to) const {
    return bytes.subspan(from * array.width, (to - from) * array.width);
  }
  /// Writes part(master) for each master, from entry `at` on.
  template <class Part>
  void put(Elems at, std::span<const float> masters, Part part) const {
    using T = decltype(part(0.0F));
    std::byte* const out = bytes.data() + at * sizeof(T);
    for (Elems i = 0; i < masters.size(); ++i) {
      const T value = part(masters[i]);
      std::memcpy(out + i * sizeof(T), &value, sizeof(T));
    }
  }
};

/// Returns the entries of `arrays` that are in the piece.
std::vector<PieceArray> arrays_in(const HomePiece& piece, const std::vector<HeldArray>& arrays);

}  // namespace ballast::engine
