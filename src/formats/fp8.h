#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ballast/core/dtype.h"
#include "ballast/core/units.h"
#include "ballast/core/view.h"
#include "ballast/formats/stored_weights.h"

#include "src/formats/pairing.h"
#include "src/formats/read_ahead.h"

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
