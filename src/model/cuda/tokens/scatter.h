#pragma once

#include <cstddef>
#include <cstdint>

#include <cuda_runtime_api.h>

#include "src/model/cuda/rows/row_pieces.h"

namespace ballast::model::cuda {

// Sums of rows by token id, for kernels that use token ids (tokens.h).

/// Threads per block of kernels with one thread per token.
inline constexpr unsigned kTokenThreads = 256;

/// Whether `token` is one of [first, first + size).
__device__ inline bool is_in(std::int32_t token, std::size_t first, std::size_t size) {
  return token >= 0 && static_cast<std::size_t>(token) - first < size;
}

/// Adds a row times `scale` to `sum`.
template <class T>
__device__ void add_piece(float (&sum)[kOneAccess<T>], const Piece<T>& row, float scale = 1.0F) {
  float values[kOneAccess<T>];
  device::widen(row, values);
  for (unsigned i = 0; i < kOneAccess<T>; ++i) sum[i] += values[i] * scale;
}

/// A sum of rows: dy[i] * scale is added to row places[i] of `table`, if ids[i] - first is below
/// `size` and places[i] is not negative. Other ids add nothing. Equal ids have equal places.
template <class T>
struct Scatter {
  const std::int32_t* ids;
  const std::int32_t* places;
  const T* dy;
  float* table;
  std::size_t first = 0;
  std::size_t size;
  std::size_t width;
  float scale = 1.0F;
};

/// Adds the rows of `count` ids in the order of the ids. `links`: scratch memory for 2 * count
/// values. Equal ids are found by comparison, so the work grows with `count` times the number of
/// different ids. This is negligible compared with a model up to about 64k ids. dy is read once.
template <class T>
cudaError_t scatter(cudaStream_t stream, const Scatter<T>& sums, std::size_t count,
                    std::uint32_t* links);

}  // namespace ballast::model::cuda
