#pragma once

#include <cstddef>
#include <cstdint>

#include "ballast/core/units.h"

#include "cpu_adam/kernel_formats.h"
#include "cpu_adam/variant.h"

/// Codes of compressed moments over `Lanes` (kernel.h). README.md describes them. GPUs run the
/// constexpr functions too (src/update/cuda).
namespace ballast::cpu_adam {
namespace {

constexpr std::size_t kTile = Codes::kBlock;

/// Constants of draw().
template <class Lanes>
struct DrawConstants {
  using Bits = typename Lanes::Bits;
  Bits counters, key, first_factor, second_factor;

  explicit constexpr DrawConstants(const std::uint32_t (&draw_key)[2])
      : counters(Lanes::iota() + Lanes::pattern(draw_key[0])),
        key(Lanes::pattern(draw_key[1])),
        first_factor(Lanes::pattern(0x21f0aaadU)),
        second_factor(Lanes::pattern(0xd35a2d97U)) {}

  /// Makes gcc load the constants where registers do not suffice. It would otherwise build them
  /// again in each iteration of a loop, which takes three instructions.
  void keep_in_memory() const { asm("" : : "r"(this) : "memory"); }
};

/// 32 random bits for each of kWidth elements from number `element` on: a keyed integer hash of the
/// counter, two rounds of xor-shift and multiply with constants found with Wellons'
/// hash-prospector (2018).
template <class Lanes, std::size_t kCount>
constexpr void draw(const DrawConstants<Lanes>& k, std::uint32_t element,
                    typename Lanes::Bits (&x)[kCount]) {
  // Step by step for all vectors, because a CPU looks only some instructions ahead.
  for (std::size_t i = 0; i < kCount; ++i) {
    const auto before = static_cast<std::uint32_t>(i * Lanes::kWidth);
    x[i] = k.counters + Lanes::pattern(element + before);
  }
  for (auto& bits : x) bits = bits ^ (bits >> 16);
  for (auto& bits : x) bits = bits * k.first_factor;
  for (auto& bits : x) bits = bits ^ (bits >> 15) ^ k.key;
  for (auto& bits : x) bits = bits * k.second_factor;
  for (auto& bits : x) bits = bits ^ (bits >> 15);
}
template <class Lanes>
constexpr typename Lanes::Bits draw(const std::uint32_t (&key)[2], std::uint32_t element) {
  typename Lanes::Bits bits[1];
  draw<Lanes>(DrawConstants<Lanes>(key), element, bits);
  return bits[0];
}

/// Rounds to bf16 stochastically: up with a probability proportional to the bits that are cut off.
/// The result is the upper half of each pattern. NaNs must be quiet, as operations return them.
template <class Lanes>
constexpr typename Lanes::Bits round_to_bf16(typename Lanes::Float value,
                                             typename Lanes::Bits random) {
  const auto bits = Lanes::bits_of(value);
  const auto infinity = Lanes::pattern(0x7f800000U);
  const auto finite = (bits & infinity) ^ infinity;  // 0 for infinities and NaNs
  return bits + Lanes::zero_where_zero(finite, random & Lanes::pattern(0xffffU));
}

/// The two kinds of codes. A code c >= 1 stands for the float whose upper 12 bits are
/// (exponent * 8 + 7) - (kLargest - c); 0 stands for zero.
struct SignedCodes {
  static constexpr std::uint32_t kLargest = 127;
  static constexpr bool kSigned = true;
  static constexpr int kRandomShift = 0;  ///< selects the random bits for rounding
};
struct UnsignedCodes {
  static constexpr std::uint32_t kLargest = 255;
  static constexpr bool kSigned = false;
  static constexpr int kRandomShift = 16;
};

/// Number of bits that a code cuts off, and the smallest shared exponent: small enough for every
/// relevant moment, large enough that no code stands for a denormal.
constexpr int kCut = 20;
constexpr std::uint32_t kLowestExponent = 48;

template <class Kind>
constexpr std::uint32_t code_base(std::uint32_t exponent) {
  return exponent * 8 + 7 - Kind::kLargest;
}

/// Expands bytes, zero-extended, to the numbers that they encode under the exponent of `base`.
template <class Lanes, class Kind>
constexpr typename Lanes::Float expand_code(typename Lanes::Bits byte, typename Lanes::Bits base) {
  const auto code = byte & Lanes::pattern(Kind::kLargest);
  auto bits = Lanes::zero_where_zero(code, (code + base) << kCut);
  if constexpr (Kind::kSigned) bits = bits | ((byte & Lanes::pattern(0x80U)) << 24);
  return Lanes::number_of(bits);
}

/// The shared exponent of a tile whose largest magnitude has this pattern: the exponent of the
/// magnitude rounded up. 255 for an infinity or a NaN.
constexpr std::uint32_t exponent_for(std::uint32_t largest) {
  const std::uint32_t exponent = (largest + ((1U << kCut) - 1)) >> 23;
  if (exponent < kLowestExponent) return kLowestExponent;
  return exponent > 255 ? 255 : exponent;
}

/// Constants for rounding to codes under a shared exponent, in every lane.
template <class Lanes, class Kind>
struct CodeScale {
  typename Lanes::Bits base;
  typename Lanes::Float threshold;  ///< number of the smallest code
  typename Lanes::Float unit;       ///< value of one random bit below the threshold
  bool all_nan;

