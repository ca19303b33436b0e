#pragma once

#include <cstddef>
#include <cstdint>

#include "ballast/core/dtype.h"
#include "ballast/core/units.h"

struct CUstream_st;

namespace ballast::comm {

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

/// sum_in_order (sum.h) of the terms of all ranks on the device: `out`, which may be `own`, gets
/// `bytes` bytes, whole pages. Enqueued on `stream`, whose device is the calling thread's current
/// one. Returns a cudaError_t.
int enqueue_sum(CUstream_st* stream, const SumTerms& terms, std::byte* out, Bytes bytes,
                DType type);

}  // namespace ballast::comm
