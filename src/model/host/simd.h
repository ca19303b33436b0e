#pragma once

// Vectors of one instruction set. Everything here and in *_kernels.h is compiled once per
// instruction set, so it is in a namespace of that name (BALLAST_KERNEL_ISA). It uses no inline
// functions of the standard library, because the linker would keep one copy for all instruction
// sets.

#include <cstddef>
#include <cstdint>

#include <xsimd/xsimd.hpp>

#include "ballast/core/dtype.h"

#include "src/model/host/kernel_tables.h"

namespace ballast::model::host::BALLAST_KERNEL_ISA {

using Size = std::size_t;

template <class A>
using Vec = xsimd::batch<A>;

template <class A>
inline constexpr Size kLanes = Vec<A>::size;

/// Compiler vectors, for conversions that xsimd 8 lacks: 16-bit floats, and float to double.
inline constexpr Size kFloats = kLanes<float>;
using Floats = float __attribute__((vector_size(4 * kFloats)));
using Words = std::uint32_t __attribute__((vector_size(4 * kFloats)));
using Halves = std::uint16_t __attribute__((vector_size(2 * kFloats)));

inline Words words_of(const Vec<float>& x) {
  static_assert(sizeof(Words) == sizeof(typename Vec<float>::register_type));
  return reinterpret_cast<Words>(x.data);
}

inline Vec<float> floats_of(Words words) {
  return Vec<float>(reinterpret_cast<typename Vec<float>::register_type>(words));
}

template <class T>
inline Words widen(const T* from) {
  Halves halves;
  static_assert(sizeof halves == kFloats * sizeof(T));
  __builtin_memcpy(&halves, from, sizeof halves);
  return __builtin_convertvector(halves, Words);
}

/// Rounds to nearest even; NaN stays a quiet NaN (like to_bf16()).
inline Words round_words(Words bits) {
  const Words rounded = (bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16;
  const Words quiet = (bits >> 16) | 0x40U;
  return (bits & 0x7fffffffU) > 0x7f800000U ? quiet : rounded;
}

/// The bits of to_f16().
inline Words round_to_half(Words bits) {
  const Words magnitude = bits & 0x7fffffffU;
  const Words normal = (magnitude + 0xfffU + ((magnitude >> 13) & 1U) - 0x38000000U) >> 13;
  const Words denormal =
      reinterpret_cast<Words>(reinterpret_cast<Floats>(magnitude) + 0.5F) - 0x3f000000U;
  const Words quiet = 0x7e00U | ((magnitude >> 13) & 0x3ffU);
  Words half = magnitude < 0x38800000U ? denormal : normal;
  half = magnitude >= 0x477ff000U ? Words{} + 0x7c00U : half;
  half = magnitude > 0x7f800000U ? quiet : half;
  return ((bits >> 16) & 0x8000U) | half;
}

inline Vec<float> load(const Bf16* from) {
  return floats_of(widen(from) << 16);
}
/// Like to_float(F16).
inline Vec<float> load(const F16* from) {
  const Words bits = widen(from);
  const Words magnitude = (bits & 0x7fffU) << 13;
  const Words fraction = bits & 0x3ffU;
  // This sum, 0.5 + fraction * 2^-24, is exact.
  const Words denormal =
      reinterpret_cast<Words>(reinterpret_cast<Floats>(fraction + 0x3f000000U) - 0.5F);
  const Words infinite =
      magnitude | (fraction == 0U ? Words{} + 0x7f800000U : Words{} + 0x7fc00000U);
  Words value = magnitude < 0x800000U ? denormal : magnitude + 0x38000000U;
  value = magnitude >= 0xf800000U ? infinite : value;
  return floats_of(((bits & 0x8000U) << 16) | value);
}
template <class A>
inline Vec<A> load(const A* from) {
  return Vec<A>::load_unaligned(from);
}

inline void store(Bf16* to, const Vec<float>& x) {
  const Halves halves = __builtin_convertvector(round_words(words_of(x)), Halves);
  __builtin_memcpy(static_cast<void*>(to), &halves, sizeof halves);
}
inline void store(F16* to, const Vec<float>& x) {
  const Halves halves = __builtin_convertvector(round_to_half(words_of(x)), Halves);
  __builtin_memcpy(static_cast<void*>(to), &halves, sizeof halves);
}
template <class A>
inline void store(A* to, const Vec<A>& x) {
  x.store_unaligned(to);
}

/// Tags for a whole vector of elements, and for the last `count` elements of a row.
struct Whole {};
struct Part {
  Size count;
};

template <class T>
inline Vec<Acc<T>> get(const T* from, Whole, Acc<T> = 0) {
  return load(from);
}
/// Loads a vector. Lanes after the row's end are `fill`.
template <class T>
inline Vec<Acc<T>> get(const T* from, Part part, Acc<T> fill = 0) {
  T row[kLanes<Acc<T>>] = {};
  __builtin_memcpy(static_cast<void*>(row), from, part.count * sizeof(T));
  alignas(64) Acc<T> lanes[kLanes<Acc<T>>];
  load(row).store_aligned(lanes);
  for (Size i = part.count; i < kLanes<Acc<T>>; ++i) lanes[i] = fill;
  return Vec<Acc<T>>::load_aligned(lanes);
}

template <class T>
inline void put(T* to, const Vec<Acc<T>>& x, Whole) {
  store(to, x);
}
template <class T>
inline void put(T* to, const Vec<Acc<T>>& x, Part part) {
  T lanes[kLanes<Acc<T>>];
  store(lanes, x);
  __builtin_memcpy(static_cast<void*>(to), lanes, part.count * sizeof(T));
}

/// Calls body(i, Whole or Part) for each vector of a row of `size` elements. The attribute makes
/// GCC inline functions such as exp(), around whose calls it would save all vectors.
template <class A, class Body>
[[gnu::flatten]] inline void for_row(Size size, const Body& body) {
  Size i = 0;
  for (; i + kLanes<A> <= size; i += kLanes<A>) body(i, Whole{});
  if (i < size) body(i, Part{size - i});
}

/// Starts to load the memory that a loop over a row needs some vectors later. The prefetchers of
/// CPUs stop at the ends of pages.
template <class T>
inline void load_ahead(const T* place) {
  constexpr Size kAhead = 2048;  // bytes
  __builtin_prefetch(reinterpret_cast<const char*>(place) + kAhead);
}

template <class A>
inline A sum_lanes(const Vec<A>& x) {
  alignas(64) A lanes[kLanes<A>];
  x.store_aligned(lanes);
  for (Size half = kLanes<A> / 2; half > 0; half /= 2) {
    for (Size i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}

template <class A>
inline A max_lanes(const Vec<A>& x) {
  alignas(64) A lanes[kLanes<A>];
  x.store_aligned(lanes);
  A best = lanes[0];
  for (Size i = 1; i < kLanes<A>; ++i) best = lanes[i] > best ? lanes[i] : best;
  return best;
}

}  // namespace ballast::model::host::BALLAST_KERNEL_ISA