  explicit constexpr CodeScale(std::uint32_t exponent)
      : CodeScale(exponent, __builtin_bit_cast(float, (code_base<Kind>(exponent) + 1) << kCut)) {}

 private:
  constexpr CodeScale(std::uint32_t exponent, float smallest)
      : base(Lanes::pattern(code_base<Kind>(exponent))),
        threshold(Lanes::broadcast(smallest)),
        unit(Lanes::broadcast(smallest * 0x1p-16F)),
        all_nan(exponent == 255) {}
};

/// Rounds numbers to codes stochastically and without bias. Below the smallest code a first moment
/// becomes that code or zero; a second moment never becomes zero, which would let the update
/// explode. `draws`: random bits of the elements.
template <class Lanes, class Kind>
constexpr typename Lanes::Bits compress_code(const CodeScale<Lanes, Kind>& scale,
                                             typename Lanes::Float number,
                                             typename Lanes::Bits draws) {
  const auto zero = Lanes::pattern(0U);
  const auto one = Lanes::pattern(1U);
  const auto bits = Lanes::bits_of(number);
  const auto magnitude = bits & Lanes::pattern(0x7fffffffU);
  const auto value = Lanes::number_of(magnitude);
  const auto random = (draws >> Kind::kRandomShift) & Lanes::pattern(0xffffU);
  const auto rounded = (magnitude + (random << 4) + Lanes::pattern(8U)) >> kCut;
  auto small = Lanes::where_zero(magnitude, zero, one);
  if constexpr (Kind::kSigned) {
    small = Lanes::where_less(Lanes::to_float(random) * scale.unit, value, one, zero);
  }
  auto code = Lanes::where_less(value, scale.threshold, small, rounded - scale.base);
  if (scale.all_nan) code = Lanes::pattern(Kind::kLargest);
  if constexpr (Kind::kSigned) code = code | ((bits >> 24) & Lanes::pattern(0x80U));
  return code;
}

/// Elements whose codes are expanded at once: the widest vector.
constexpr std::size_t kExpanded = 16;

/// Expands kExpanded codes.
template <class Lanes, class Kind>
inline void expand_codes(const std::uint8_t* codes, typename Lanes::Bits base,
                         typename Lanes::Float (&numbers)[kExpanded / Lanes::kWidth]) {
  if constexpr (requires { Lanes::template expand_codes<Kind>(codes, base, numbers); }) {
    return Lanes::template expand_codes<Kind>(codes, base, numbers);
  }
  for (std::size_t i = 0; i < kExpanded / Lanes::kWidth; ++i) {
    numbers[i] = expand_code<Lanes, Kind>(Lanes::widen8(codes + i * Lanes::kWidth), base);
  }
}

/// Random bits of kBlock elements.
template <class Lanes>
struct Draws {
  typename Lanes::Bits bits[kBlock / Lanes::kWidth];

