#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "ballast/core/units.h"

namespace ballast::model {

/// Codes of a frozen base, as bitsandbytes has them (its QLoRA: Dettmers et al., arXiv 2305.14314).
/// Consecutive elements of a flattened matrix share a scale, their largest magnitude; an element is
/// the nearest of a table of values in [-1, 1] times it (of two equally near ones, the lower).
struct Quantization {
  enum class Format : std::uint8_t {
    int8,  ///< a byte each: the 256 values of dynamic_map(); a scale for 256 elements
    nf4    ///< two in a byte, the first in the high half: nf4_values(); a scale for 64 elements
  };
  Format format = Format::nf4;
  /// Scales are codes too (nf4 alone; section 3 of the paper, "double quantization"): less their
  /// mean they are bytes of dynamic_map(), with an fp32 scale for 256 of them.
  bool double_scales = false;

  /// Elements with one scale.
  [[nodiscard]] Elems block() const { return format == Format::nf4 ? 64 : 256; }
  /// The same for all that have the same bits: "int8", "nf4", "nf4 with scales in 8 bits".
  [[nodiscard]] std::string description() const;
  friend bool operator==(const Quantization&, const Quantization&) = default;
};

/// Where the codes of a matrix of `elements` lie: codes, scales (fp32, or bytes if they are codes
/// too), then fp32 scales of scales and their mean. Each array begins at a multiple of 64 bytes.
struct CodedArrays {
  CodedArrays(const Quantization& quantization, Elems elements);

  Elems elements;
  Elems scales_count;
  Elems nested_count;  ///< 0: scales are fp32
  Bytes scales;        ///< offsets in bytes; the codes begin at 0
  Bytes nested;
  Bytes mean;
  Bytes bytes;  ///< of all
};

/// Scales per scale of scales.
inline constexpr Elems kNestedBlock = 256;

}  // namespace ballast::model
