#pragma once

#include <vector>

#include "cpu_adam/variant.h"

namespace ballast::cpu_adam {

/// Throws Error(state) when `shard` cannot be updated by `optimizer` (see Updater::step).
void require_complete(Optimizer optimizer, const Shard& shard);

/// Elements [start, start + count) of `shard`, moments that `optimizer` does not keep left out.
/// With Codes `start` is a multiple of their block.
Streams piece_of(Optimizer optimizer, const Shard& shard, Elems start, Elems count);

/// The arrays of `shard` as Updater::touch sees them, from element `start` on, a multiple of
/// Codes::kBlock.
std::vector<TouchedArray> touched_arrays(Optimizer optimizer, const Shard& shard, Elems start);

}  // namespace ballast::cpu_adam
