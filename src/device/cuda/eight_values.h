#pragma once

#include <cstdint>

#include "ballast/core/dtype.h"

#include "src/device/cuda/kernel_language.h"

namespace ballast::device {

// Memory access of kernels over rows: a thread reads and writes neighbouring elements (float, Bf16
// or F16) in accesses of 16 bytes and computes in fp32. Also sums over the threads of a warp or a
// block, in a fixed order.

/// Elements that a thread usually reads and writes at once, for any type.
inline constexpr unsigned kEight = 8;

/// Elements per 16-byte access.
template <class T>
inline constexpr unsigned kOneAccess = sizeof(uint4) / sizeof(T);

/// `count` elements in their memory format.
template <class T, unsigned count>
struct Packed {
  static_assert(count % kOneAccess<T> == 0);
  uint4 words[count / kOneAccess<T>] = {};
};
template <class T>
using Eight = Packed<T, kEight>;

/// read() and write() need addresses aligned to 16 bytes.
template <unsigned count = kEight, class T>
__device__ inline Packed<T, count> read(const T* from) {
  Packed<T, count> packed;
  for (unsigned i = 0; i < count / kOneAccess<T>; ++i) {
    packed.words[i] = load_16(from + i * kOneAccess<T>);
  }
  return packed;
}
template <class T, unsigned count>
__device__ inline void write(const Packed<T, count>& packed, T* to) {
  for (unsigned i = 0; i < count / kOneAccess<T>; ++i) {
    store_16(to + i * kOneAccess<T>, packed.words[i]);
  }
}

template <unsigned count>
__device__ inline void widen(const Packed<float, count>& packed, float (&values)[count]) {
  for (unsigned i = 0; i < count / 4; ++i) {
    values[4 * i] = __uint_as_float(packed.words[i].x);
    values[4 * i + 1] = __uint_as_float(packed.words[i].y);
    values[4 * i + 2] = __uint_as_float(packed.words[i].z);
    values[4 * i + 3] = __uint_as_float(packed.words[i].w);
  }
}
template <unsigned count>
__device__ inline void widen(const Packed<Bf16, count>& packed, float (&values)[count]) {
  for (unsigned i = 0; i < count / 8; ++i) {
    const uint4& word = packed.words[i];
    const std::uint32_t pairs[4] = {word.x, word.y, word.z, word.w};
    for (unsigned j = 0; j < 4; ++j) {
      values[8 * i + 2 * j] = __uint_as_float(pairs[j] << 16U);
      values[8 * i + 2 * j + 1] = __uint_as_float(pairs[j] & 0xffff0000U);
    }
  }
}
template <unsigned count>
__device__ inline void widen(const Packed<F16, count>& packed, float (&values)[count]) {
  for (unsigned i = 0; i < count / 8; ++i) {
    const uint4& word = packed.words[i];
    const std::uint32_t pairs[4] = {word.x, word.y, word.z, word.w};
    for (unsigned j = 0; j < 4; ++j) {
      values[8 * i + 2 * j] = from_half(static_cast<std::uint16_t>(pairs[j]));
      values[8 * i + 2 * j + 1] = from_half(static_cast<std::uint16_t>(pairs[j] >> 16U));
    }
  }
}
template <class T, unsigned count>
__device__ inline void read(const T* from, float (&values)[count]) {
  widen(read<count>(from), values);
}

template <unsigned count>
__device__ inline void narrow(const float (&values)[count], Packed<float, count>& packed) {
  for (unsigned i = 0; i < count / 4; ++i) {
    packed.words[i] = {__float_as_uint(values[4 * i]), __float_as_uint(values[4 * i + 1]),
                       __float_as_uint(values[4 * i + 2]), __float_as_uint(values[4 * i + 3])};
  }
}
template <unsigned count>
__device__ inline void narrow(const float (&values)[count], Packed<Bf16, count>& packed) {
  for (unsigned i = 0; i < count / 8; ++i) {
    const float* const eight = values + 8 * i;
    packed.words[i] = {to_bf16_pair(eight[0], eight[1]), to_bf16_pair(eight[2], eight[3]),
                       to_bf16_pair(eight[4], eight[5]), to_bf16_pair(eight[6], eight[7])};
  }
}
template <unsigned count>
__device__ inline void narrow(const float (&values)[count], Packed<F16, count>& packed) {
  const auto pair = [&values](unsigned at) {
    return to_half(values[at]) | static_cast<std::uint32_t>(to_half(values[at + 1])) << 16U;
  };
  for (unsigned i = 0; i < count / 8; ++i) {
    packed.words[i] = {pair(8 * i), pair(8 * i + 2), pair(8 * i + 4), pair(8 * i + 6)};
  }
}
/// Writes the values rounded to T.
template <class T, unsigned count>
__device__ inline void write(const float (&values)[count], T* to) {
  Packed<T, count> packed;
  narrow(values, packed);
  write(packed, to);
}

__device__ inline float widen(float value) {
  return value;
}
__device__ inline float widen(Bf16 value) {
  return to_float(value);
}
__device__ inline float widen(F16 value) {
  return from_half(value.bits);
}
__device__ inline void narrow(float from, float& to) {
  to = from;
}
__device__ inline void narrow(float from, Bf16& to) {
  to = to_bf16(from);
}
__device__ inline void narrow(float from, F16& to) {
  to.bits = to_half(from);
}

/// Returns the sum over the lanes of a warp, with the same bits in each.
template <class T>
__device__ inline T warp_sum(T value) {
  for (int step = kWarp / 2; step > 0; step /= 2) value += __shfl_xor_sync(kAllLanes, value, step);
  return value;
}

/// Replaces each of `values` by its sum over the threads of the block, which are whole warps, with
/// the same bits in each thread. `shared` [count * kWarp] must differ from the previous sum's,
/// which some threads may still read.
template <class T, unsigned count>
__device__ inline void block_sum(T (&values)[count], T* shared) {
  const unsigned lane = threadIdx.x % kWarp;
  for (unsigned i = 0; i < count; ++i) {
    values[i] = warp_sum(values[i]);
    if (lane == 0) shared[i * kWarp + threadIdx.x / kWarp] = values[i];
  }
  __syncthreads();
  for (unsigned i = 0; i < count; ++i) {
    values[i] = warp_sum(lane < blockDim.x / kWarp ? shared[i * kWarp + lane] : T(0));
  }
}

}  // namespace ballast::device