  Draws(const DrawConstants<Lanes>& k, std::uint32_t element) { draw<Lanes>(k, element, bits); }
};

template <class Lanes, class Kind>
inline void compress_each(const CodeScale<Lanes, Kind>& scale, const float* from,
                          const Draws<Lanes>& draws, std::uint8_t* codes) {
  for (std::size_t i = 0; i < kBlock / Lanes::kWidth; ++i) {
    const auto number = Lanes::load(from + i * Lanes::kWidth);
    Lanes::narrow8(codes + i * Lanes::kWidth,
                   compress_code<Lanes, Kind>(scale, number, draws.bits[i]));
  }
}

template <class Lanes, class Kind>
[[gnu::noinline, gnu::cold]] void compress_rare(CodeScale<Lanes, Kind> scale, const float* from,
                                                Draws<Lanes> draws, std::uint8_t* codes) {
  compress_each(scale, from, draws, codes);
}

/// Compresses kBlock numbers.
template <class Lanes, class Kind>
inline void compress_codes(const CodeScale<Lanes, Kind>& scale, const float* from,
                           const Draws<Lanes>& draws, std::uint8_t* codes) {
  if constexpr (requires { Lanes::template compress_codes<Kind>(scale, from, draws, codes); }) {
    if (Lanes::template compress_codes<Kind>(scale, from, draws, codes)) return;
    // Copies, because an object whose address a function gets cannot stay in registers.
    compress_rare(CodeScale(scale), from, Draws(draws), codes);
  } else {
    compress_each(scale, from, draws, codes);
  }
}

/// The largest magnitude of numbers, as a pattern. NaNs are larger than all numbers.
template <class Lanes>
class LargestMagnitude {
 public:
  void add(typename Lanes::Float number) {
    const auto magnitude = Lanes::bits_of(number) & Lanes::pattern(0x7fffffffU);
    lanes_ = Lanes::larger(lanes_, magnitude);
  }
  /// `number` has no sign, or is NaN.
  void add_positive(typename Lanes::Float number) {
    lanes_ = Lanes::larger(lanes_, Lanes::bits_of(number));
  }
  [[nodiscard]] std::uint32_t shared_exponent() const {
    float lanes[Lanes::kWidth];
    Lanes::store(lanes, Lanes::number_of(lanes_));
    std::uint32_t largest = 0;
    for (const float lane : lanes) {
      const auto bits = __builtin_bit_cast(std::uint32_t, lane);
      largest = bits > largest ? bits : largest;
    }
    return exponent_for(largest & 0x7fffffffU);
  }

 private:
  typename Lanes::Bits lanes_ = Lanes::pattern(0U);
};

/// A block of 8-bit moments: numbers to compress, and where the codes are stored. Null pointers if
/// the optimizer has no such moment.
struct BlockOfCodes {
  const float* numbers;
  std::uint8_t* codes;
  std::uint32_t exponent;
};

/// Compresses both moments of a block. Each element has one draw, whose halves round its moments.
template <class Lanes>
inline void compress_block(const BlockOfCodes& first, const BlockOfCodes& second,
                           const std::uint32_t (&key)[2], std::uint32_t element) {
  const CodeScale<Lanes, SignedCodes> first_scale(first.exponent);
  const CodeScale<Lanes, UnsignedCodes> second_scale(second.exponent);
  const DrawConstants<Lanes> constants(key);
  constants.keep_in_memory();
  for (std::size_t i = 0; i < kTile; i += kBlock) {
    const Draws<Lanes> draws(constants, element + static_cast<std::uint32_t>(i));
    if (first.codes != nullptr) {
      compress_codes(first_scale, first.numbers + i, draws, first.codes + i);
    }
    if (second.codes != nullptr) {
      compress_codes(second_scale, second.numbers + i, draws, second.codes + i);
    }
  }
}

}  // namespace
}  // namespace ballast::cpu_adam
