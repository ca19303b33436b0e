#pragma once

#include <cstdint>

#include "src/device/cuda/kernel_language.h"

namespace ballast::device {

// PTX matrix instructions of a warp, in which all lanes take part, and asynchronous copies.
// Products of bf16 and the copies need compute capability 8.0; kernels that use them are not run on
// older GPUs (cuda_device.cpp), although they are compiled for them. Source: NVIDIA, "PTX ISA 8.8",
// sections 9.7.14.5.8 (mma.m16n8k16), 9.7.14.5.15 (ldmatrix) and 9.7.9.25.3 (cp.async). Fragments,
// with g = lane / 4 and t = lane % 4, two bf16 to a register, the lower column (or row, of B) in
// the lower half:
//   A [16, 16]: a[0] = (g, 2t..), a[1] = (g + 8, 2t..), a[2] = (g, 2t + 8..), a[3] = (g + 8, 2t +
//   8..)
//   B [16, 8]:  b[0] = (2t.., g), b[1] = (2t + 8.., g)
//   C, D [16, 8], fp32: d[0] = (g, 2t), d[1] = (g, 2t + 1), d[2] = (g + 8, 2t), d[3] = (g + 8, 2t +
//   1)

/// d += A B, bf16 into fp32.
__device__ inline void multiply_add(float (&d)[4], const std::uint32_t (&a)[4],
                                    const std::uint32_t (&b)[2]) {
  NV_IF_ELSE_TARGET(
      NV_PROVIDES_SM_80,
      (asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, "
                    "%5, %6, %7}, "
                    "{%8, %9}, {%0, %1, %2, %3};"
                    : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                    : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));),
      (__trap();))
}

/// Loads four matrices [8, 8] of 16-bit elements from shared memory. Lane l passes the address of
/// row l % 8 (16 bytes, aligned) of matrix l / 8; r[m] gets the elements (g, 2t) and (g, 2t + 1) of
/// matrix m.
__device__ inline void load_matrices(std::uint32_t (&r)[4], const void* row) {
  const auto address = static_cast<std::uint32_t>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

/// Like load_matrices(), with each matrix transposed: r[m] gets the elements (2t, g) and (2t + 1,
/// g).
__device__ inline void load_matrices_transposed(std::uint32_t (&r)[4], const void* row) {
  const auto address = static_cast<std::uint32_t>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

/// Starts an asynchronous copy of 16 aligned bytes from global to shared memory. If `there` is
/// false, writes zeros and does not read `from`.
__device__ inline void copy_ahead(void* to_shared, const void* from, bool there = true) {
  NV_IF_ELSE_TARGET(
      NV_PROVIDES_SM_80,
      (asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                        static_cast<std::uint32_t>(__cvta_generic_to_shared(to_shared))),
                    "l"(from), "r"(there ? 16 : 0)
                    : "memory");),
      (__trap();))
}
/// Ends a group of this thread's copies.
__device__ inline void end_copies() {
  NV_IF_TARGET(NV_PROVIDES_SM_80, (asm volatile("cp.async.commit_group;" ::: "memory");))
}
/// Waits until at most the `pending` youngest groups of this thread are incomplete. Other threads
/// see the copied data after a barrier.
template <int pending>
__device__ inline void await_copies() {
  NV_IF_TARGET(NV_PROVIDES_SM_80, (asm volatile("cp.async.wait_group %0;" ::"n"(pending)
                                                : "memory");))
}

/// 2^x with a relative error below 2^-22; 0 for results below 2^-126. Section 9.7.3.21 (ex2).
__device__ inline float power_of_two(float x) {
  float power = 0.0F;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
}

}  // namespace ballast::device
