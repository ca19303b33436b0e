#pragma once

#include <cstddef>

#include "ballast/core/dtype.h"
#include "ballast/core/units.h"
#include "ballast/cpu_adam/shard.h"
#include "ballast/engine/blueprint.h"

namespace ballast::engine {

/// Every array of a state buffer starts on a cache line of its own.
constexpr Bytes kStateAlignment = 64;

/// Distance of each array to the end of the one before it, and of the first to the buffer's start.
/// Blocks are often a power of two long, and an update that walks along arrays a power of two apart
/// can run at a third of its speed on AMD's Zen: its first cache tells the lines of a set apart by
/// bits 12 to 27 of the address, in which bit 12 is combined with 27, 13 with 26, 14 with 25 and so
/// on (Lipp et al., "Take A Way", AsiaCCS 2020). Seven pages keep the moments of blocks of 1, 3, 5
/// and 7 times a power of two apart there, which fewer pages do not; 13 lines spread five arrays
/// evenly over the sets.
constexpr Bytes kStateSkew = 7 * kPage + 13 * kStateAlignment;

/// One array of a block's state buffer. No bytes: it is not kept.
struct StateArray {
  Bytes offset = 0;
  Bytes bytes = 0;
};

/// What a block's weight and state buffers hold, each array `elements` long. What lies between the
/// arrays is zero. All zeros means zero in every format.
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
  Bytes state_bytes;  ///< whole pages
};

/// Layout of block `block`.
StateLayout state_layout(const Blueprint& blueprint, std::size_t block);

/// Number of block `block`'s first element when the elements of all blocks are counted in order,
/// each block from a multiple of cpu_adam::Codes::kBlock.
Elems first_element(const model::Architecture& model, std::size_t block);

/// The shard of the whole of block `block`, whose buffers start at these addresses. The gradient's
/// type is that of the weights.
cpu_adam::Shard make_shard(const Blueprint& blueprint, std::size_t block, std::byte* weights,
                           std::byte* states, const std::byte* gradient);

}  // namespace ballast::engine
