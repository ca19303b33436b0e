#pragma once

#include <cstddef>
#include <cstdint>

#include "ballast/core/units.h"

#include "cpu_adam/kernel_formats.h"
#include "cpu_adam/kernel_pairs.h"
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

  /// `stride`: distance of the elements in neighbouring lanes.
  explicit constexpr DrawConstants(const std::uint32_t (&draw_key)[2], std::uint32_t stride = 1)
      : counters(Lanes::iota() * Lanes::pattern(stride) + Lanes::pattern(draw_key[0])),
        key(Lanes::pattern(draw_key[1])),
        first_factor(Lanes::pattern(0x21f0aaadU)),
        second_factor(Lanes::pattern(0xd35a2d97U)) {}

  /// Makes gcc load the constants where registers do not suffice. It would otherwise build them
  /// again in each iteration of a loop, which takes three instructions.
  void keep_in_memory() const { asm("" : : "r"(this) : "memory"); }
};

/// Replaces counters by 32 random bits each: a keyed integer hash, two rounds of xor-shift and
/// multiply with constants found with Wellons' hash-prospector (2018).
template <class Lanes, std::size_t kCount>
constexpr void hash(const DrawConstants<Lanes>& k, typename Lanes::Bits (&x)[kCount]) {
  // Step by step for all vectors, because a CPU looks only some instructions ahead.
  for (auto& bits : x) bits = bits ^ (bits >> 16);
  for (auto& bits : x) bits = bits * k.first_factor;
  for (auto& bits : x) bits = bits ^ (bits >> 15) ^ k.key;
  for (auto& bits : x) bits = bits * k.second_factor;
  for (auto& bits : x) bits = bits ^ (bits >> 15);
}

/// 32 random bits for each of kCount * kWidth elements from number `element` on.
template <class Lanes, std::size_t kCount>
constexpr void draw(const DrawConstants<Lanes>& k, std::uint32_t element,
                    typename Lanes::Bits (&x)[kCount]) {
  const auto start = k.counters + Lanes::pattern(element);
  for (std::size_t i = 0; i < kCount; ++i) {
    x[i] = start + Lanes::pattern(static_cast<std::uint32_t>(i * Lanes::kWidth));
  }
  hash<Lanes>(k, x);
}
template <class Lanes>
constexpr typename Lanes::Bits draw(const std::uint32_t (&key)[2], std::uint32_t element) {
  typename Lanes::Bits bits[1];
  draw<Lanes>(DrawConstants<Lanes>(key), element, bits);
  return bits[0];
}

/// Rounds to bf16 stochastically: up with a probability proportional to the bits that are cut off.
/// The result is the upper half of each pattern. NaNs must be quiet, as operations return them. An
/// infinity has no bits that are cut off and is not changed.
template <class Lanes>
constexpr typename Lanes::Bits round_to_bf16(typename Lanes::Float value,
                                             typename Lanes::Bits random) {
  const auto added = Lanes::zero_where_nan(value, random & Lanes::pattern(0xffffU));
  return Lanes::bits_of(value) + added;
}

/// The two kinds of codes. A code c >= 1 stands for the float whose upper 12 bits are
/// (exponent * 8 + 7) - (kLargest - c); 0 stands for zero.
struct SignedCodes {
  static constexpr std::uint32_t kLargest = 127;
  static constexpr bool kSigned = true;
  static constexpr int kRandomShift = 0;  ///< selects kCut of the 32 random bits for rounding
};
struct UnsignedCodes {
  static constexpr std::uint32_t kLargest = 255;
  static constexpr bool kSigned = false;
  static constexpr int kRandomShift = 12;
};

/// Number of bits that a code cuts off, those bits, and the smallest shared exponent: small enough
/// for every relevant moment, large enough that no code stands for a denormal.
constexpr int kCut = 20;
constexpr std::uint32_t kCutBits = (1U << kCut) - 1;
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
  if constexpr (Kind::kSigned) bits = bits ^ ((byte & Lanes::pattern(0x80U)) << 24);
  return Lanes::number_of(bits);
}

/// The shared exponent of a tile whose largest magnitude has this pattern: the exponent of the
/// magnitude rounded up. 255 for an infinity or a NaN.
constexpr std::uint32_t exponent_for(std::uint32_t largest) {
  const std::uint32_t exponent = (largest + kCutBits) >> 23;
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
        unit(Lanes::broadcast(smallest * 0x1p-20F)),
        all_nan(exponent == 255) {}
};

/// The kCut random bits of a draw that round a moment. The bits of the two moments overlap only
/// where they matter least for the second moment.
template <class Lanes, class Kind>
constexpr typename Lanes::Bits random_bits(typename Lanes::Bits draws) {
  static_assert(Kind::kRandomShift == 0 || Kind::kRandomShift == 32 - kCut);
  if constexpr (Kind::kRandomShift != 0) return draws >> Kind::kRandomShift;
  return draws & Lanes::pattern(kCutBits);
}

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
  const auto random = random_bits<Lanes, Kind>(draws);
  const auto rounded = (magnitude + random) >> kCut;
  auto small = Lanes::where_zero(magnitude, zero, one);
  if constexpr (Kind::kSigned) {
    small = Lanes::where_less(Lanes::to_float(random) * scale.unit, value, one, zero);
  }
  auto code = Lanes::where_less(value, scale.threshold, small, rounded - scale.base);
  if (scale.all_nan) code = Lanes::pattern(Kind::kLargest);
  if constexpr (Kind::kSigned) code = code | ((bits >> 24) & Lanes::pattern(0x80U));
  return code;
}

