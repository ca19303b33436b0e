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

/// `out` = ((first + s0) + s1) + ... in fp32 for `elements` elements, rounded to `type` once. The
/// sources have `term_type`, which is fp32 or `type`; `first` has `type`, or is null.
void add_in_order(const std::byte* first, std::span<const std::byte* const> sources, std::byte* out,
                  std::uint64_t elements, DType term_type, DType type);

/// Addresses of one member's part of the elements of an OrderedSum in device memory: in the
/// member's terms, and in received terms, by member and term.
struct OrderedTerms {
  const std::byte* first;  ///< null: none
  const std::byte* own;
  std::uint64_t own_distance;  ///< elements from one own term to the next
  const std::byte* received;
  std::uint64_t received_distance;
  std::uint32_t member;
  std::uint32_t members;
  std::uint32_t per_member;
  bool descending;
};

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

/// Enqueues add_in_order of `terms` in the order of an OrderedSum. Returns a cudaError_t.
int enqueue_ordered_sum(CUstream_st* stream, const OrderedTerms& terms, std::byte* out,
                        std::uint64_t elements, DType term_type, DType type);

}  // namespace ballast::comm
