#pragma once

#include <cstdint>
#include <span>

#include "ballast/core/units.h"
#include "ballast/model/architecture.h"

namespace ballast::model {

/// Writes the initial fp32 values of elements [first, first + out.size()) of `tensor`. A value
/// depends only on the seed, the tensor's name and the element's index in the whole tensor. Throws
/// Error(state) for Init::row_norms.
void initialize(const TensorSpec& tensor, std::uint64_t seed, Elems first, std::span<float> out);

}  // namespace ballast::model
