#pragma once

#include <cstddef>

namespace ballast::device {

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
