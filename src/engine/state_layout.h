#pragma once

#include <cstddef>

#include "ballast/core/dtype.h"
#include "ballast/core/units.h"
#include "ballast/cpu_adam/shard.h"
#include "ballast/engine/blueprint.h"

namespace ballast::engine {

/// One array of a block's state buffer; 0 bytes if it is not kept.
struct StateArray {
  Bytes offset = 0;
  Bytes bytes = 0;
};

/// Layout of a block's weight and state buffers; each array has `elements` elements. In the state
/// buffer every array starts cpu_adam::kArraySkew after a cache line boundary, because blocks are
/// often a power of two long. Gaps are zero; all zeros means zero in every format.
struct StateLayout {
  StateLayout(DType type, const StateFormat& format, Elems elements);

  DType type;  ///< type of weights and gradient
  StateFormat format;
  Elems elements;
  /// The bits that the fp32 master of a weight has beyond the weight:
  /// cpu_adam::Weights::format_of().
  StateArray master;
  StateArray first;  ///< moments, or their codes
  StateArray second;
  StateArray first_exponents;  ///< exponents of codes
  StateArray second_exponents;
  Bytes weight_bytes;
  Bytes state_bytes;     ///< in whole pages
  Bytes update_traffic;  ///< memory that an update reads and writes
};

/// Elements of a block whose states one rank keeps and updates.
struct ShardRange {
  Elems first = 0;
  Elems elements = 0;  ///< fewer than `room`, or none, at the end of the block
  Elems room = 0;      ///< equal on all ranks; zeros follow the elements
};

/// Returns the elements of this rank's shard of weights, or of states: one of `problem.sharers`
/// equal parts or, with expert parallelism, its expert. Starts on whole blocks of
/// cpu_adam::Codes::kBlock, so that 8-bit moments do not depend on the number of shards.
ShardRange even_shard(const Blueprint& blueprint, std::size_t block, bool states);
/// Returns the elements whose states this rank keeps: even_shard() if the stage splits states,
/// otherwise the trained ones of the block; none if it is frozen.
ShardRange rank_shard(const Blueprint& blueprint, std::size_t block);

/// Returns the number of sub-groups of this rank's part of a block, 0 if it is frozen; equal on all
/// ranks.
std::uint32_t sub_groups(const Blueprint& blueprint, std::size_t block);
/// Returns the elements of rank_shard() in a sub-group. They are consecutive; the last sub-group
/// may be smaller.
ShardRange sub_group_range(const Blueprint& blueprint, std::size_t block, std::uint32_t sub_group);
/// Returns the layout of one sub-group.
StateLayout state_layout(const Blueprint& blueprint, std::size_t block, std::uint32_t sub_group);

/// Returns a sub-group of the shard that this rank updates. `weights` and `gradient` are those of
/// the whole shard and have the same type; `states` are those of the sub-group. Null for arrays
/// that are elsewhere.
cpu_adam::Shard make_shard(const Blueprint& blueprint, std::size_t block, std::uint32_t sub_group,
                           std::byte* weights, std::byte* states, const std::byte* gradient);

}  // namespace ballast::engine
