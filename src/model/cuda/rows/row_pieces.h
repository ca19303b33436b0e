#pragma once

#include <algorithm>
#include <cstddef>

#include "src/device/cuda/eight.h"
#include "src/device/cuda/kernel_language.h"

namespace ballast::model::cuda {

// Kernels that move or add whole rows. Each thread has one access of 16 bytes.

using device::kOneAccess;
using device::Packed;

/// Threads of a block that processes a part of a row.
inline constexpr unsigned kMostRowThreads = 128;

inline unsigned blocks_for(std::size_t items, unsigned per_block) {
  return static_cast<unsigned>((items + per_block - 1) / per_block);
}

/// A thread's part of a row.
template <class T>
using Piece = Packed<T, kOneAccess<T>>;

/// Launches one block per row and part of its columns, with one thread per piece.
template <class T>
device::LaunchConfig by_rows(cudaStream_t stream, std::size_t rows, std::size_t width) {
  const std::size_t pieces = width / kOneAccess<T>;
  const auto threads = static_cast<unsigned>(std::min<std::size_t>(
      (pieces + device::kWarp - 1) / device::kWarp * device::kWarp, kMostRowThreads));
  return {.stream = stream,
          .blocks = {static_cast<unsigned>(rows), blocks_for(pieces, threads)},
          .threads = threads};
}
/// Returns the thread's first column.
template <class T>
__device__ std::size_t own_column() {
  return (std::size_t{blockIdx.y} * blockDim.x + threadIdx.x) * kOneAccess<T>;
}

}  // namespace ballast::model::cuda
