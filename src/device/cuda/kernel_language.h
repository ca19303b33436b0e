#pragma once

#include <cstddef>
#include <cstdint>

#include <cuda_runtime.h>
#include <nv/target>

#include "src/device/cuda/shared_memory.h"

namespace ballast::device {

// What kernels are written in: CUDA C++ as far as <cuda_runtime.h> goes, launched by launch(), with
// shared memory whose size is known at run time from dynamic_shared(), and tensor_core.h. Tests
// compile the same kernels for the host, with headers of the same names (tests/support/emulation)
// that carry them out thread by thread: what is used here must be there. Only kernels' sources
// (*.cu) include it.

/// Threads of a warp.
inline constexpr unsigned kWarp = 32;
inline constexpr unsigned kAllLanes = 0xffffffffU;

struct Launch {
  cudaStream_t stream = nullptr;
  dim3 blocks = 1;
  unsigned threads = 1;  ///< of a block, at most 1024
  std::size_t shared_bytes = 0;
};

/// Enqueues `kernel`. Returns what the launch was answered; failures of the kernel itself come out
/// of the stream later.
template <class... Parameters, class... Arguments>
cudaError_t launch(const Launch& how, void (*kernel)(Parameters...), Arguments... arguments) {
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

/// Brings a kernel onto the GPU, which its first launch does else. Returns what that was answered.
template <class... Parameters>
cudaError_t load(void (*kernel)(Parameters...)) {
  cudaFuncAttributes attributes = {};
  return cudaFuncGetAttributes(&attributes, kernel);
}

/// Launch::shared_bytes of memory that the threads of a block share, aligned to 128 bytes.
template <class T>
__device__ T* dynamic_shared() {
  extern __shared__ __align__(128) unsigned char memory[];
  return reinterpret_cast<T*>(memory);
}

/// The 16 bytes at an address aligned to that.
__device__ inline uint4 load_16(const void* from) {
  return *static_cast<const uint4*>(from);
}
__device__ inline void store_16(void* to, const uint4& words) {
  *static_cast<uint4*>(to) = words;
}

/// Two bf16, `low` in the lower half, rounded as to_bf16 does it, but for which NaN a NaN becomes.
/// Source: NVIDIA, "PTX ISA 8.8", section 9.7.9.22 (cvt).
__device__ inline std::uint32_t to_bf16_pair(float low, float high) {
  std::uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// Arithmetic that is rounded once, as IEEE 754 has it, and that no compiler joins with its
// neighbours. Also for constexpr functions that kernels share with the host's code: those must not
// call what is there for the device alone.
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
