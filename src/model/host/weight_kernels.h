#pragma once

#include "src/model/host/simd.h"

namespace ballast::model::host::BALLAST_KERNEL_ISA {

using Codes = std::int8_t __attribute__((vector_size(kFloats)));
using Integers = std::int32_t __attribute__((vector_size(4 * kFloats)));

/// Scale of a block: NaN if a value is not finite, 0 if it would be 0 or denormal.
template <class T>
inline float scale_of(const T* block) {
  Words most = {};
  for (Size i = 0; i < kCodeBlock; i += kFloats) {
    // Compared as integers, magnitudes have the order of their values; inf and NaN are the largest.
    const Words bits = words_of(get(block + i, Whole{})) & 0x7fffffffU;
    most = bits > most ? bits : most;
  }
  std::uint32_t largest = 0;
  for (Size i = 0; i < kFloats; ++i) largest = most[i] > largest ? most[i] : largest;
  if (largest >= 0x7f800000U) return __builtin_nanf("");
  float magnitude;
  __builtin_memcpy(&magnitude, &largest, sizeof magnitude);
  const float scale = magnitude / 127.0F;
  return scale >= __FLT_MIN__ ? scale : 0.0F;
}

template <class T>
void encode(const T* values, Size blocks, std::int8_t* codes, float* scales) {
  for (Size b = 0; b < blocks; ++b, values += kCodeBlock, codes += kCodeBlock) {
    scales[b] = scale_of(values);
    if (!(scales[b] > 0.0F)) {
      __builtin_memset(codes, 0, kCodeBlock);
      continue;
    }
    const Vec<float> inverse(1.0F / scales[b]);
    for (Size i = 0; i < kCodeBlock; i += kFloats) {
      const auto nearest = xsimd::nearbyint_as_int(get(values + i, Whole{}) * inverse);
      const auto wide = reinterpret_cast<Integers>(nearest.data);
      const Codes narrow = __builtin_convertvector(wide, Codes);
      __builtin_memcpy(codes + i, &narrow, sizeof narrow);
    }
  }
}

template <class T>
void decode(const std::int8_t* codes, const float* scales, Size blocks, T* values) {
  for (Size b = 0; b < blocks; ++b, values += kCodeBlock, codes += kCodeBlock) {
    const Vec<float> scale(scales[b]);
    for (Size i = 0; i < kCodeBlock; i += kFloats) {
      Codes narrow;
      __builtin_memcpy(&narrow, codes + i, sizeof narrow);
      const Integers integers = __builtin_convertvector(narrow, Integers);
      const Floats wide = __builtin_convertvector(integers, Floats);
      const Vec<float> whole(reinterpret_cast<typename Vec<float>::register_type>(wide));
      put(values + i, whole * scale, Whole{});
    }
  }
}

/// Vectors of doubles, and of their bits.
using Reals = Vec<double>;
inline constexpr Size kReals = kLanes<double>;
using Bits = std::uint64_t __attribute__((vector_size(8 * kReals)));
using NarrowFloats = float __attribute__((vector_size(4 * kReals)));

inline Bits bits_of(const Reals& x) {
  return reinterpret_cast<Bits>(x.data);
}
inline Reals reals_of(Bits bits) {
  return Reals(reinterpret_cast<typename Reals::register_type>(bits));
}

/// Converts integers below 2^52, which are the low bits of a double in [2^52, 2^53).
inline Reals to_reals(Bits integers) {
  return reals_of(integers | 0x4330'0000'0000'0000U) - Reals(0x1p52);
}

/// ln x for a normal x in (0, 1). With x = 2^e m and m in [sqrt(1/2), sqrt(2)), ln m = 2 atanh(s)
/// is summed as a power series in s = (m - 1) / (m + 1).
inline Reals logarithm(const Reals& x) {
  constexpr std::uint64_t kRootOfHalf = 0x3fe6'a09e'667f'3bcdU;
  constexpr std::uint64_t kBias = 64;
  const Bits bits = bits_of(x);
  const Bits exponent = (bits - kRootOfHalf + (kBias << 52)) >> 52;  // e + kBias
  const Reals m = reals_of(bits - (exponent << 52) + (kBias << 52));
  const Reals s = (m - Reals(1.0)) / (m + Reals(1.0));
  const Reals square = s * s;
  Reals sum(1.0 / 21.0);
  for (int k = 19; k >= 1; k -= 2) sum = xsimd::fma(sum, square, Reals(1.0 / k));
  const Reals e = to_reals(exponent) - Reals(static_cast<double>(kBias));
  return xsimd::fma(e, Reals(0x1.62e42fefa39efp-1), Reals(2.0) * s * sum);
}

struct Circle {
  Reals cosine;
  Reals sine;
};

/// Cosine and sine of `angle`, about word / 2^32 of a circle, by Taylor series around the nearest
/// quarter.
inline Circle on_circle(const Reals& angle, Bits words) {
  const Bits quarter = (words + (1U << 29)) >> 30;
  const Reals n = to_reals(quarter);
  // Half of pi in two parts; n times the first part is exact.
  const Reals far = angle - n * Reals(0x1.921fb54442dp+0);
  const Reals x = far - n * Reals(0x1.8469898cc517p-48);
  const Reals square = x * x;
  Reals sine(1.0);
  Reals cosine(1.0);
  // 1 - x^2 / (1 2) (1 - x^2 / (3 4) (...)) for the cosine; the sine has a similar form.
  for (int k = 18; k >= 2; k -= 2) {
    cosine = xsimd::fnma(cosine, square * Reals(1.0 / (k * (k - 1))), Reals(1.0));
    sine = xsimd::fnma(sine, square * Reals(1.0 / (k * (k + 1))), Reals(1.0));
  }
  const Bits c = bits_of(cosine);
  const Bits s = bits_of(x * sine);
  const Bits odd = -(quarter & 1U);
  return {reals_of(((c & ~odd) | (s & odd)) ^ (((quarter + 1) & 2U) << 62)),
          reals_of(((s & ~odd) | (c & odd)) ^ ((quarter & 2U) << 62))};
}

/// philox() of core/random.h for kNormalGroups counters; word j of counter i is x[j][i]. The loops
/// over counters compile to vector code with products of 32 by 32 bits.
inline void philox_words(std::uint64_t key, std::uint64_t stream, std::uint64_t counter,
                         std::uint32_t (&x)[4][kNormalGroups]) {
  for (Size i = 0; i < kNormalGroups; ++i) {
    x[0][i] = static_cast<std::uint32_t>(counter + i);
    x[1][i] = static_cast<std::uint32_t>((counter + i) >> 32);
    x[2][i] = static_cast<std::uint32_t>(stream);
    x[3][i] = static_cast<std::uint32_t>(stream >> 32);
  }
  auto k0 = static_cast<std::uint32_t>(key);
  auto k1 = static_cast<std::uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    for (Size i = 0; i < kNormalGroups; ++i) {
      const std::uint64_t a = std::uint64_t{0xD2511F53U} * x[0][i];
      const std::uint64_t b = std::uint64_t{0xCD9E8D57U} * x[2][i];
      x[0][i] = static_cast<std::uint32_t>(b >> 32) ^ x[1][i] ^ k0;
      x[1][i] = static_cast<std::uint32_t>(b);
      x[2][i] = static_cast<std::uint32_t>(a >> 32) ^ x[3][i] ^ k1;
      x[3][i] = static_cast<std::uint32_t>(a);
    }
    k0 += 0x9E3779B9U;
    k1 += 0xBB67AE85U;
  }
}

inline Bits load_words(const std::uint32_t* from) {
  using Narrow = std::uint32_t __attribute__((vector_size(4 * kReals)));
  Narrow words;
  __builtin_memcpy(&words, from, sizeof words);
  return __builtin_convertvector(words, Bits);
}

/// Rounds to float. Marks in `doubt` the lanes that a relative error of 2^-40 could round
/// differently. The errors of the functions above and of the C library are below 2^-48.
inline NarrowFloats rounded(const Reals& x, Bits& doubt) {
  using Wide = double __attribute__((vector_size(8 * kReals)));
  const auto narrow = [](const Reals& value) {
    return __builtin_convertvector(reinterpret_cast<Wide>(value.data), NarrowFloats);
  };
  const NarrowFloats least = narrow(x * Reals(1.0 - 0x1p-40));
  const NarrowFloats most = narrow(x * Reals(1.0 + 0x1p-40));
  // Sets all bits of a lane that differs or is NaN.
  using Lanes = std::int64_t __attribute__((vector_size(8 * kReals)));
  doubt |= reinterpret_cast<Bits>(__builtin_convertvector(~(least == most), Lanes));
  return narrow(x);
}

/// Writes number k of lane i to out[4 i + k].
inline void interleave(const NarrowFloats (&numbers)[4], float* out) {
  float lanes[4][kReals];
  __builtin_memcpy(lanes, numbers, sizeof lanes);
  for (Size i = 0; i < kReals; ++i) {
    for (Size k = 0; k < 4; ++k) out[4 * i + k] = lanes[k][i];
  }
}

/// See KernelTable::normals.
inline Size normals(std::uint64_t seed, std::uint64_t stream, std::uint64_t group, double stddev,
                    float* out, Size* doubtful) {
  constexpr double kTurn = 2.0 * 3.141592653589793238462643383279502884;
  std::uint32_t words[4][kNormalGroups];
  philox_words(seed, stream, group, words);
  Size doubts = 0;
  for (Size first = 0; first < kNormalGroups; first += kReals) {
    NarrowFloats numbers[4];
    Bits doubt = {};
    for (Size pair = 0; pair < 4; pair += 2) {
      const Bits w1 = load_words(words[pair] + first);
      const Bits w2 = load_words(words[pair + 1] + first);
      const Reals u1 = (to_reals(w1) + Reals(0.5)) * Reals(0x1p-32);
      const Reals u2 = (to_reals(w2) + Reals(0.5)) * Reals(0x1p-32);
      const Reals radius = xsimd::sqrt(Reals(-2.0) * logarithm(u1));
      const Circle at = on_circle(Reals(kTurn) * u2, w2);
      numbers[pair] = rounded(Reals(stddev) * (radius * at.cosine), doubt);
      numbers[pair + 1] = rounded(Reals(stddev) * (radius * at.sine), doubt);
    }
    interleave(numbers, out + 4 * first);
    std::uint64_t lanes[kReals];
    __builtin_memcpy(lanes, &doubt, sizeof lanes);
    for (Size i = 0; i < kReals; ++i) {
      doubtful[doubts] = first + i;
      doubts += lanes[i] & 1U;
    }
  }
  return doubts;
}

}  // namespace ballast::model::host::BALLAST_KERNEL_ISA
