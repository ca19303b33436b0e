#pragma once

#include <optional>
#include <string>

#include "ballast/core/dtype.h"
#include "ballast/core/units.h"
#include "ballast/core/view.h"

namespace ballast::train {

/// The number of the first element of `bytes` that is infinite or not a number; empty if all are
/// finite. `type`: f32, bf16 or f16. Faster than memory for values that are all finite.
std::optional<Elems> first_not_finite(ConstHostBytes bytes, DType type);

/// Why training cannot begin with element `index` of `bytes`, which is not finite, and what to do:
/// "tensor 'lm_head.weight' has NaN at element 7, ...". `first`: the number of the first element of
/// `bytes` in the tensor.
std::string explain_not_finite(const std::string& tensor, ConstHostBytes bytes, DType type,
                               Elems index, Elems first);

}  // namespace ballast::train
