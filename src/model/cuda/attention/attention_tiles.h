#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "ballast/core/dtype.h"

#include "src/device/cuda/tensor_core.h"
#include "src/device/cuda/warpgroup.h"
#include "src/model/cuda/attention/attention_places.h"

namespace ballast::model::cuda {

// Code shared by the bf16 attention kernels: tiles in shared memory, their products, and the copy
// back. A tile holds rows of one head, padded with zeros to kWidth columns. A warp owns 16 * kTiles
// rows of the result and processes all rows of the other side, so no two warps add to one sum. In a
// fragment (tensor_core.h), a lane has the rows lane_row() and lane_row() + 8, and the columns
// lane_column() and lane_column() + 1. Only sources of kernels include it.

/// Calls start(width, values, capped): the padded numbers of columns of a head of queries or keys
/// and of values, as std::integral_constants, and whether scores have a soft cap, as a
/// std::bool_constant.
template <class Start>
cudaError_t for_widths(const AttentionShape& shape, const Start& start) {
  const auto equal = [&](auto width, auto capped) { return start(width, width, capped); };
  constexpr std::integral_constant<int, 128> k128;
  constexpr std::integral_constant<int, 256> k256;
  if (shape.cap > 0.0) {
    // The heads of known models with caps have one of these widths.
    if (shape.head_dim <= 128) return equal(k128, std::true_type{});
    return equal(k256, std::true_type{});
  }
  constexpr std::false_type kUncapped;
  if (shape.head_dim <= 32) return equal(std::integral_constant<int, 32>{}, kUncapped);
  if (shape.head_dim <= 64) return equal(std::integral_constant<int, 64>{}, kUncapped);
  if (shape.head_dim <= 96) return equal(std::integral_constant<int, 96>{}, kUncapped);
  if (shape.head_dim <= 128) return equal(k128, kUncapped);
  // Latent attention of DeepSeek-V3 and Kimi K2.
  if (shape.head_dim <= 192 && shape.value_columns() <= 128) {
    return start(std::integral_constant<int, 192>{}, k128, kUncapped);
  }
  return equal(k256, kUncapped);
}

/// Row stride of a tile in elements, such that 16-byte parts of eight rows are in different banks.
template <int kWidth>
inline constexpr int kTileStep = kWidth + 8;
template <int kWidth>
inline constexpr std::size_t kTileRowBytes = kTileStep<kWidth> * sizeof(Bf16);

/// Sums for 16 * kTiles rows and kColumns columns.
template <int kTiles, int kColumns>
using Sums = float[kTiles][kColumns / 8][4];
/// Such a matrix in bf16, as the left operand of a product.
template <int kTiles, int kColumns>
using Weights = std::uint32_t[kTiles][kColumns / 16][4];

__device__ inline int lane_row() {
  return static_cast<int>(threadIdx.x % device::kWarp / 4);
}
__device__ inline int lane_column() {
  return static_cast<int>(threadIdx.x % 4 * 2);
}

/// Returns this lane's address for loading 16 rows and 16 columns that start at `from`. The order
/// of the 8 x 8 matrices is upper left, lower left, upper right, lower right.
template <int kWidth>
__device__ const Bf16* lane_part(const Bf16* from) {
  const int lane = static_cast<int>(threadIdx.x % device::kWarp);
  return from + lane % 16 * kTileStep<kWidth> + lane / 16 * 8;
}

/// Starts copying rows first .. first + kRows with kThreads threads; rows and columns after the end
/// become zeros.
template <int kWidth, int kRows, int kThreads>
__device__ void copy_rows(Bf16* tile, const AttentionRows<const Bf16>& rows, int first) {
  constexpr int kParts = std::bit_ceil(static_cast<unsigned>(kWidth / 8));  // 16 bytes each
  constexpr int kAtOnce = kThreads / kParts;
  static_assert(kThreads % kParts == 0 && kRows % kAtOnce == 0);
  const int column = static_cast<int>(threadIdx.x) % kParts * 8;
  const int row = static_cast<int>(threadIdx.x) / kParts;
  if (column >= kWidth) return;
  const int left = column < rows.size ? rows.length - first - row : 0;
  const Bf16* from = rows.start + static_cast<std::size_t>(first + row) * rows.step +
                     static_cast<std::size_t>(column);
  Bf16* const to = tile + row * kTileStep<kWidth> + column;
#pragma unroll
  for (int turn = 0; turn < kRows / kAtOnce; ++turn) {
    device::copy_ahead(to + turn * kAtOnce * kTileStep<kWidth>, from, turn * kAtOnce < left);
    from += std::size_t{kAtOnce} * rows.step;
  }
}

template <int kTiles, int kColumns>
__device__ void clear(Sums<kTiles, kColumns>& sums) {
#pragma unroll
  for (int m = 0; m < kTiles; ++m) {
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[m][n][i] = 0.0F;
    }
  }
}

