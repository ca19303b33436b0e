#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "ballast/core/dtype.h"
#include "ballast/core/units.h"

struct CUstream_st;

namespace ballast::comm {

/// `out` = the sum of `sources` (at least one), element by element: ((s0 + s1) + s2) + ... in fp32,
/// rounded to `type` (f32 or bf16: to nearest, ties to even) once. All are `bytes` long, a whole
/// number of elements. `out` may be one of the sources; apart from that nothing overlaps. A NaN in
/// a source is a NaN in `out`; which one is not said.
void sum_in_order(std::span<const std::byte* const> sources, std::byte* out, Bytes bytes,
                  DType type);

// The same on the CUDA device (nccl_sum.cu).

/// Where the terms of a sum lie in device memory.
struct SumTerms {
  const std::byte* own;     ///< the one whose turn is `turn`
  const std::byte* others;  ///< the t-th, except for that one, begins at others + t * distance
  Bytes distance;
  std::uint32_t turn;
  std::uint32_t count;
};

/// Loads the kernels onto the current device. Left to the first sum, that may wait for everything
/// on the device, and so for collectives that wait for other ranks. Returns a cudaError_t.
int load_sum();

/// sum_in_order of the terms of all ranks on the device: `out`, which may be `own`, gets
/// `bytes` bytes, whole pages. Enqueued on `stream`, whose device is the calling thread's current
/// one. Returns a cudaError_t.
int enqueue_sum(CUstream_st* stream, const SumTerms& terms, std::byte* out, Bytes bytes,
                DType type);

}  // namespace ballast::comm
