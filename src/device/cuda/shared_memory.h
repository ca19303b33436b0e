#pragma once

#include <cstddef>

#include <cuda_runtime_api.h>

namespace ballast::device {

/// Shared memory per block that needs no attribute.
inline constexpr std::size_t kFreelyShared = std::size_t{48} << 10U;

/// Allows blocks of `kernel` to use `bytes` of shared memory on the current device. Every launch
/// calls this; CUDA is called only when the limit of a kernel and device rises. Thread-safe.
cudaError_t allow_shared_memory(const void* kernel, std::size_t bytes);

// A matrix of bf16 in shared memory, as the products of warpgroups read it. It is cut into panels
// of 64 columns. A panel has all rows, each of 128 bytes, and the 16-byte part p of row r lies at
// part p ^ (r % 8).

/// Bytes to which panels are aligned.
inline constexpr std::size_t kPanelAlignment = 1024;
inline constexpr int kPanelColumns = 64;

/// Returns the place, in elements, of element (row, column) of a matrix whose panels have `rows`
/// rows. The elements of the same 16 bytes follow each other.
constexpr int panel_place(int rows, int row, int column) {
  const int part = column % kPanelColumns / 8;
  return (column / kPanelColumns * rows + row) * kPanelColumns + (part ^ row % 8) * 8 + column % 8;
}

}  // namespace ballast::device
