#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ballast/core/dtype.h"
#include "ballast/core/memory.h"
#include "ballast/core/units.h"
#include "ballast/formats/stored_weights.h"
#include "ballast/model/lora.h"
#include "ballast/model/packed_values.h"

#include "src/formats/read_ahead.h"

namespace ballast::formats {

/// A tensor that files store in quantised form, and the tensors from which it is dequantised.
struct Pairing {
  StoredTensor dequantized;
  QuantizedWeights quantized;
  /// The tensors of `quantized` except the codes: scales and descriptions.
  std::vector<const StoredTensor*> parts;
};

/// The place of the tensor called `name`; nullptr if there is none.
using FindPlace = std::function<const WeightPlace*(const std::string& name)>;

}  // namespace ballast::formats

// All formats in which files may store quantised weights: quantized_matrices.h,
// quantized_matrices.h, quantized_matrices.h.

namespace ballast::formats {

/// The tensor that `place` stores in quantised form, or nothing if `place` is not quantised.
/// `others`: the type of weights that are not quantised. Throws Error(data) naming file and tensor
/// if scales or descriptions are missing or do not fit.
std::optional<Pairing> pair_quantized(const WeightPlace& place, DType others,
                                      const FindPlace& find);

/// Whether a tensor with this name has the scales of a matrix, in a type that weights may have.
bool has_scales(const std::string& name);

/// Dequantises elements of a matrix from `first` on into `out`, in the type of the place. `ahead`
/// reads the codes; null: through the page cache. Not for MXFP4, which is read by slices.
void read_quantized(const WeightPlace& place, Elems first, HostBytes out, ReadAhead* ahead);

}  // namespace ballast::formats

namespace ballast::formats::mxfp4 {

// Weights in MXFP4: blocks of 32 values have codes of 4 bits (E2M1, two per byte, the lower half
// first) and a common scale, a power of two (E8M0). Source: Open Compute Project, "Microscaling
// formats (MX) specification", version 1.0, 2023, sections 5.3 and 5.4. gpt-oss stores a stack of
// matrices [E, in, out] as the tensors NAME_blocks [E, out, in / 32, 16] and NAME_scales [E, out,
// in / 32], both U8.

inline constexpr Elems kBlock = 32;          ///< values per scale
inline constexpr Bytes kCodes = kBlock / 2;  ///< bytes of their codes
inline constexpr std::string_view kCodesSuffix = "_blocks";
inline constexpr std::string_view kScalesSuffix = "_scales";

/// The stack of matrices that `place` stores in quantised form, or nothing if `place` is not in
/// MXFP4. Throws Error(data) naming file and tensor if the scales are missing or do not fit.
std::optional<Pairing> pair(const WeightPlace& place, const FindPlace& find);

/// Dequantises values [first, first + out.size()) of consecutive blocks. Every code has an exact
/// value in bf16.
void decode(std::span<const std::byte> codes, std::span<const std::byte> scales, Elems first,
            std::span<Bf16> out);

/// Quantises a block: 32 finite `values` that are `step` apart. Writes its 16 bytes of codes and
/// returns its scale. The nearest codes are taken, ties to even, and of two scales the one with the
/// smaller error: the largest value becomes 4 to 8, of which more than 6 is cut off, or half of
/// that.
std::uint8_t encode(const float* values, Elems step, std::span<std::byte, kCodes> codes);
/// The 32 values of a block.
void decode(std::span<const std::byte, kCodes> codes, std::uint8_t scale,
            std::span<float, kBlock> out);

}  // namespace ballast::formats::mxfp4

// Matrices that bitsandbytes has quantised, as transformers saves them. Sources: Dettmers et al.,
// "QLoRA", arXiv 2305.14314 (NF4, double quantization) and "LLM.int8()", arXiv 2208.07339; the
// names are those of bitsandbytes' QuantState and Int8Params.
//
// NF4, a matrix NAME: NAME has the codes of the flattened matrix, two in a byte, the first in the
// high half; NAME.absmax the scales of 64 elements each (F32), NAME.quant_map the 16 values.
// If scales are codes, NAME.absmax is U8, NAME.nested_absmax (F32) has their scales,
// NAME.nested_quant_map the 256 values. NAME.quant_state.bitsandbytes__nf4 describes it in JSON.
//
// LLM.int8, a matrix MODULE.weight [rows, columns]: itself in I8; MODULE.SCB [rows], the largest
// magnitude of each row (F32); MODULE.weight_format, 0 for rows one after the other.

