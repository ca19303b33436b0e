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

/// Turns counters into random bits with a keyed integer hash: two rounds of xor-shift and multiply
/// with constants found with Wellons' hash-prospector (2018).
template <class Lanes, std::size_t kCount>
constexpr void hash_counters(const DrawConstants<Lanes>& k, typename Lanes::Bits (&x)[kCount]) {
  // Step by step for all vectors, because a CPU looks only some instructions ahead.
  for (auto& bits : x) bits = bits ^ (bits >> 16);
  for (auto& bits : x) bits = bits * k.first_factor;
  for (auto& bits : x) bits = bits ^ (bits >> 15) ^ k.key;
  for (auto& bits : x) bits = bits * k.second_factor;
  for (auto& bits : x) bits = bits ^ (bits >> 15);
}

/// 32 random bits for each of kCount * kWidth numbers from `first` on.
template <class Lanes, std::size_t kCount>
constexpr void draw(const DrawConstants<Lanes>& k, std::uint32_t first,
                    typename Lanes::Bits (&x)[kCount]) {
  const auto start = k.counters + Lanes::pattern(first);
  for (std::size_t i = 0; i < kCount; ++i) {
    x[i] = start + Lanes::pattern(static_cast<std::uint32_t>(i * Lanes::kWidth));
  }
  hash_counters(k, x);
}
template <class Lanes>
constexpr typename Lanes::Bits draw(const std::uint32_t (&key)[2], std::uint32_t first) {
  typename Lanes::Bits bits[1];
  draw<Lanes>(DrawConstants<Lanes>(key), first, bits);
  return bits[0];
}

/// Generators of a block's random bits. Element i of a block takes a number of generator
/// i % 32 / 2, so that the elements of a 32-bit lane share one. Generators are multiplicative and
/// congruential modulo 2^32. Each starts with a draw.
constexpr std::size_t kGenerators = kBlock / 2;

/// Powers of the generators' multiplier. For every two of the 16 numbers of a generator, the
/// shortest wave vector of the spectral test is at least 0.59 of the longest possible one, in all
/// bits and in the lower 20. README.md describes the test.
constexpr std::uint32_t multiplier_power(std::uint32_t exponent) {
  std::uint32_t power = 1;
  std::uint32_t square = 0x73b57cfdU;
  for (std::uint32_t bit = 1; bit < kTile / kGenerators; bit *= 2) {
    if ((exponent & bit) != 0) power *= square;
    square *= square;
  }
  return power;
}

/// The random bits of element `i` of the block that begins with element `start`.
template <class Lanes>
constexpr typename Lanes::Bits draw_in_block(const std::uint32_t (&key)[2], std::uint32_t start,
                                             std::uint32_t i) {
  const auto seed = draw<Lanes>(key, start + i % kBlock / 2);
  return seed * Lanes::pattern(multiplier_power(i / kBlock * 2 + i % 2));
}

/// The generators of a block, which draw for one row of kBlock elements after the other.
template <class Lanes>
class Generators {
  using Bits = typename Lanes::Bits;
  static constexpr std::size_t kVectors = kGenerators / Lanes::kWidth;

 public:
  Generators(const DrawConstants<Lanes>& k, std::uint32_t start) { draw<Lanes>(k, start, state_); }
  /// Draws for the next row, in pairs of vectors.
  void draw_row(Bits (&row)[2 * kVectors]) {
    for (std::size_t i = 0; i < kVectors; ++i) {
      row[2 * i] = state_[i];
      row[2 * i + 1] = state_[i] * multiplier_;
      state_[i] = state_[i] * square_;
    }
  }

 private:
  Bits state_[kVectors];
  Bits multiplier_ = Lanes::pattern(multiplier_power(1));
  Bits square_ = Lanes::pattern(multiplier_power(2));
};

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

/// A moment of a block, if the optimizer has it: numbers in pairs of vectors, and their codes.
template <class Kind>
struct BlockOfCodes {
  const float* numbers;
  std::uint8_t* codes;
  std::uint32_t exponent;

  BlockOfCodes(const float* from, void* to, const std::uint8_t* shared_exponent)
      : numbers(from),
        codes(static_cast<std::uint8_t*>(to)),
        exponent(to == nullptr ? kLowestExponent : *shared_exponent) {}
};

/// Compresses both moments of a block with one draw per element, in rows of kBlock elements.
template <class Lanes>
class BlockCompressor {
  using Bits = typename Lanes::Bits;
  using Row = Bits[kBlock / Lanes::kWidth];

