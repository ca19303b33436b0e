#pragma once

#include <array>
#include <cstddef>
#include <span>

#include "ballast/core/units.h"
#include "ballast/model/quantization.h"

namespace ballast::model {

/// The 16 values of NF4 (appendix E of the paper), ascending.
const std::array<float, 16>& nf4_values();
/// The 256 values of bitsandbytes' signed dynamic map (Dettmers, "8-bit approximations for
/// parallelism in deep learning", arXiv 1511.04561), ascending.
const std::array<float, 256>& dynamic_map();

/// The coded arrays of a matrix, in memory.
struct CodedMatrix {
  Quantization quantization;
  CodedArrays arrays;
  const std::byte* at = nullptr;
};

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
