#pragma once

#include <algorithm>
#include <vector>

#include "cpu_adam/variant.h"

namespace ballast::cpu_adam {

/// Bytes of one element of each array; 0 for an array that is not used.
struct ElementSizes {
  std::size_t main, companion, first, second, gradient;
  bool loads_companion;  ///< true for a remainder, false for a copy
};
ElementSizes sizes_of(Optimizer optimizer, Weights::Format weights, DType gradient,
                      Moments::Format moments);
/// Those of `shard` when `optimizer` updates it.
ElementSizes sizes_of(Optimizer optimizer, const Shard& shard);

/// Throws Error(state) when `shard` cannot be updated by `optimizer` (see Updater::step).
void require_complete(Optimizer optimizer, const Shard& shard);
/// The same for a step, which accepts any empty shard.
void require_complete(const Hyper& hyper, const Shard& shard);

/// The format of the moments that `optimizer` keeps: without a first moment, bf16_first is f32.
Moments::Format format_of_moments(Optimizer optimizer, const Shard& shard);

/// Calls `piece(start, count)` for [start, end) of a shard, cut at element numbers that are
/// multiples of 2^32: a kernel receives only the lower 32 bits of an element's number.
void for_pieces(Elems first_element, Elems start, Elems end, const auto& piece) {
  constexpr Elems kLowerHalf = Elems{1} << 32;
  while (start < end) {
    const Elems left = kLowerHalf - (first_element + start) % kLowerHalf;
    const Elems count = std::min(end - start, left);
    piece(start, count);
    start += count;
  }
}

/// Elements [start, start + count) of `shard` without the moments that `optimizer` does not keep.
/// With Codes, `start` is a multiple of Codes::kBlock.
Streams piece_of(Optimizer optimizer, const Shard& shard, Elems start, Elems count);

/// The arrays of `shard` for Updater::touch, from element `start` (a multiple of Codes::kBlock) on.
std::vector<TouchedArray> touched_arrays(Optimizer optimizer, const Shard& shard, Elems start);

}  // namespace ballast::cpu_adam
