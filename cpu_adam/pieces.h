#pragma once

#include <algorithm>
#include <vector>

#include "cpu_adam/variant.h"

namespace ballast::cpu_adam {

/// Bytes of one element of each array; 0 where there is none.
struct ElementSizes {
  std::size_t main, companion, first, second, gradient;
  bool loads_companion;  ///< a remainder is, a copy is not
};
ElementSizes sizes_of(Optimizer optimizer, Weights::Format weights, DType gradient,
                      Moments::Format moments);

/// Throws Error(state) when `shard` cannot be updated by `optimizer` (see Updater::step).
void require_complete(Optimizer optimizer, const Shard& shard);
/// The same for a step, which an empty shard needs not be complete for.
void require_complete(const Hyper& hyper, const Shard& shard);

/// The format of the moments that `optimizer` keeps of `shard`: with no first one, that of the
/// second.
Moments::Format format_of_moments(Optimizer optimizer, const Shard& shard);

/// Calls `piece(start, count)` for [start, end) of a shard, cut where the number of an element
/// passes a multiple of 2^32: a kernel sees the lower half of that number.
void for_pieces(Elems first_element, Elems start, Elems end, const auto& piece) {
  constexpr Elems kLowerHalf = Elems{1} << 32;
  while (start < end) {
    const Elems left = kLowerHalf - (first_element + start) % kLowerHalf;
    const Elems count = std::min(end - start, left);
    piece(start, count);
    start += count;
  }
}

/// Elements [start, start + count) of `shard`, moments that `optimizer` does not keep left out.
/// With Codes `start` is a multiple of their block.
Streams piece_of(Optimizer optimizer, const Shard& shard, Elems start, Elems count);

/// The arrays of `shard` as Updater::touch sees them, from element `start` on, a multiple of
/// Codes::kBlock.
std::vector<TouchedArray> touched_arrays(Optimizer optimizer, const Shard& shard, Elems start);

}  // namespace ballast::cpu_adam
