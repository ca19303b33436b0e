#pragma once

#include <bit>
#include <cstdint>
#include <string_view>
#include <type_traits>

#include "ballast/core/units.h"

namespace ballast {

/// Element types of stored tensors, with the names used in configs and checkpoints.
enum class DType : std::uint8_t { f32, bf16, f16 };

/// Bytes of one element.
constexpr Bytes size_of(DType type) {
  return type == DType::f32 ? 4 : 2;
}

/// Returns "f32", "bf16" or "f16".
std::string_view to_string(DType type) noexcept;

/// The upper half of an IEEE binary32. A plain bit pattern: arithmetic happens in float.
struct Bf16 {
  std::uint16_t bits = 0;
  friend bool operator==(Bf16, Bf16) = default;
};

constexpr float to_float(float value) {
  return value;
}
/// Converts exactly.
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

/// An IEEE binary16. A plain bit pattern: arithmetic happens in float.
struct F16 {
  std::uint16_t bits = 0;
  friend bool operator==(F16, F16) = default;
};

/// Converts exactly; a signalling NaN becomes quiet, like with the F16C instructions.
constexpr float to_float(F16 value) {
  const std::uint32_t sign = (std::uint32_t{value.bits} & 0x8000U) << 16;
  const std::uint32_t exponent = (std::uint32_t{value.bits} >> 10) & 0x1fU;
  const std::uint32_t fraction = std::uint32_t{value.bits} & 0x3ffU;
  if (exponent == 0x1fU) {
    const std::uint32_t quiet = fraction == 0 ? 0U : 0x400000U;
    return std::bit_cast<float>(sign | 0x7f800000U | quiet | (fraction << 13));
  }
  if (exponent == 0) {
    const float magnitude = static_cast<float>(fraction) * 0x1p-24F;
    return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(magnitude));
  }
  return std::bit_cast<float>(sign | ((exponent + 112U) << 23) | (fraction << 13));
}

/// Rounds to nearest, ties to even, denormals included; 65520 and above become infinity; NaN stays
/// a (quiet) NaN.
constexpr F16 to_f16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000U;
  const std::uint32_t magnitude = bits & 0x7fffffffU;
  const auto pack = [sign](std::uint32_t rest) {
    return F16{static_cast<std::uint16_t>(sign | rest)};
  };
  if (magnitude > 0x7f800000U) return pack(0x7e00U | ((magnitude >> 13) & 0x3ffU));
  if (magnitude >= 0x477ff000U) return pack(0x7c00U);
  if (magnitude < 0x38800000U) {
    // Below 2^-14: the sum's last bit is worth 2^-24, so the addition rounds correctly.
    const float sum = std::bit_cast<float>(magnitude) + 0.5F;
    return pack(std::bit_cast<std::uint32_t>(sum) - 0x3f000000U);
  }
  const std::uint32_t rounded = magnitude + 0xfffU + ((magnitude >> 13) & 1U);
  return pack((rounded - 0x38000000U) >> 13);
}

/// The DType of a C++ type.
template <class T>
struct DTypeOf;
template <>
struct DTypeOf<float> : std::integral_constant<DType, DType::f32> {};
template <>
struct DTypeOf<Bf16> : std::integral_constant<DType, DType::bf16> {};
template <>
struct DTypeOf<F16> : std::integral_constant<DType, DType::f16> {};
template <class T>
inline constexpr DType kTypeOf = DTypeOf<T>::value;

/// `value` rounded to T: to nearest, ties to even.
template <class T>
constexpr T from_float(float value) {
  if constexpr (kTypeOf<T> == DType::bf16) {
    return to_bf16(value);
  } else if constexpr (kTypeOf<T> == DType::f16) {
    return to_f16(value);
  } else {
    return value;
  }
}

/// Calls work(T{}) with the C++ type of `type`: float, Bf16 or F16.
template <class Work>
auto with_training_type(DType type, const Work& work) {
  switch (type) {
    case DType::f32:
      return work(float{});
    case DType::bf16:
      return work(Bf16{});
    case DType::f16:
      break;
  }
  return work(F16{});
}

/// An fp32 master weight as the bf16 weight that is uploaded plus a 16-bit remainder.
struct SplitMaster {
  Bf16 weight;
  std::uint16_t remainder = 0;
};

/// Splits `master` without loss: `weight` is `master` rounded to nearest, ties away from zero, and
/// `remainder` its low half. NaN stays NaN (its quiet bit is set). Every other pattern, including
/// infinities and values that round to infinity, joins back to the same bits.
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
  const std::uint32_t halves = (std::uint32_t{split.weight.bits} << 16) | split.remainder;
  return std::bit_cast<float>((halves ^ 0x8000U) - 0x8000U);
}

/// Weights as int8 codes, for gathers that move half the bytes (qwZ of ZeRO++, arXiv 2306.10209,
/// section 3.1). Every kBlock elements share one fp32 scale, the largest magnitude / 127; an
/// element's code is its nearest multiple of the scale (ties to even), -127 to 127. The error is at
/// most half a scale, 0.4% of the block's largest magnitude. A block with no magnitude
/// above 1.5e-36 becomes zero; one with an inf or a NaN becomes NaN.
///
/// Layout: the codes of all elements, then the scales of all blocks, padded to whole pages.
struct WeightCodes {
  static constexpr Elems kBlock = 256;

  /// Size in bytes; `elements` is a multiple of kBlock.
  static constexpr Bytes bytes_of(Elems elements) {
    return round_up(elements + elements / kBlock * sizeof(float), kPage);
  }
};

/// Statistics of a gradient in the type in which it is stored.
struct GradientStats {
  double sum_of_squares = 0.0;   ///< in a fixed order, double accumulators
  std::uint64_t non_finite = 0;  ///< values that are inf or NaN
};

}  // namespace ballast
