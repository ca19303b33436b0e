#pragma once

#include <span>

#include "ballast/core/dtype.h"
#include "ballast/core/view.h"

namespace ballast {

/// Converts values stored as `type` in `bytes` exactly to fp32. `bytes` has out.size() values and
/// may have any alignment.
void decode(ConstHostBytes bytes, DType type, std::span<float> out);

/// Stores `values` as `type`: bf16 and f16 are rounded to nearest, ties to even. `out` has room for
/// all of them and may have any alignment.
void encode(std::span<const float> values, DType type, HostBytes out);

}  // namespace ballast
