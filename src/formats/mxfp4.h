#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <string_view>

#include "ballast/core/dtype.h"
#include "ballast/core/units.h"

#include "src/formats/pairing.h"

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
