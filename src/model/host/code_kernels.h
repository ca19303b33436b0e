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

}  // namespace ballast::model::host::BALLAST_KERNEL_ISA
