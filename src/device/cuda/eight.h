#pragma once

#include <cstdint>

#include "ballast/core/dtype.h"

#include "src/device/cuda/kernel_language.h"

namespace ballast::device {

// What kernels over rows do with memory: a thread reads and writes eight neighbouring elements at
// once, float or Bf16, and computes with them in fp32. And sums over the threads of a warp or a
// block, whose order is fixed.

/// Elements that a thread reads and writes at once.
inline constexpr unsigned kEight = 8;

/// Eight elements as they lie in memory.
template <class T>
struct Eight {
  uint4 words[kEight * sizeof(T) / sizeof(uint4)] = {};
};

/// `from` is aligned to 16 bytes.
template <class T>
__device__ inline Eight<T> read(const T* from) {
  Eight<T> eight;
  for (unsigned i = 0; i < sizeof(Eight<T>) / sizeof(uint4); ++i) {
    eight.words[i] = load_16(from + i * (sizeof(uint4) / sizeof(T)));
  }
  return eight;
}
template <class T>
__device__ inline void write(const Eight<T>& eight, T* to) {
  for (unsigned i = 0; i < sizeof(Eight<T>) / sizeof(uint4); ++i) {
    store_16(to + i * (sizeof(uint4) / sizeof(T)), eight.words[i]);
  }
}

__device__ inline void widen(const Eight<float>& eight, float (&values)[kEight]) {
  for (unsigned i = 0; i < 2; ++i) {
    values[4 * i] = __uint_as_float(eight.words[i].x);
    values[4 * i + 1] = __uint_as_float(eight.words[i].y);
    values[4 * i + 2] = __uint_as_float(eight.words[i].z);
    values[4 * i + 3] = __uint_as_float(eight.words[i].w);
  }
}
__device__ inline void widen(const Eight<Bf16>& eight, float (&values)[kEight]) {
  const std::uint32_t pairs[4] = {eight.words[0].x, eight.words[0].y, eight.words[0].z,
                                  eight.words[0].w};
  for (unsigned i = 0; i < 4; ++i) {
    values[2 * i] = __uint_as_float(pairs[i] << 16U);
    values[2 * i + 1] = __uint_as_float(pairs[i] & 0xffff0000U);
  }
}
/// widen(read(from)).
template <class T>
__device__ inline void read(const T* from, float (&values)[kEight]) {
  widen(read(from), values);
}

__device__ inline void narrow(const float (&values)[kEight], Eight<float>& eight) {
  for (unsigned i = 0; i < 2; ++i) {
    eight.words[i] = {__float_as_uint(values[4 * i]), __float_as_uint(values[4 * i + 1]),
                      __float_as_uint(values[4 * i + 2]), __float_as_uint(values[4 * i + 3])};
  }
}
__device__ inline void narrow(const float (&values)[kEight], Eight<Bf16>& eight) {
  eight.words[0] = {to_bf16_pair(values[0], values[1]), to_bf16_pair(values[2], values[3]),
                    to_bf16_pair(values[4], values[5]), to_bf16_pair(values[6], values[7])};
}
/// Writes the values, rounded to T.
template <class T>
__device__ inline void write(const float (&values)[kEight], T* to) {
  Eight<T> eight;
  narrow(values, eight);
  write(eight, to);
}

__device__ inline float widen(float value) {
  return value;
}
__device__ inline float widen(Bf16 value) {
  return to_float(value);
}
__device__ inline void narrow(float from, float& to) {
  to = from;
}
__device__ inline void narrow(float from, Bf16& to) {
  to = to_bf16(from);
}

/// The sum over the lanes of a warp, with the same bits in each.
template <class T>
__device__ inline T warp_sum(T value) {
  for (int step = kWarp / 2; step > 0; step /= 2) value += __shfl_xor_sync(kAllLanes, value, step);
  return value;
}

/// Turns each of `values` into its sum over the threads of the block, which are whole warps, with
/// the same bits in each thread. `shared` [count * kWarp] may not be that of the sum before this
/// one, which some threads may still read.
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
