#pragma once

#include <cstddef>
#include <cstdint>

#include "src/device/cuda/kernel_language.h"
#include "src/device/cuda/shared_memory.h"

namespace ballast::device {

// Matrix products of a warpgroup (four consecutive warps, of which the first has a number divisible
// by 4), in which all its threads take part. They run asynchronously on matrices in shared memory.
// They exist on GPUs of compute capability 9.0 alone (Hopper); a kernel that uses them is started
// only where has_warpgroup_products(). Source: NVIDIA, "PTX ISA 8.8", sections 9.7.15.5.1 (layouts
// and descriptors of wgmma) and 9.7.15.5.2 (wgmma.mma_async).
//
// A result has 64 rows; warp w of the warpgroup has the rows 16 w to 16 w + 15, in the fragments of
// tensor_core.h: d[n] are the columns 8 n to 8 n + 7. Matrices in shared memory are cut into panels
// (shared_memory.h).

/// True if the current device can run the products, and this program has the code for it.
inline bool has_warpgroup_products() {
#if defined(BALLAST_WARPGROUP_PRODUCTS)
  int device = 0;
  int major = 0;
  int minor = 0;
  return cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
         cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) == cudaSuccess &&
         major == 9 && minor == 0;
#else
  return false;
#endif
}

/// A matrix operand in shared memory, as the instruction's descriptor.
struct SharedOperand {
  std::uint64_t bits;
};

__device__ inline SharedOperand shared_operand(const void* start, std::uint32_t panel_bytes) {
  constexpr std::uint64_t kEightRows = 1024 / 16;
  constexpr std::uint64_t kSwizzleOf128Bytes = 1;
  const auto address = static_cast<std::uint32_t>(__cvta_generic_to_shared(start));
  return {(address & 0x3ffffU) >> 4U | std::uint64_t{panel_bytes >> 4U} << 16U | kEightRows << 32U |
          kSwizzleOf128Bytes << 62U};
}
/// An operand of 16 columns along which the product sums. A left one has at least 64 rows, a right
/// one a row for each column of the result. `start`: its first element's place.
__device__ inline SharedOperand operand_by_rows(const Bf16* start) {
  return shared_operand(start, 16);  // does not reach a second panel
}
/// A right operand of 16 rows along which the product sums, with the columns of the result.
/// `start`: its first element's place, in a row divisible by 8; `rows`: those of a panel.
__device__ inline SharedOperand operand_by_columns(const Bf16* start, int rows) {
  return shared_operand(start, static_cast<std::uint32_t>(rows * 128));
}

#define BALLAST_SUMS_1(d, n) "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
#define BALLAST_SUMS_4(d, n)                                                    \
  BALLAST_SUMS_1(d, n), BALLAST_SUMS_1(d, (n) + 1), BALLAST_SUMS_1(d, (n) + 2), \
      BALLAST_SUMS_1(d, (n) + 3)
#define BALLAST_NAMES_32                                                   \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define BALLAST_NAMES_64                                                               \
  BALLAST_NAMES_32                                                                     \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

/// Starts d = a b^T, or d += a b^T with `add`. Both operands are by rows.
__device__ inline void start_product(float (&d)[8][4], SharedOperand a, SharedOperand b, bool add) {
  NV_IF_ELSE_TARGET(
      NV_HAS_FEATURE_SM_90a,
      (asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
                    "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" BALLAST_NAMES_32
                    "}, %32, %33, p, 1, 1, 0, 0;\n}"
                    : BALLAST_SUMS_4(d, 0), BALLAST_SUMS_4(d, 4)
                    : "l"(a.bits), "l"(b.bits), "r"(static_cast<int>(add)));),
      (__trap();))
}
__device__ inline void start_product(float (&d)[16][4], SharedOperand a, SharedOperand b,
                                     bool add) {
  NV_IF_ELSE_TARGET(
      NV_HAS_FEATURE_SM_90a,
      (asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
                    "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" BALLAST_NAMES_64
                    "}, %64, %65, p, 1, 1, 0, 0;\n}"
                    : BALLAST_SUMS_4(d, 0), BALLAST_SUMS_4(d, 4), BALLAST_SUMS_4(d, 8),
                      BALLAST_SUMS_4(d, 12)
                    : "l"(a.bits), "l"(b.bits), "r"(static_cast<int>(add)));),
      (__trap();))
}

/// Starts d += a b. a: this warp's 16 rows and 16 columns as a fragment. b: by columns.
__device__ inline void start_product(float (&d)[8][4], const std::uint32_t (&a)[4],
                                     SharedOperand b) {
  NV_IF_ELSE_TARGET(
      NV_HAS_FEATURE_SM_90a,
      (asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" BALLAST_NAMES_32
                    "}, {%32, %33, %34, %35}, %36, 1, 1, 1, 1;"
                    : BALLAST_SUMS_4(d, 0), BALLAST_SUMS_4(d, 4)
                    : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits));),
      (__trap();))
}
__device__ inline void start_product(float (&d)[16][4], const std::uint32_t (&a)[4],
                                     SharedOperand b) {
  NV_IF_ELSE_TARGET(
      NV_HAS_FEATURE_SM_90a,
      (asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" BALLAST_NAMES_64
                    "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
                    : BALLAST_SUMS_4(d, 0), BALLAST_SUMS_4(d, 4), BALLAST_SUMS_4(d, 8),
                      BALLAST_SUMS_4(d, 12)
                    : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits));),
      (__trap();))
}

#undef BALLAST_SUMS_1
#undef BALLAST_SUMS_4
#undef BALLAST_NAMES_32
#undef BALLAST_NAMES_64

/// Comes before the first product after registers of sums or fragments were written.
__device__ inline void begin_products() {
  NV_IF_TARGET(NV_HAS_FEATURE_SM_90a, (asm volatile("wgmma.fence.sync.aligned;" ::: "memory");))
}
/// Ends a group of products.
__device__ inline void end_products() {
  NV_IF_TARGET(NV_HAS_FEATURE_SM_90a, (asm volatile("wgmma.commit_group.sync.aligned;" ::
                                                        : "memory");))
}
/// Waits until at most the `pending` youngest groups are incomplete.
template <int pending>
__device__ inline void await_products() {
  NV_IF_TARGET(NV_HAS_FEATURE_SM_90a,
               (asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending)
                             : "memory");))
}
/// Keeps the compiler from reading or writing the sums earlier than here.
template <int kParts>
__device__ inline void pin_sums(float (&d)[kParts][4]) {
#pragma unroll
  for (int i = 0; i < 4 * kParts; ++i) asm volatile("" : "+f"(d[i / 4][i % 4])::"memory");
}
/// Shows this thread's writes to shared memory to products that are started after a barrier.
__device__ inline void show_to_products() {
  NV_IF_TARGET(NV_PROVIDES_SM_90, (asm volatile("fence.proxy.async.shared::cta;" ::: "memory");))
}

}  // namespace ballast::device