 public:
  BlockCompressor(const DrawConstants<Lanes>& rounding, const Streams& s, const float* first,
                  const float* second)
      : rounding_(rounding),
        start_(s.element),
        first_(first, s.first, s.first_exponents),
        second_(second, s.second, s.second_exponents) {}

  /// Calls `other_work` with the index of each row's first element. Its instructions overlap with
  /// those of this function.
  void run(auto&& other_work) const {
    Generators<Lanes> generators(rounding_, start_);
    const Bases bases(*this);
    Bits lowest = highest();
    for (std::size_t i = 0; i < kTile; i += kBlock) {
      Row draws;
      generators.draw_row(draws);
      other_work(i);
      compress(bases, i, draws, lowest);
    }
    if (!right(lowest)) run_row_by_row();
  }

 private:
  struct Bases {
    Bits first, second;
    explicit Bases(const BlockCompressor& of)
        : first(Lanes::pattern(code_base<SignedCodes>(of.first_.exponent) * 0x10001U)),
          second(Lanes::pattern(code_base<UnsignedCodes>(of.second_.exponent) * 0x10001U)) {}
  };

  /// Codes that right() accepts.
  static Bits highest() { return Lanes::pattern(0x7f7f7f7fU); }

  /// Compresses the row from element `i` on. Codes of numbers below the smallest code and of NaNs
  /// are wrong, which right() finds. `lowest`: the lowest codes of several rows.
  void compress(const Bases& bases, std::size_t i, const Row& draws, Bits& lowest) const {
    if constexpr (Lanes::kWidth > 1) {
      compress(first_, bases.first, i, draws, lowest);
      compress(second_, bases.second, i, draws, lowest);
    }
  }
  template <class Kind>
  static void compress(const BlockOfCodes<Kind>& block, Bits bases, std::size_t i, const Row& draws,
                       Bits& lowest) {
    if (block.codes == nullptr) return;
    const auto rounded = [&](std::size_t vector) {
      const auto number = Lanes::load(block.numbers + i + vector * Lanes::kWidth);
      return Lanes::bits_of(number) + random_bits<Lanes, Kind>(draws[vector]);
    };
    Bits uppers[kBlock / Lanes::kWidth / 2];
    for (std::size_t pair = 0; pair < kBlock / Lanes::kWidth / 2; ++pair) {
      uppers[pair] = Lanes::merge(rounded(2 * pair) >> 16, rounded(2 * pair + 1));
    }
    Lanes::template store_codes<Kind>(bases, uppers, block.codes + i, lowest);
  }
  [[nodiscard]] bool right(Bits lowest) const {
    if constexpr (Lanes::kWidth > 1) {
      return first_.exponent != 255 && second_.exponent != 255 && Lanes::none_below_two(lowest);
    }
    return false;
  }

  /// Compresses numbers of any kind. Few blocks need it.
  [[gnu::noinline, gnu::cold]] void run_row_by_row() const {
    Generators<Lanes> generators(rounding_, start_);
    const Bases bases(*this);
    for (std::size_t i = 0; i < kTile; i += kBlock) {
      Row draws;
      generators.draw_row(draws);
      Bits lowest = highest();
      compress(bases, i, draws, lowest);
      if (right(lowest)) continue;
      compress_any(first_, i, draws);
      compress_any(second_, i, draws);
    }
  }
  template <class Kind>
  static void compress_any(const BlockOfCodes<Kind>& block, std::size_t i, const Row& draws) {
    if (block.codes == nullptr) return;
    const CodeScale<Lanes, Kind> scale(block.exponent);
    const auto code_of = [&](std::size_t vector) {
      const auto number = Lanes::load(block.numbers + i + vector * Lanes::kWidth);
      return compress_code<Lanes, Kind>(scale, number, draws[vector]);
    };
    for (std::size_t vector = 0; vector < kBlock / Lanes::kWidth; vector += 2) {
      std::uint16_t both[Lanes::kWidth];
      Lanes::narrow(both, code_of(vector) | (code_of(vector + 1) << 8));
      __builtin_memcpy(block.codes + i + vector * Lanes::kWidth, both, sizeof both);
    }
  }

  const DrawConstants<Lanes>& rounding_;
  std::uint32_t start_;
  BlockOfCodes<SignedCodes> first_;
  BlockOfCodes<UnsignedCodes> second_;
};

}  // namespace
}  // namespace ballast::cpu_adam
