#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "ballast/core/dtype.h"
#include "ballast/core/memory.h"
#include "ballast/core/units.h"
#include "ballast/model/lora.h"

namespace ballast::model {

/// The 16 values of NF4 (appendix E of the paper), ascending.
const std::array<float, 16>& nf4_values();
/// The 256 values of bitsandbytes' signed dynamic map (Dettmers, "8-bit approximations for
/// parallelism in deep learning", arXiv 1511.04561), ascending.
const std::array<float, 256>& dynamic_map();

/// A quantised matrix in memory.
struct QuantizedMatrix {
  Quantization quantization;
  QuantizedArrays arrays;
  const std::byte* at = nullptr;
};

/// Quantises `values`, whose first element is at a multiple of Quantization::block(), into `codes`,
/// from the byte of that element on, and writes their scales. A block with a value that is not
/// finite gets a scale that is not finite.
void encode(const Quantization& quantization, std::span<const float> values, std::byte* codes,
            float* scales);
/// Writes `scales` (QuantizedArrays::scales_count) into the arrays at `quantized`, as fp32 or
/// quantised. The mean is summed in double, in order, and rounded once.
void store_scales(const QuantizedArrays& arrays, std::span<const float> scales,
                  std::byte* quantized);

/// Returns scale `index` of the matrix whose arrays begin at `quantized`.
float scale_at(const QuantizedArrays& arrays, const std::byte* quantized, Elems index);
/// Dequantises elements [first, first + values.size()) to fp32: table value times scale, rounded to
/// nearest even.
void decode(const Quantization& quantization, const QuantizedArrays& arrays,
            const std::byte* quantized, Elems first, std::span<float> values);

/// Gradients of the rows of a table that the tokens of a micro-batch have selected: [tokens,
/// width].
struct RowGradients {
  std::span<const float> rows;
  std::span<const std::int32_t> tokens;
};

/// Packs the gradient of a table in host memory: adds up the gradients of each row of the table in
/// the order of micro-batches and tokens, in fp32, and rounds the sums to `type` (nearest even).
/// Rows without a token become zero, and the row of the token `pad`. `packed`: the table's rows
/// [size, width] in `type`; each token is below `size`. Returns the statistics of the packed
/// values, summed in the order of rows.
GradientStats scatter_rows(DType type, std::span<const RowGradients> micro_batches,
                           std::size_t width, HostBytes packed,
                           std::optional<std::int32_t> pad = {});

}  // namespace ballast::model
