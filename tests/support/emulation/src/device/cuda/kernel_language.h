#pragma once

// The compiler finds this file before the header of this name in src/ when tests compile kernels
// for the host.

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <type_traits>

#include <cuda_runtime_api.h>

#include "ballast/core/dtype.h"

#include "tests/support/emulation/approximate.h"
#include "tests/support/emulation/grid.h"
#include "tests/support/fake_stream.h"

#undef __shared__
#define __shared__ static thread_local
#undef __align__
#define __align__(n) alignas(n)
#undef __launch_bounds__
#if defined(__clang__)
#define __launch_bounds__(...)  // clang takes no template argument for the attribute
#else
/// Keeps the maximum of threads as the number of bytes before the function, one per warp, for
/// launch_bound().
#define __launch_bounds__(most, ...) \
  __attribute__((patchable_function_entry(((most) + 31) / 32, ((most) + 31) / 32)))
#endif
#undef __forceinline__
#define __forceinline__ inline

#define threadIdx (::ballast::test::emulation::here().thread)
#define blockIdx (::ballast::test::emulation::here().block)
#define blockDim (::ballast::test::emulation::here().threads)
#define gridDim (::ballast::test::emulation::here().blocks)

inline void __syncthreads() {
  ballast::test::emulation::meet_block();
}
inline int __syncthreads_or(int vote) {
  return ballast::test::emulation::any_in_block(vote != 0) ? 1 : 0;
}
inline void __syncwarp(unsigned mask = 0xffffffffU) {
  ballast::test::emulation::meet_warp(mask);
}
template <class T>
T __shfl_sync(unsigned mask, T value, int from) {
  return ballast::test::emulation::shuffle(mask, value, static_cast<unsigned>(from));
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int other) {
  return ballast::test::emulation::shuffle(mask, value,
                                           threadIdx.x % 32 ^ static_cast<unsigned>(other));
}
inline unsigned __ballot_sync(unsigned mask, bool vote) {
  unsigned votes = 0;
  ballast::test::emulation::exchange_all(mask, &vote, sizeof vote);
  for (unsigned lane = 0; lane < 32; ++lane) {
    if ((mask >> lane & 1U) == 0) continue;
    if (*static_cast<const bool*>(ballast::test::emulation::given_by(lane))) votes |= 1U << lane;
  }
  return votes;
}

inline float __fmaf_rn(float a, float b, float c) {
  return std::fma(a, b, c);
}
inline float __fadd_rn(float a, float b) {
  return a + b;
}
inline float __fsub_rn(float a, float b) {
  return a - b;
}
inline float __fmul_rn(float a, float b) {
  return a * b;
}
inline float __fdiv_rn(float a, float b) {
  return a / b;
}
inline float __fsqrt_rn(float a) {
  return std::sqrt(a);
}
inline float __expf(float a) {
  return ballast::test::emulation::quick_exponential(a);
}
inline float __fdividef(float a, float b) {
  return ballast::test::emulation::quick_quotient(a, b);
}
inline int __float2int_rn(float a) {
  return static_cast<int>(std::nearbyint(a));
}
/// 1 + number of the lowest set bit, or 0 if no bit is set.
inline int __ffs(int bits) {
  return __builtin_ffs(bits);
}
inline unsigned __float_as_uint(float a) {
  return std::bit_cast<unsigned>(a);
}
inline float __uint_as_float(unsigned a) {
  return std::bit_cast<float>(a);
}
/// Threads run one after the other.
template <class T>
[[gnu::no_sanitize_thread]] T atomicMin(T* at, T value) {
  ballast::test::emulation::change_atomically(at, sizeof value);
  const T before = *at;
  if (value < before) *at = value;
  return before;
}

namespace ballast::device {

inline constexpr unsigned kWarp = 32;
inline constexpr unsigned kAllLanes = 0xffffffffU;

struct LaunchConfig {
  cudaStream_t stream = nullptr;
  test::emulation::Dim3 blocks = 1;
  unsigned threads = 1;
  std::size_t shared_bytes = 0;
};

/// Runs the kernel in the order of the stream (fake_stream.h), with copies of the arguments.
template <class... Parameters, class... Arguments>
cudaError_t launch(const LaunchConfig& how, void (*kernel)(Parameters...), Arguments... arguments) {
  const auto* const address = reinterpret_cast<const void*>(kernel);
  const cudaError_t refusal =
      test::emulation::check_launch(address, how.blocks, how.threads, how.shared_bytes,
                                    (std::size_t{0} + ... + sizeof(std::decay_t<Parameters>)));
  if (refusal != cudaSuccess) return refusal;
  const std::tuple<std::decay_t<Parameters>...> given(static_cast<Parameters>(arguments)...);
  return test::launch_on_stream(how.stream, address, [how, kernel, address, given] {
    test::emulation::run_grid(address, how.blocks, how.threads, how.shared_bytes,
                              [&] { std::apply(kernel, given); });
  });
}

template <class... Parameters>
cudaError_t load(void (*kernel)(Parameters...)) {
  return test::load_kernel(reinterpret_cast<const void*>(kernel));
}

inline void expect_aligned_to_16(const void* address) {
  if (reinterpret_cast<std::uintptr_t>(address) % 16 == 0) return;
  test::emulation::fail("16 bytes that are not aligned to 16");
}
inline uint4 load_16(const void* from) {
  expect_aligned_to_16(from);
  uint4 words;
  std::memcpy(&words, from, sizeof words);
  return words;
}
inline void store_16(void* to, const uint4& words) {
  expect_aligned_to_16(to);
  std::memcpy(to, &words, sizeof words);
}

inline std::uint32_t to_bf16_pair(float low, float high) {
  return to_bf16(low).bits | std::uint32_t{to_bf16(high).bits} << 16U;
}

inline float from_half(std::uint16_t bits) {
  return to_float(F16{bits});
}
inline std::uint16_t to_half(float value) {
  return to_f16(value).bits;
}

template <class T>
T* dynamic_shared() {
  return static_cast<T*>(test::emulation::dynamic_memory());
}

inline float rounded_sum(float a, float b) {
  return a + b;
}
inline float rounded_difference(float a, float b) {
  return a - b;
}
inline float rounded_product(float a, float b) {
  return a * b;
}
inline float rounded_quotient(float a, float b) {
  return a / b;
}
inline float rounded_root(float a) {
  return std::sqrt(a);
}
inline float rounded_fma(float a, float b, float c) {
  return std::fma(a, b, c);
}

}  // namespace ballast::device