/// sums = A B^T over kWidth columns. A: this warp's rows, starting at `a`. B: kColumns rows,
/// starting at `b`. Both addresses are lane_part()s.
template <int kWidth, int kTiles, int kColumns>
__device__ void multiply_rows(Sums<kTiles, kColumns>& sums, const Bf16* a, const Bf16* b) {
  clear<kTiles, kColumns>(sums);
#pragma unroll
  for (int k = 0; k < kWidth; k += 16) {
    std::uint32_t left[kTiles][4];
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
      device::load_matrices(left[m], a + 16 * m * kTileStep<kWidth> + k);
    }
#pragma unroll
    for (int n = 0; n < kColumns; n += 16) {
      std::uint32_t right[4];
      device::load_matrices(right, b + n * kTileStep<kWidth> + k);
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        device::multiply_add(sums[m][n / 8], left[m], {right[0], right[2]});
        device::multiply_add(sums[m][n / 8 + 1], left[m], {right[1], right[3]});
      }
    }
  }
}

/// sums += W B. B: kRows rows, starting at `b` (a lane_part()), with kColumns columns.
template <int kWidth, int kTiles, int kRows, int kColumns>
__device__ void add_product(Sums<kTiles, kColumns>& sums, const Weights<kTiles, kRows>& weights,
                            const Bf16* b) {
#pragma unroll
  for (int k = 0; k < kRows; k += 16) {
#pragma unroll
    for (int n = 0; n < kColumns; n += 16) {
      std::uint32_t right[4];
      device::load_matrices_transposed(right, b + k * kTileStep<kWidth> + n);
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        device::multiply_add(sums[m][n / 8], weights[m][k / 16], {right[0], right[1]});
        device::multiply_add(sums[m][n / 8 + 1], weights[m][k / 16], {right[2], right[3]});
      }
    }
  }
}

/// Replaces products of queries and keys by capped scores.
template <int kTiles, int kColumns>
__device__ void cap_scores(Sums<kTiles, kColumns>& scores, const SoftCap& cap) {
#pragma unroll
  for (int m = 0; m < kTiles; ++m) {
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[m][n][i] = cap.score(scores[m][n][i]);
    }
  }
}

/// Converts sums to the left operand of a product; the fragments have equal layouts.
template <int kTiles, int kColumns>
__device__ void to_weights(const Sums<kTiles, kColumns>& sums, Weights<kTiles, kColumns>& weights) {
#pragma unroll
  for (int m = 0; m < kTiles; ++m) {
#pragma unroll
    for (int k = 0; k < kColumns / 16; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* const two = sums[m][2 * k + i / 2] + i % 2 * 2;
        weights[m][k][i] = device::to_bf16_pair(two[0], two[1]);
      }
    }
  }
}

/// Sets elements to `hidden` if their query (row) does not see their key (column). `key` and
/// `query`: those of this lane's first element.
template <int kTiles, int kColumns>
__device__ void hide_unseen_keys(Sums<kTiles, kColumns>& sums, int key, int query,
                                 const SequenceMask& mask, float hidden) {
#pragma unroll
  for (int m = 0; m < kTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // Range of columns in this lane's row that its query sees.
      const int row = query + 16 * m + 8 * half;
      const int begin = mask.first_key(row) - key;
      const int end = row - key;
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int column = 8 * n + i;
          if (column > end || column < begin) sums[m][n][2 * half + i] = hidden;
        }
      }
    }
  }
}

/// Writes sums * factors to rows first .. of `to`, from column `column` on. There is a factor for
/// lane_row() and lane_row() + 8 of each 16 rows. Rows pass through `staging`, this warp's rows in
/// a tile that no other warp reads any more. Rows and columns after the end are skipped.
template <int kWidth, int kTiles, int kColumns>
__device__ void write_rows(const Sums<kTiles, kColumns>& sums, const float (&factors)[kTiles][2],
                           Bf16* staging, const AttentionRows<Bf16>& to, int first, int column) {
  __syncwarp();
#pragma unroll
  for (int m = 0; m < kTiles; ++m) {
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* const two = sums[m][n] + 2 * half;
        Bf16* const at = staging + (16 * m + 8 * half + lane_row()) * kTileStep<kWidth> + 8 * n;
        *reinterpret_cast<std::uint32_t*>(at + lane_column()) =
            device::to_bf16_pair(two[0] * factors[m][half], two[1] * factors[m][half]);
      }
    }
  }
  __syncwarp();
  constexpr int kParts = kColumns / 8;
  for (int at = static_cast<int>(threadIdx.x % device::kWarp); at < 16 * kTiles * kParts;
       at += static_cast<int>(device::kWarp)) {
    const int row = at / kParts;
    const int part = at % kParts * 8;
    if (first + row >= to.length || column + part >= to.size) continue;
    Bf16* const out = to.start + static_cast<std::size_t>(first + row) * to.step +
                      static_cast<std::size_t>(column + part);
    *reinterpret_cast<uint4*>(out) =
        *reinterpret_cast<const uint4*>(staging + row * kTileStep<kWidth> + part);
  }
}

