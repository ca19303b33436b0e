#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <utility>
#include <vector>

#include "ballast/comm/communicator.h"
#include "ballast/core/dtype.h"
#include "ballast/cpu_adam/updater.h"
#include "ballast/engine/blueprint.h"
#include "ballast/engine/run_states.h"
#include "ballast/step/problem.h"

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

/// Writes the initial states of every block to their homes, with the threads of `team`: weights
/// from `source`, moments zero. Reads parts of every tensor from `source`, with all threads working
/// on neighbouring parts: once for its weights and, if they have other masters (for fp16, and for
/// bf16 if the source has more than bf16 values), once for these. All buffers must be zeroed, as
/// the store allocates them.
void fill_states(const Blueprint& blueprint, WeightSource& source, const cpu_adam::Updater& team,
                 const Perform& perform);

/// Returns fp32 master weights of the elements [first, first + count) of `block`, from all `ranks`
/// (nullptr with one rank).
std::vector<float> read_master(const Blueprint& blueprint, comm::Ranks* ranks, std::size_t block,
                               Elems first, Elems count, const Perform& perform);

/// Returns the XXH3 over weights and states of all blocks in order, equal on all `ranks` (nullptr
/// with one rank) and in every stage and placement. Throws Error(state) if ranks have different
/// weights.
std::uint64_t hash_states(const Blueprint& blueprint, comm::Ranks* ranks, const Perform& perform);

/// Calls `take` with the entries in `piece` that belong to this rank's shard if states are split.
/// The bytes are equal in every stage.
void for_own_entries(const Blueprint& blueprint, const HeldBlock& held, const HomePiece& piece,
                     const StateSink& take);

/// Returns the homes on a tier, without their content, in block order, weights first.
std::vector<KeptHome> homes_on(const Blueprint& blueprint, Tier tier);
/// Returns the buffer of a home.
plan::BufferId buffer_of(const Blueprint& blueprint, const KeptHome& home);
/// Returns homes_on(host) in the order in which a step first writes to them.
std::vector<KeptHome> host_homes_by_update(const Blueprint& blueprint);
/// Returns whether the homes on NVMe of two blueprints contain the same ranges.
bool same_homes(const std::vector<KeptHome>& one, const std::vector<KeptHome>& other);

/// Passes the ranges of saved_ranges() to `sink` in this order, each in one or several parts in
/// ascending order.
void save_states(const Blueprint& blueprint, const StateSink& sink, const Perform& perform,
                 step::Homes homes);

/// Writes weights and states of every block to these homes like fill_states(), all from `source`,
/// in parts, for this rank's entries of each array.
void restore_states(const Blueprint& blueprint, const StateSource& source, const Perform& perform,
                    step::Homes homes);

}  // namespace ballast::engine
