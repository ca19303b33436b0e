#pragma once

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

/// Elements [start, start + count) of `shard`, moments that `optimizer` does not keep left out.
/// With Codes `start` is a multiple of their block.
Streams piece_of(Optimizer optimizer, const Shard& shard, Elems start, Elems count);

/// The arrays of `shard` as Updater::touch sees them, from element `start` on, a multiple of
/// Codes::kBlock.
std::vector<TouchedArray> touched_arrays(Optimizer optimizer, const Shard& shard, Elems start);

}  // namespace ballast::cpu_adam