/// Writes zeros to kRows rows first .. of `to`, from column `column` to the last one.
template <int kRows>
__device__ void write_zeros(const AttentionRows<Bf16>& to, int first, int column) {
  const int parts = (to.size - column) / 8;
  for (int at = static_cast<int>(threadIdx.x % device::kWarp); at < kRows * parts;
       at += static_cast<int>(device::kWarp)) {
    const int row = first + at / parts;
    if (row >= to.length) continue;
    Bf16* const out = to.start + static_cast<std::size_t>(row) * to.step +
                      static_cast<std::size_t>(column + at % parts * 8);
    *reinterpret_cast<uint4*>(out) = {};
  }
}

// The softmax of rows whose scores come tile by tile. Only sources of kernels include it.

/// State per row of a lane: the maximum score so far, and this lane's part of the sum of exp(score
/// - maximum).
template <int kTiles>
struct Softmax {
  float greatest[kTiles][2];
  float sum[kTiles][2];
};

template <int kTiles>
__device__ void clear(Softmax<kTiles>& softmax) {
#pragma unroll
  for (int i = 0; i < 2 * kTiles; ++i) {
    softmax.greatest[i / 2][i % 2] = -std::numeric_limits<float>::infinity();
    softmax.sum[i / 2][i % 2] = 0.0F;
  }
}

/// Combines the maximum or sum of a row over the four lanes that share it.
__device__ inline float greatest_of_row(float value) {
  value = fmaxf(value, __shfl_xor_sync(device::kAllLanes, value, 1));
  return fmaxf(value, __shfl_xor_sync(device::kAllLanes, value, 2));
}
__device__ inline float sum_of_row(float value) {
  value += __shfl_xor_sync(device::kAllLanes, value, 1);
  return value + __shfl_xor_sync(device::kAllLanes, value, 2);
}

/// Replaces scores by exp(scale * (score - maximum so far)); `corrections` takes earlier sums of
/// these to that maximum. A row that has seen no key yet has the maximum -infinity and sums of 0.
/// `scale` applies to exponents of base 2.
template <int kTiles, int kKeys>
__device__ void to_powers(Sums<kTiles, kKeys>& scores, Softmax<kTiles>& softmax, float scale,
                          float (&corrections)[kTiles][2]) {
#pragma unroll
  for (int m = 0; m < kTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float before = softmax.greatest[m][half];
      float greatest = before;
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
        greatest = fmaxf(greatest, fmaxf(scores[m][n][2 * half], scores[m][n][2 * half + 1]));
      }
      greatest = greatest_of_row(greatest);
      const bool none = greatest == -std::numeric_limits<float>::infinity();
      const float shift = none ? 0.0F : -scale * greatest;
      const float correction = device::power_of_two(__fmaf_rn(before, scale, shift));
      float sum = softmax.sum[m][half] * correction;
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i) {
          scores[m][n][i] = device::power_of_two(__fmaf_rn(scores[m][n][i], scale, shift));
          sum += scores[m][n][i];
        }
      }
      softmax.greatest[m][half] = greatest;
      softmax.sum[m][half] = sum;
      corrections[m][half] = correction;
    }
  }
}

template <int kTiles, int kWidth>
__device__ void rescale(Sums<kTiles, kWidth>& sums, const float (&corrections)[kTiles][2]) {
#pragma unroll
  for (int m = 0; m < kTiles; ++m) {
#pragma unroll
    for (int n = 0; n < kWidth / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[m][n][i] *= corrections[m][i / 2];
    }
  }
}

/// Completes the softmax: writes the logarithms of the sums and leaves 1 / sum in `factors`.
template <int kTiles>
__device__ void finish(const Softmax<kTiles>& softmax, float scale, int first_row, int length,
                       float* log_sums, float (&factors)[kTiles][2]) {
#pragma unroll
  for (int m = 0; m < kTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = sum_of_row(softmax.sum[m][half]);
      factors[m][half] = 1.0F / sum;
      const int row = first_row + 16 * m + 8 * half + lane_row();
      if (lane_column() == 0 && row < length) {
        log_sums[row] = __fmaf_rn(softmax.greatest[m][half], scale, logf(sum));
      }
    }
  }
}

/// Returns whether the GPU has products of warpgroups, and they have the head's extents. Kernels
/// with them have no soft cap.
inline bool warpgroups_fit(const AttentionShape& shape) {
  return has_kernels(shape) && shape.cap == 0.0 &&
         (shape.head_dim <= 64 ? shape.head_dim > 32 : shape.head_dim > 96) &&
         shape.head_dim <= 128 && device::has_warpgroup_products();
}
/// attention_backward() after gather_query_rows(), for shapes that fit.
cudaError_t backward_by_warpgroups(cudaStream_t stream, const AttentionShape& shape,
                                   const Bf16* qkv, const QueryRow* rows, const Bf16* dout,
                                   Bf16* dqkv);
/// attention() for shapes that fit.
cudaError_t forward_by_warpgroups(cudaStream_t stream, const AttentionShape& shape, const Bf16* qkv,
                                  Bf16* out, float* log_sums);

}  // namespace ballast::model::cuda