namespace ballast::formats::bitsandbytes {

/// The matrix that is stored in quantised form at `place`, or nothing if `place` is not quantised
/// by bitsandbytes.
/// `others`: the type of weights that are not quantised, which matrices in LLM.int8 get. Throws
/// Error(data) naming file and tensor if scales or descriptions are missing or do not fit;
/// Error(io).
std::optional<Pairing> pair(const WeightPlace& place, DType others, const FindPlace& find);

/// Dequantises elements from `first` on into `out`, in the type of the place: code times scale in
/// fp32, rounded once to nearest even, which is what bitsandbytes computes. `ahead` reads the
/// codes; null: through the page cache, which scales always use.
void read(const WeightPlace& place, Elems first, HostBytes out, ReadAhead* ahead);

/// Whether the matrix at `place` has codes that a model in `wanted` can keep unchanged.
bool has_codes(const WeightPlace& place, const model::Quantization& wanted);
/// Writes the codes and scales of such a matrix to the arrays at `out`. Scales are copied if both
/// formats quantise them, or neither does. Otherwise they are dequantised, which loses nothing, or
/// quantised (model::store_scales()).
void read_codes(const WeightPlace& place, const model::Quantization& wanted, HostBytes out,
                ReadAhead* ahead);

}  // namespace ballast::formats::bitsandbytes

namespace ballast::formats::fp8 {

// Matrices in FP8 with a scale for each block of values. Sources: DeepSeek-AI, arXiv 2412.19437,
// section 3.3.2; Micikevicius et al., "FP8 formats for deep learning", arXiv 2209.05433, for E4M3.
// A matrix NAME [rows, columns], or a stack of matrices, has its codes in NAME (F8_E4M3) and its
// scales in NAME_scale_inv or NAME_scale, in F32, BF16 or F16. A weight is its code times its
// scale. The shape of the scales determines the blocks (ScaleGrid).

/// Rows and columns of the blocks in which Ballast quantises, as DeepSeek-V3 is released.
inline constexpr Elems kBlock = 128;

/// Blocks of equal size in each matrix of a tensor. Blocks at the end of a row or column may be
/// smaller.
struct ScaleGrid {
  Elems rows = 0;  ///< rows of a matrix
  Elems columns = 0;
  Elems block_rows = 0;
  Elems block_columns = 0;
  Elems per_matrix = 0;  ///< scales of each matrix of a stack; 0: one scale for the whole stack

  /// Index of the scale of an element, by its row among those of all matrices.
  [[nodiscard]] Elems scale_of(Elems row, Elems column) const;
};
/// Returns the blocks for scales of this shape; nothing if they do not fit the codes. Scales are
/// [rows / 128, columns / 128], rounded up; [r, c] with r and c that divide rows and columns, such
/// as [1, 1] or [rows, 1]; or a single one ([] or [1]). Stacks have these for each matrix, or a
/// list with one scale for each.
std::optional<ScaleGrid> grid_of(const std::vector<std::uint64_t>& codes,
                                 const std::vector<std::uint64_t>& scales);

/// Whether a tensor with this name has scales of a matrix.
bool is_scales_name(std::string_view name);
/// The tensor whose inputs the tensor `name` scales when FP8 is computed: that of
/// X.activation_scale and X.input_scale is X.weight. "" for other names.
std::string scaled_by(std::string_view name);

/// The matrix that is stored in quantised form at `place`, or nothing if `place` has no codes with
/// scales. `others`: the type of weights that are not quantised. Matrices in blocks of 128 get it;
/// others get F32, in which products of codes and scales in 16 bits are exact. Throws
/// Error(data) naming file and tensor if the scales do not fit.
std::optional<Pairing> pair(const WeightPlace& place, DType others, const FindPlace& find);

/// Dequantises elements from `first` on into `out`, in the type of the place: code times scale in
/// fp32, rounded once to nearest even. `ahead` reads the codes; null: through the page cache, which
/// scales always use.
void read(const WeightPlace& place, Elems first, HostBytes out, ReadAhead* ahead);

/// The value of a code of E4M3: 4 bits of exponent with a bias of 7, no infinities.
float value_of(std::uint8_t code);
/// The values of all codes.
const std::array<float, 256>& values_of_codes();
/// The code of the nearest value, ties to even. The largest value is 448, to which larger values
/// are rounded.
std::uint8_t code_of(float value);

/// Form of the scales of a matrix.
struct ScaleForm {
  DType type = DType::f32;
  bool powers_of_two = false;  ///< "scale_fmt": "ue8m0" in a quantization_config
};

/// Quantises columns [128 * block, 128 * (block + 1)), as far as they exist, of up to 128 whole
/// rows of a matrix with these `columns`. The largest magnitude becomes 448. Writes their codes to
/// the same places of `codes` and returns the scale, rounded to the type of `form`.
float encode(std::span<const float> values, Elems columns, Elems block, ScaleForm form,
             std::span<std::byte> codes);

}  // namespace ballast::formats::fp8
