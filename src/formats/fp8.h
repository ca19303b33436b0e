#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "ballast/core/dtype.h"
#include "ballast/core/units.h"
#include "ballast/core/view.h"
#include "ballast/formats/stored_weights.h"

#include "src/formats/pairing.h"
#include "src/formats/read_ahead.h"

namespace ballast::formats::fp8 {

// Matrices in FP8 with a scale for each block of 128 x 128 values, as DeepSeek-V3 and others are
// released. Sources: DeepSeek-AI, arXiv 2412.19437, section 3.3.2; Micikevicius et al., "FP8
// formats for deep learning", arXiv 2209.05433, for E4M3. A matrix NAME [rows, columns] has its
// codes in NAME (F8_E4M3) and its scales in NAME_scale_inv [rows / 128, columns / 128], rounded up,
// in F32 or BF16. Blocks at the end of a row or column are smaller.

inline constexpr Elems kBlock = 128;
inline constexpr std::string_view kScalesSuffix = "_scale_inv";

/// The matrix that is stored in quantised form at `place`, or nothing if `place` has no codes with
/// scales. `others`: the type of weights that are not quantised, which the matrix gets. Throws
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
