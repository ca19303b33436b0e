#pragma once

#include <bit>
#include <cstdint>
#include <string_view>

#include "ballast/core/units.h"

namespace ballast {

/// Element types of stored tensors. The names are those of configs and checkpoints.
enum class DType : std::uint8_t { f32, bf16, f16, u16 };

/// Bytes of one element.
constexpr Bytes size_of(DType type) {
  return type == DType::f32 ? 4 : 2;
}

/// "f32", "bf16", "f16", "u16".
std::string_view to_string(DType type) noexcept;

/// The upper half of an IEEE binary32. A plain bit pattern: arithmetic happens in float.
struct Bf16 {
  std::uint16_t bits = 0;
  friend bool operator==(Bf16, Bf16) = default;
};

/// Exact.
constexpr float to_float(Bf16 value) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(value.bits) << 16);
}

/// Rounds to nearest, ties to even; NaN stays a (quiet) NaN.
constexpr Bf16 to_bf16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7fffffffU) > 0x7f800000U) {
    return {static_cast<std::uint16_t>((bits >> 16) | 0x40U)};
  }
  return {static_cast<std::uint16_t>((bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16)};
}

/// An fp32 master weight as the bf16 weight that is uploaded plus a 16-bit remainder.
struct SplitMaster {
  Bf16 weight;
  std::uint16_t remainder = 0;
};

/// Splits `master` without loss: `weight` is `master` rounded to nearest, ties away from zero, and
/// `remainder` its low half. NaN stays NaN (its quiet bit is set). Every other pattern, infinities
/// and values that round to infinity included, joins back to the same bits.
constexpr SplitMaster split_master(float master) {
  const auto bits = std::bit_cast<std::uint32_t>(master);
  const auto low = static_cast<std::uint16_t>(bits);
  if ((bits & 0x7fffffffU) > 0x7f800000U) {
    return {{static_cast<std::uint16_t>((bits >> 16) | 0x40U)}, low};
  }
  return {{static_cast<std::uint16_t>((bits + 0x8000U) >> 16)}, low};
}

/// Inverse of split_master.
constexpr float join_master(SplitMaster split) {
  const std::uint32_t high = split.weight.bits;
  const bool nan = (high & 0x7fffU) > 0x7f80U;
  const std::uint32_t carry = nan ? 0U : static_cast<std::uint32_t>(split.remainder >> 15);
  return std::bit_cast<float>(((high - carry) << 16) | split.remainder);
}

}  // namespace ballast
