#pragma once

#include <cstddef>
#include <cstdint>

#include "src/device/cuda/warpgroup.h"
#include "src/model/cuda/attention/attention_tiles.h"

namespace ballast::model::cuda {

// Tiles of attention for products of warpgroups (warpgroup.h): rows of one head in panels of 64
// columns, padded with zeros to kWidth columns. A warpgroup owns 64 rows of the result. Its sums
// have the fragments of attention_tiles.h with 16 rows to a warp. Only sources of kernels include
// it.

inline constexpr int kWarpgroupRows = 64;
inline constexpr int kWarpgroupThreads = 128;
/// Rows and threads of a block.
inline constexpr int kOwn = 2 * kWarpgroupRows;
inline constexpr int kThreads = 2 * kWarpgroupThreads;

/// Returns the block's shared memory from the first address on at which a panel may begin.
__device__ inline Bf16* first_panel() {
  auto* const memory = device::dynamic_shared<std::byte>();
  const auto over = reinterpret_cast<std::uintptr_t>(memory) % device::kPanelAlignment;
  return reinterpret_cast<Bf16*>(over == 0 ? memory : memory + (device::kPanelAlignment - over));
}

/// Starts copying rows first .. first + kRows into panels of kRows rows with kThreads threads; rows
/// and columns after the end become zeros.
template <int kWidth, int kRows, int kThreads>
__device__ void copy_panels(Bf16* tile, const AttentionRows<const Bf16>& rows, int first) {
  constexpr int kParts = kWidth / 8;  // 16 bytes each
  constexpr int kAtOnce = kThreads / kParts;
  static_assert(kThreads % kParts == 0 && kRows % kAtOnce == 0 && kAtOnce % 8 == 0);
  const int column = static_cast<int>(threadIdx.x) % kParts * 8;
  const int row = static_cast<int>(threadIdx.x) / kParts;
  const int left = column < rows.size ? rows.length - first - row : 0;
  const Bf16* from = rows.start + static_cast<std::size_t>(first + row) * rows.step +
                     static_cast<std::size_t>(column);
  Bf16* const to = tile + device::panel_place(kRows, row, column);
#pragma unroll
  for (int turn = 0; turn < kRows / kAtOnce; ++turn) {
    device::copy_ahead(to + turn * kAtOnce * device::kPanelColumns, from, turn * kAtOnce < left);
    from += std::size_t{kAtOnce} * rows.step;
  }
}

/// Returns this warp's part of `panels` for write_rows(). No product may read the block's first
/// kOwn * kTileStep<kWidth> elements any more.
template <int kWidth>
__device__ Bf16* staging_rows(Bf16* panels) {
  return panels + static_cast<int>(threadIdx.x / device::kWarp) * 16 * kTileStep<kWidth>;
}

/// Waits for this block's copies, which products can then read.
__device__ inline void await_panels() {
  device::await_copies<0>();
  device::show_to_products();
  __syncthreads();
}

/// Starts sums = A B^T over kWidth columns. A: 64 rows from row `first` on of a tile of kRowsOfA.
/// B: all kColumns rows of a tile.
template <int kWidth, int kRowsOfA, int kColumns>
__device__ void start_rows(Sums<1, kColumns>& sums, const Bf16* a, int first, const Bf16* b) {
#pragma unroll
  for (int k = 0; k < kWidth; k += 16) {
    const int panel = k / device::kPanelColumns * device::kPanelColumns;
    const Bf16* const left = a + kRowsOfA * panel + first * device::kPanelColumns;
    device::start_product(sums[0], device::operand_by_rows(left + (k - panel)),
                          device::operand_by_rows(b + kColumns * panel + (k - panel)), k > 0);
  }
}

/// Starts sums += W B. B: all kRows rows of a tile.
template <int kWidth, int kRows>
__device__ void start_sums(Sums<1, kWidth>& sums, const Weights<1, kRows>& weights, const Bf16* b) {
#pragma unroll
  for (int k = 0; k < kRows; k += 16) {
    device::start_product(sums[0], weights[0][k / 16],
                          device::operand_by_columns(b + k * device::kPanelColumns, kRows));
  }
}

}  // namespace ballast::model::cuda
