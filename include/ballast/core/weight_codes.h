#pragma once

#include "ballast/core/units.h"

namespace ballast {

/// Weights as int8 codes, for gathers that move half the bytes (qwZ of ZeRO++, arXiv 2306.10209,
/// section 3.1). Every kBlock elements share one fp32 scale, the largest magnitude / 127; an
/// element's code is its nearest multiple of the scale (ties to even), -127 to 127. The error is at
/// most half a scale, 0.4% of the block's largest magnitude. A block with no magnitude
/// above 1.5e-36 becomes zero; one with an inf or a NaN becomes NaN.
///
/// Layout: the codes of all elements, then the scales of all blocks, padded to whole pages.
struct WeightCodes {
  static constexpr Elems kBlock = 256;

  /// Size in bytes; `elements` is a multiple of kBlock.
  static constexpr Bytes bytes_of(Elems elements) {
    return round_up(elements + elements / kBlock * sizeof(float), kPage);
  }
};

}  // namespace ballast
