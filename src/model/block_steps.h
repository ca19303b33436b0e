#pragma once

#include "ballast/core/units.h"

namespace ballast::model {

/// Elements between starts of tensors (a cache line of the smallest kind of state) and blocks.
inline constexpr Elems kTensorStep = 32;
inline constexpr Elems kBlockStep = 2048;

}  // namespace ballast::model
