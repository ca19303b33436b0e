#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

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

/// The 16 values of NF4 (appendix E of the paper), ascending.
const std::array<float, 16>& nf4_values();
/// The 256 values of bitsandbytes' signed dynamic map (Dettmers, "8-bit approximations for
/// parallelism in deep learning", arXiv 1511.04561), ascending.
const std::array<float, 256>& dynamic_map();

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

/// The coded arrays of a matrix, in memory.
struct CodedMatrix {
  Quantization quantization;
  CodedArrays arrays;
  const std::byte* at = nullptr;
};

/// Scales per scale of scales.
inline constexpr Elems kNestedBlock = 256;

/// Codes of `values`, the elements from one at a multiple of Quantization::block() on: into
/// `codes`, from the byte of the first on, and their scales. A block with a value that is not
/// finite gets a scale that is not finite.
void encode(const Quantization& quantization, std::span<const float> values, std::byte* codes,
            float* scales);
/// Writes `scales` (CodedArrays::scales_count) into the arrays at `coded`, as fp32 or as codes. The
/// mean is the sum in double, in order, divided and rounded once.
void store_scales(const CodedArrays& arrays, std::span<const float> scales, std::byte* coded);

/// Scale `index` of a matrix whose arrays begin at `coded`.
float scale_at(const CodedArrays& arrays, const std::byte* coded, Elems index);
/// Elements [first, first + values.size()) as fp32: value times scale, rounded to nearest even.
void decode(const Quantization& quantization, const CodedArrays& arrays, const std::byte* coded,
            Elems first, std::span<float> values);

}  // namespace ballast::model
