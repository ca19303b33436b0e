#pragma once

#include "ballast/core/units.h"
#include "ballast/model/architecture.h"

namespace ballast::model {

/// Alignment of tensors (a cache line in the smallest kind of state) and of blocks, in elements.
inline constexpr Elems kTensorStep = 32;
inline constexpr Elems kBlockStep = 2048;

/// Moves the trained tensors of `block` to the front and the quantised ones to the end, and lays
/// out all tensors again. A block of several experts, all trained or all frozen, keeps its layout.
void arrange(BlockSpec& block);

}  // namespace ballast::model
