#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "ballast/core/dtype.h"
#include "ballast/core/units.h"

struct CUstream_st;

namespace ballast::comm {

/// `out` = sum of `sources` (at least one), element by element: ((s0 + s1) + s2) + ... in fp32,
/// rounded to `type` (to nearest, ties to even) once. All are `bytes` long, a whole number of
/// elements. `out` may be one of the sources; otherwise nothing overlaps. A NaN in a source gives a
/// NaN with an unspecified payload.
void sum_in_order(std::span<const std::byte* const> sources, std::byte* out, Bytes bytes,
                  DType type);

/// Addresses of the terms of a sum in device memory.
struct SumTerms {
  const std::byte* own;     ///< term number `turn`
  const std::byte* others;  ///< any other term t is at others + t * distance
  Bytes distance;
  std::uint32_t turn;
  std::uint32_t count;
};

/// Loads the kernels onto the current device. Otherwise the first sum loads them, and may wait for
/// all work on the device, including collectives that wait for other ranks. Returns a cudaError_t.
int load_sum();

/// Enqueues sum_in_order of the terms on `stream`, whose device must be the calling thread's
/// current device. Writes `bytes` (whole pages) to `out`, which may be `own`. Returns a
/// cudaError_t.
int enqueue_sum(CUstream_st* stream, const SumTerms& terms, std::byte* out, Bytes bytes,
                DType type);

}  // namespace ballast::comm
