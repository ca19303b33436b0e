#pragma once

#include <optional>
#include <string>

#include "ballast/core/dtype.h"
#include "ballast/core/units.h"
#include "ballast/core/view.h"

namespace ballast::train {

/// Returns the index of the first element of `bytes` that is infinite or NaN; empty if all are
/// finite. `type`: f32, bf16 or f16. Faster than memory if all values are finite.
std::optional<Elems> first_not_finite(ConstHostBytes bytes, DType type);

/// Explains why training cannot begin with element `index` of `bytes`, which is not finite: "tensor
/// 'lm_head.weight' has NaN at element 7, ...". `first`: index in the tensor of the first element
/// of `bytes`.
std::string explain_not_finite(const std::string& tensor, ConstHostBytes bytes, DType type,
                               Elems index, Elems first);

}  // namespace ballast::train
