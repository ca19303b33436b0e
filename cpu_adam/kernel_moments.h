#pragma once

#include <cstddef>
#include <cstdint>

#include "ballast/core/units.h"

#include "cpu_adam/variant.h"

/// Compressed moments, tile by tile: expand to floats in the first-level cache, update with a fused
/// kernel, compress. README.md describes the codes. GPUs run the constexpr functions too
/// (src/update/cuda), as in the other headers.
namespace ballast::cpu_adam {
namespace {

constexpr std::size_t kTile = Codes::kBlock;

/// 32 random bits for each of kWidth elements from number `element` on: a keyed integer hash of the
/// counter, two rounds of xor-shift and multiply with constants found with Wellons'
/// hash-prospector (2018).
template <class Lanes>
constexpr typename Lanes::Bits draw(const std::uint32_t (&key)[2], std::uint32_t element) {
  auto x = Lanes::iota() + Lanes::pattern(element + key[0]);
  x = (x ^ (x >> 16)) * Lanes::pattern(0x21f0aaadU);
  x = (x ^ (x >> 15) ^ Lanes::pattern(key[1])) * Lanes::pattern(0xd35a2d97U);
  return x ^ (x >> 15);
}

/// Rounds to bf16 stochastically: up with a probability proportional to the bits that are cut off.
template <class Lanes>
constexpr typename Lanes::Bits round_to_bf16(typename Lanes::Float value,
                                             typename Lanes::Bits random) {
  const auto bits = Lanes::bits_of(value);
  const auto infinity = Lanes::pattern(0x7f800000U);
  const auto exponent = (bits & infinity) ^ infinity;
  const auto finite = bits + (random & Lanes::pattern(0xffffU));
  const auto special = Lanes::where_nan(value, bits | Lanes::pattern(0x400000U), bits);
  return Lanes::where_zero(exponent, special, finite) >> 16;
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
  auto bits = Lanes::where_zero(code, Lanes::pattern(0U), (code + base) << kCut);
  if constexpr (Kind::kSigned) bits = bits | ((byte & Lanes::pattern(0x80U)) << 24);
  return Lanes::number_of(bits);
}

template <class Lanes, class Kind>
inline void expand_codes(const std::uint8_t* codes, std::uint32_t exponent, float* to) {
  const auto base = Lanes::pattern(code_base<Kind>(exponent));
  for (std::size_t i = 0; i < kTile; i += Lanes::kWidth) {
    Lanes::store(to + i, expand_code<Lanes, Kind>(Lanes::widen8(codes + i), base));
  }
}

/// The shared exponent of a tile whose largest magnitude has this pattern: the exponent of the
/// magnitude rounded up. 255 for an infinity or a NaN.
constexpr std::uint32_t exponent_for(std::uint32_t largest) {
  const std::uint32_t exponent = (largest + ((1U << kCut) - 1)) >> 23;
  if (exponent < kLowestExponent) return kLowestExponent;
  return exponent > 255 ? 255 : exponent;
}

template <class Lanes>
inline std::uint32_t shared_exponent(const float* from) {
  auto largest = Lanes::pattern(0U);
  for (std::size_t i = 0; i < kTile; i += Lanes::kWidth) {
    const auto bits = Lanes::bits_of(Lanes::load(from + i));
    largest = Lanes::larger(largest, bits & Lanes::pattern(0x7fffffffU));
  }
  float lanes[Lanes::kWidth];
  Lanes::store(lanes, Lanes::number_of(largest));
  std::uint32_t bits = 0;
  for (const float lane : lanes) {
    const std::uint32_t other = __builtin_bit_cast(std::uint32_t, lane);
    bits = other > bits ? other : bits;
  }
  return exponent_for(bits);
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

template <class Lanes, class Kind>
inline void compress_codes(const float* from, std::uint32_t exponent, std::uint8_t* codes,
                           const std::uint32_t (&key)[2], std::uint32_t element) {
  const CodeScale<Lanes, Kind> scale(exponent);
  for (std::size_t i = 0; i < kTile; i += Lanes::kWidth) {
    const auto draws = draw<Lanes>(key, element + static_cast<std::uint32_t>(i));
    Lanes::narrow8(codes + i, compress_code<Lanes, Kind>(scale, Lanes::load(from + i), draws));
  }
}

/// A moment of a tile in floats, expanded from and compressed to codes.
template <class Lanes, class Kind>
struct BlockwiseTile {
  alignas(kCacheLine) float values[kTile];

  void expand(const std::uint8_t* codes, std::uint32_t exponent, std::size_t size) {
    if (size == kTile) return expand_codes<Lanes, Kind>(codes, exponent, values);
    std::uint8_t padded[kTile] = {};
    __builtin_memcpy(padded, codes, size);
    expand_codes<Lanes, Kind>(padded, exponent, values);
  }
  /// Writes the codes and returns the shared exponent.
  std::uint8_t compress(std::uint8_t* codes, std::size_t size, const std::uint32_t (&key)[2],
                        std::uint32_t element) const {
    const std::uint32_t exponent = shared_exponent<Lanes>(values);
    if (size == kTile) {
      compress_codes<Lanes, Kind>(values, exponent, codes, key, element);
    } else {
      std::uint8_t padded[kTile];
      compress_codes<Lanes, Kind>(values, exponent, padded, key, element);
      __builtin_memcpy(codes, padded, size);
    }
    return static_cast<std::uint8_t>(exponent);
  }
};

/// A moment of a tile in floats, expanded from and rounded to bf16.
template <class Lanes>
struct Bf16Tile {
  alignas(kCacheLine) float values[kTile];

  void expand(const std::uint16_t* from, std::size_t size) {
    std::uint16_t padded[kTile] = {};
    if (size < kTile) {
      __builtin_memcpy(padded, from, size * sizeof *from);
      from = padded;
    }
    for (std::size_t i = 0; i < kTile; i += Lanes::kWidth) {
      Lanes::store(values + i, Lanes::number_of(Lanes::widen(from + i) << 16));
    }
  }
  void compress(std::uint16_t* to, std::size_t size, const std::uint32_t (&key)[2],
                std::uint32_t element) const {
    std::uint16_t padded[kTile];
    std::uint16_t* target = size < kTile ? padded : to;
    for (std::size_t i = 0; i < kTile; i += Lanes::kWidth) {
      const auto random = draw<Lanes>(key, element + static_cast<std::uint32_t>(i));
      Lanes::narrow(target + i, round_to_bf16<Lanes>(Lanes::load(values + i), random));
    }
    if (size < kTile) __builtin_memcpy(to, padded, size * sizeof *to);
  }
};

inline void* forward(void* array, std::size_t bytes) {
  return array == nullptr ? nullptr : static_cast<std::byte*>(array) + bytes;
}

/// Weights and gradient of elements [start, start + size) of `all`. The caller sets the moments.
inline Streams tile_of(const Streams& all, std::size_t start, std::size_t size) {
  Streams tile = all;
  tile.main = forward(all.main, start * all.main_bytes);
  tile.remainder_or_copy = forward(all.remainder_or_copy, start * all.remainder_or_copy_bytes);
  tile.gradient = static_cast<const std::byte*>(all.gradient) + start * all.gradient_bytes;
  tile.size = size;
  tile.element = all.element + static_cast<std::uint32_t>(start);
  return tile;
}

/// Updates a tile with fp32 moments, some of whose elements have no weight decay.
inline void run_mixed(FusedKernel fused, const Coefficients& k, const Streams& tile) noexcept {
  constexpr std::size_t kStep = Shard::kDecayStep;
  const auto decays = [&](std::size_t at) { return ((tile.undecayed >> (at / kStep)) & 1U) == 0; };
  for (std::size_t start = 0; start < tile.size;) {
    std::size_t end = start + kStep;
    while (end < tile.size && decays(end) == decays(start)) end += kStep;
    if (end > tile.size) end = tile.size;
    Streams part = tile_of(tile, start, end - start);
    part.first = forward(tile.first, start * sizeof(float));
    part.second = forward(tile.second, start * sizeof(float));
    fused(decays(start) ? k : without_decay(k), part);
    start = end;
  }
}

template <class Lanes>
void run_bf16_first(FusedKernel fused, const Coefficients& k, const Streams& s) noexcept {
  Bf16Tile<Lanes> first;
  for (std::size_t start = 0; start < s.size; start += kTile) {
    const std::size_t size = s.size - start < kTile ? s.size - start : kTile;
    Streams tile = tile_of(s, start, size);
    auto* stored = static_cast<std::uint16_t*>(s.first) + start;
    first.expand(stored, size);
    tile.first = first.values;
    tile.second = forward(s.second, start * sizeof(float));
    fused(k, tile);
    first.compress(stored, size, k.draw_key, tile.element);
  }
}

template <class Lanes>
void run_blockwise8(FusedKernel fused, const Coefficients& k, const Streams& s) noexcept {
  BlockwiseTile<Lanes, SignedCodes> first;
  BlockwiseTile<Lanes, UnsignedCodes> second;
  for (std::size_t start = 0; start < s.size; start += kTile) {
    const std::size_t size = s.size - start < kTile ? s.size - start : kTile;
    const std::size_t block = start / kTile;
    Streams tile = tile_of(s, start, size);
    tile.first = first.values;
    tile.second = second.values;
    auto* first_codes = static_cast<std::uint8_t*>(forward(s.first, start));
    auto* second_codes = static_cast<std::uint8_t*>(forward(s.second, start));
    if (s.first != nullptr) first.expand(first_codes, s.first_exponents[block], size);
    if (s.second != nullptr) second.expand(second_codes, s.second_exponents[block], size);
    if (s.undecayed == 0) {
      fused(k, tile);
    } else {
      run_mixed(fused, k, tile);
    }
    if (s.first != nullptr) {
      s.first_exponents[block] = first.compress(first_codes, size, k.draw_key, tile.element);
    }
    if (s.second != nullptr) {
      s.second_exponents[block] = second.compress(second_codes, size, k.draw_key, tile.element);
    }
  }
}

}  // namespace
}  // namespace ballast::cpu_adam
