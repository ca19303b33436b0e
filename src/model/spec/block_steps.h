#pragma once

#include "ballast/core/units.h"
#include "ballast/model/architecture.h"

namespace ballast::model {

/// Elements between starts of tensors (a cache line of the smallest kind of state) and blocks.
inline constexpr Elems kTensorStep = 32;
inline constexpr Elems kBlockStep = 2048;

/// Puts the trained tensors of `block` first and the coded ones last, and lays out all again.
/// A block of several experts, all of them trained or frozen, keeps its layout.
void arrange(BlockSpec& block);

}  // namespace ballast::model
