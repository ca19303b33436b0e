#pragma once

#include <cstddef>

#include "ballast/core/dtype.h"
#include "ballast/core/units.h"
#include "ballast/cpu_adam/shard.h"
#include "ballast/engine/blueprint.h"

namespace ballast::engine {

/// One array of a block's state buffer. No bytes: it is not kept.
struct StateArray {
  Bytes offset = 0;
  Bytes bytes = 0;
};

/// What a block's weight and state buffers hold, each array `elements` long. In the state buffer
/// every array starts on a cache line of its own, cpu_adam::kArraySkew behind the one before it or
/// the buffer's start: blocks are often a power of two long. What lies between the arrays is zero.
/// All zeros means zero in every format.
struct StateLayout {
  StateLayout(DType type, const StateFormat& format, Elems elements);

  bool split;  ///< weights are bf16 and the remainder is kept; false: weights are fp32
  StateFormat format;
  Elems elements;
  StateArray remainder;  ///< 16 bits of each fp32 master weight
  StateArray first;      ///< moments, or their codes
  StateArray second;
  StateArray first_exponents;  ///< of codes
  StateArray second_exponents;
  Bytes weight_bytes;
  Bytes state_bytes;     ///< whole pages
  Bytes update_traffic;  ///< memory that an update reads and writes
};

/// The elements of a block whose states one rank keeps and updates.
struct ShardRange {
  Elems first = 0;
  Elems elements = 0;  ///< fewer than `room`, or none, at the block's end
  Elems room = 0;      ///< the same for all ranks; what is behind the elements is zero
};

/// The elements of this rank's shard, one of as many as there are ranks. Starts on whole blocks of
/// cpu_adam::Codes::kBlock, so that 8-bit moments do not depend on the number of shards.
ShardRange even_shard(const Blueprint& blueprint, std::size_t block);
/// That where the stage splits states, else all of the block.
ShardRange rank_shard(const Blueprint& blueprint, std::size_t block);

/// Layout of what this rank keeps of block `block`.
StateLayout state_layout(const Blueprint& blueprint, std::size_t block);

/// Number of block `block`'s first element when the elements of all blocks are counted in order,
/// each block from a multiple of cpu_adam::Codes::kBlock.
Elems first_element(const model::Architecture& model, std::size_t block);

/// The shard of block `block` that this rank updates, which starts at these addresses. The
/// gradient's type is that of the weights.
cpu_adam::Shard make_shard(const Blueprint& blueprint, std::size_t block, std::byte* weights,
                           std::byte* states, const std::byte* gradient);

}  // namespace ballast::engine