/// 16 * code_base() in both halves of each lane: the upper half of a number's pattern is
/// 16 * (code + code_base()) with the sign in front.
template <class Lanes, class Kind>
inline typename Lanes::Bits base_of_halves(std::uint32_t exponent) {
  return Lanes::pattern((code_base<Kind>(exponent) * 16 & 0xffffU) * 0x10001U);
}

/// Expands the codes of a pair of vectors. `base`: base_of_halves().
template <class Lanes, class Kind>
inline Pair<Lanes> expand_codes(const std::uint8_t* codes, typename Lanes::Bits base) {
  auto halves = Lanes::template load_codes<Kind::kSigned>(codes) << 4;
  if constexpr (Kind::kSigned) halves = halves & Lanes::pattern(0x87f087f0U);
  return numbers_of_halves<Lanes>(Lanes::template add_where_coded<Kind>(halves, base));
}

/// Random bits of kBlock elements in pairs of vectors. The constants have stride 2.
template <class Lanes>
struct Draws {
  static constexpr std::size_t kVectors = kBlock / Lanes::kWidth;
  typename Lanes::Bits bits[kVectors];

  Draws(const DrawConstants<Lanes>& k, std::uint32_t element) {
    const auto start = k.counters + Lanes::pattern(element);
    for (std::size_t i = 0; i < kVectors; ++i) {
      const std::size_t before = i / 2 * 2 * Lanes::kWidth + i % 2;
      bits[i] = start + Lanes::pattern(static_cast<std::uint32_t>(before));
    }
    hash<Lanes>(k, bits);
  }
};

/// Compresses kBlock numbers, pair by pair.
template <class Lanes, class Kind>
inline void compress_each(const CodeScale<Lanes, Kind>& scale, const float* from,
                          const Draws<Lanes>& draws, std::uint8_t* codes) {
  const auto code_of = [&](std::size_t i) {
    return compress_code<Lanes, Kind>(scale, Lanes::load(from + i * Lanes::kWidth), draws.bits[i]);
  };
  for (std::size_t i = 0; i < Draws<Lanes>::kVectors; i += 2) {
    std::uint16_t both[Lanes::kWidth];
    Lanes::narrow(both, code_of(i) | (code_of(i + 1) << 8));
    __builtin_memcpy(codes + i * Lanes::kWidth, both, sizeof both);
  }
}

template <class Lanes, class Kind>
[[gnu::noinline, gnu::cold]] void compress_rare(std::uint32_t exponent, const float* from,
                                                Draws<Lanes> draws, std::uint8_t* codes) {
  compress_each(CodeScale<Lanes, Kind>(exponent), from, draws, codes);
}

/// Compresses to codes under one shared exponent.
template <class Lanes, class Kind>
class Compressor {
 public:
  explicit Compressor(std::uint32_t exponent)
      : exponent_(exponent), bases_(Lanes::pattern(code_base<Kind>(exponent) * 0x10001U)) {}

  /// Compresses kBlock numbers in pairs of vectors. Numbers below the smallest code and NaNs are
  /// rare and take a slower way.
  void compress(const float* from, const Draws<Lanes>& draws, std::uint8_t* codes) const {
    if constexpr (Lanes::kWidth > 1) {
      constexpr std::size_t kPairs = Draws<Lanes>::kVectors / 2;
      typename Lanes::Bits uppers[kPairs];
      for (std::size_t i = 0; i < kPairs; ++i) {
        const float* const pair = from + 2 * i * Lanes::kWidth;
        const auto even = rounded(pair, draws.bits[2 * i]);
        const auto odd = rounded(pair + Lanes::kWidth, draws.bits[2 * i + 1]);
        uppers[i] = Lanes::merge(even >> 16, odd);
      }
      const bool numbers = exponent_ != 255;
      if (numbers && Lanes::template store_codes<Kind>(bases_, uppers, codes)) return;
    }
    // A copy, because an object whose address a function gets cannot stay in registers.
    compress_rare<Lanes, Kind>(exponent_, from, Draws(draws), codes);
  }

 private:
  static typename Lanes::Bits rounded(const float* from, typename Lanes::Bits draws) {
    return Lanes::bits_of(Lanes::load(from)) + random_bits<Lanes, Kind>(draws);
  }

  std::uint32_t exponent_;
  typename Lanes::Bits bases_;  ///< code_base() in both halves
};

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

/// Compresses the moments of block `s` that the optimizer has, under their new shared exponents.
/// Each element has one draw for both moments. `first`, `second`: numbers in pairs of vectors.
template <class Lanes>
inline void compress_block(const DrawConstants<Lanes>& rounding, const Streams& s,
                           const float* first, const float* second) {
  auto* const first_codes = static_cast<std::uint8_t*>(s.first);
  auto* const second_codes = static_cast<std::uint8_t*>(s.second);
  const Compressor<Lanes, SignedCodes> compress_first(first_codes == nullptr ? kLowestExponent
                                                                             : *s.first_exponents);
  const Compressor<Lanes, UnsignedCodes> compress_second(
      second_codes == nullptr ? kLowestExponent : *s.second_exponents);
  for (std::size_t i = 0; i < kTile; i += kBlock) {
    const Draws<Lanes> draws(rounding, s.element + static_cast<std::uint32_t>(i));
    if (first_codes != nullptr) compress_first.compress(first + i, draws, first_codes + i);
    if (second_codes != nullptr) compress_second.compress(second + i, draws, second_codes + i);
  }
}

}  // namespace
}  // namespace ballast::cpu_adam
