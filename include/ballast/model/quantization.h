#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "ballast/core/units.h"

namespace ballast::model {

/// Quantisation of a frozen base in bitsandbytes' format (QLoRA: Dettmers et al., arXiv
/// 2305.14314). Each block of consecutive elements of a flattened matrix shares a scale, the
/// largest magnitude. An element becomes the index of the nearest value (element / scale) in a
/// table of values in [-1, 1], the lower one on a tie.
struct Quantization {
  enum class Format : std::uint8_t {
    int8,  ///< one byte per element, from the 256 values of dynamic_map(); one scale per 256
           ///< elements
    nf4  ///< two elements per byte, the first in the high half, from nf4_values(); one scale per 64
         ///< elements
  };
  Format format = Format::nf4;
  /// Scales are quantised too (nf4 only; section 3 of the paper, "double quantization"): the mean
  /// is subtracted, and dynamic_map() encodes them in a byte each, with an fp32 scale per 256
  /// scales.
  bool double_scales = false;

  /// Elements per scale.
  [[nodiscard]] Elems block() const { return format == Format::nf4 ? 64 : 256; }
  /// A text that is equal for settings with the same results: "int8", "nf4", "nf4 with scales in 8
  /// bits".
  [[nodiscard]] std::string description() const;
  friend bool operator==(const Quantization&, const Quantization&) = default;
};

/// Offsets of the arrays of a quantised matrix of `elements`: codes, scales (fp32, or bytes if they
/// are quantised too), then fp32 scales of the scales and their mean. Each array begins at a
/// multiple of 64 bytes.
struct QuantizedArrays {
  QuantizedArrays(const Quantization& quantization, Elems elements);

  Elems elements;
  Elems scales_count;
  Elems nested_count;  ///< 0: scales are fp32
  Bytes scales;        ///< offsets in bytes; the codes begin at 0
  Bytes nested;
  Bytes mean;
  Bytes bytes;  ///< total size
};

/// Number of scales that share an fp32 scale.
inline constexpr Elems kNestedBlock = 256;

}  // namespace ballast::model
