#pragma once

#include <cstddef>
#include <span>

#include "ballast/core/dtype.h"
#include "ballast/core/units.h"

namespace ballast::comm {

/// `out` = the sum of `sources` (at least one), element by element: ((s0 + s1) + s2) + ... in fp32,
/// rounded to `type` (f32 or bf16: to nearest, ties to even) once. All are `bytes` long, a whole
/// number of elements. `out` may be one of the sources; apart from that nothing overlaps. A NaN in
/// a source is a NaN in `out`; which one is not said.
void sum_in_order(std::span<const std::byte* const> sources, std::byte* out, Bytes bytes,
                  DType type);

}  // namespace ballast::comm
