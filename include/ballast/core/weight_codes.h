#pragma once

#include "ballast/core/units.h"

namespace ballast {

/// Weights as int8 codes, for gathers that move half the bytes (qwZ of ZeRO++, arXiv 2306.10209,
/// section 3.1). Of every kBlock elements one fp32 scale is kept, the largest magnitude / 127, and
/// each element as its nearest multiple of the scale (ties to even), -127 to 127. So an element is
/// off by at most half a scale, 0.4% of the largest in its block. A block with no magnitude above
/// 1.5e-36 becomes zero; one with an inf or a NaN becomes NaN.
///
/// In memory: the codes of all elements, then the scales of all blocks, up to whole pages.
struct WeightCodes {
  static constexpr Elems kBlock = 256;

  /// Bytes that `elements`, a multiple of kBlock, take.
  static constexpr Bytes bytes_of(Elems elements) {
    return round_up(elements + elements / kBlock * sizeof(float), kPage);
  }
};

}  // namespace ballast
