#pragma once

#include <cstddef>
#include <cstdint>

#include <cuda_runtime.h>
#include <nv/target>

#include "ballast/core/dtype.h"

#include "src/device/cuda/shared_memory.h"

namespace ballast::device {

// The language of kernels: CUDA C++ of <cuda_runtime.h>, launch(), dynamic_shared() and
// tensor_core.h. Tests compile the kernels for the host with headers of the same names
// (tests/support/emulation), which run them thread by thread and must offer the same functions.
// Only kernels (*.cu) include this file.

inline constexpr unsigned kWarp = 32;
inline constexpr unsigned kAllLanes = 0xffffffffU;

struct LaunchConfig {
  cudaStream_t stream = nullptr;
  dim3 blocks = 1;
  unsigned threads = 1;  ///< threads per block, at most 1024
  std::size_t shared_bytes = 0;
};

/// Enqueues `kernel` and returns the status of the launch; the stream reports failures of the
/// kernel later.
template <class... Parameters, class... Arguments>
cudaError_t launch(const LaunchConfig& how, void (*kernel)(Parameters...), Arguments... arguments) {
  if (how.shared_bytes > kFreelyShared) {
    const cudaError_t allowed =
        allow_shared_memory(reinterpret_cast<const void*>(kernel), how.shared_bytes);
    if (allowed != cudaSuccess) return allowed;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = how.blocks;
  config.blockDim = how.threads;
  config.dynamicSmemBytes = how.shared_bytes;
  config.stream = how.stream;
  return cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);
}

/// Loads a kernel onto the GPU, which otherwise happens at its first launch.
template <class... Parameters>
cudaError_t load(void (*kernel)(Parameters...)) {
  cudaFuncAttributes attributes = {};
  return cudaFuncGetAttributes(&attributes, kernel);
}

/// Returns the shared memory of a block (LaunchConfig::shared_bytes), aligned to 128 bytes.
template <class T>
__device__ T* dynamic_shared() {
  extern __shared__ __align__(128) unsigned char memory[];
  return reinterpret_cast<T*>(memory);
}

/// Both addresses are aligned to 16 bytes.
__device__ inline uint4 load_16(const void* from) {
  return *static_cast<const uint4*>(from);
}
__device__ inline void store_16(void* to, const uint4& words) {
  *static_cast<uint4*>(to) = words;
}

// Conversions. Source: NVIDIA, "PTX ISA 8.8", section 9.7.9.22 (cvt).

/// Returns two bf16, `low` in the lower half, rounded like to_bf16() except for the bits of a NaN.
__device__ inline std::uint32_t to_bf16_pair(float low, float high) {
  std::uint32_t pair;
  NV_IF_ELSE_TARGET(NV_PROVIDES_SM_80,
                    (asm("cvt.rn.bf16x2.f32 %0, %1, %2;"
                         : "=r"(pair)
                         : "f"(high), "f"(low));),
                    (pair = to_bf16(low).bits | std::uint32_t{to_bf16(high).bits} << 16U;))
  return pair;
}
/// Returns the value of an IEEE binary16, including denormals.
__device__ inline float from_half(std::uint16_t bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}
/// Returns an IEEE binary16, rounded like to_f16() except for the bits of a NaN.
__device__ inline std::uint16_t to_half(float value) {
  std::uint16_t bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

// IEEE 754 arithmetic that the compiler does not fuse, also in constexpr functions that kernels
// share with host code and that therefore must not call device-only functions.
__host__ __device__ inline float rounded_sum(float a, float b) {
  NV_IF_ELSE_TARGET(NV_IS_DEVICE, (return __fadd_rn(a, b);), (return a + b;))
}
__host__ __device__ inline float rounded_difference(float a, float b) {
  NV_IF_ELSE_TARGET(NV_IS_DEVICE, (return __fsub_rn(a, b);), (return a - b;))
}
__host__ __device__ inline float rounded_product(float a, float b) {
  NV_IF_ELSE_TARGET(NV_IS_DEVICE, (return __fmul_rn(a, b);), (return a * b;))
}
__host__ __device__ inline float rounded_quotient(float a, float b) {
  NV_IF_ELSE_TARGET(NV_IS_DEVICE, (return __fdiv_rn(a, b);), (return a / b;))
}
__host__ __device__ inline float rounded_root(float a) {
  NV_IF_ELSE_TARGET(NV_IS_DEVICE, (return __fsqrt_rn(a);), (return sqrtf(a);))
}
/// a * b + c
__host__ __device__ inline float rounded_fma(float a, float b, float c) {
  NV_IF_ELSE_TARGET(NV_IS_DEVICE, (return __fmaf_rn(a, b, c);), (return fmaf(a, b, c);))
}

}  // namespace ballast::device
