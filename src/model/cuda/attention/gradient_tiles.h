#pragma once

#include <cstddef>

#include "src/model/cuda/attention/attention_tiles.h"

namespace ballast::model::cuda {

// Code shared by the kernels of the backward pass in bf16. Only sources of kernels include it.

/// Two matrices with corresponding rows: queries and dout, or keys and values.
struct MatrixPair {
  AttentionRows<const Bf16> first;
  AttentionRows<const Bf16> second;
};

/// Queries that a block of keys processes in one step. The block loops over the heads that share
/// the keys and, for each head, over the queries that see any of the keys.
struct Queries {
  int head;
  int first;  ///< position

  /// Returns those of the next step, of `step` queries, for the keys from first_key to end_key.
  [[nodiscard]] __device__ Queries after(int step, int first_key, int end_key,
                                         const SequenceMask& mask) const {
    const int next = first + step;
    // Later queries do not see these keys either.
    if (next >= mask.length || mask.first_key(next) >= end_key) return {head + 1, first_key};
    return {head, next};
  }
};

// In shared memory two neighbouring QueryRows are 16 bytes, copied at once. kPairStep is the
// distance between such pairs, in QueryRows.

/// Returns the place of this lane's first column.
template <int kPairStep = 2>
__device__ const QueryRow* rows_of_lane(const QueryRow* rows) {
  return rows + lane_column() / 2 * kPairStep;
}

/// Starts copying the queries' rows.
template <int kStep, int kPairStep = 2>
__device__ void copy_query_rows(QueryRow* to, const QueryRow* rows, const AttentionShape& shape,
                                const Queries& queries) {
  const int at = 2 * static_cast<int>(threadIdx.x);
  if (at >= kStep) return;
  const std::size_t head = blockIdx.y * shape.heads + static_cast<std::size_t>(queries.head);
  device::copy_ahead(to + at / 2 * kPairStep, rows + head * padded_length(shape) +
                                                  static_cast<std::size_t>(queries.first + at));
}

/// Scores to probabilities, where the columns are queries. `rows`: rows_of_lane().
template <int kTiles, int kColumns, int kPairStep = 2>
__device__ void to_probabilities(Sums<kTiles, kColumns>& p, const QueryRow* rows, float scale) {
#pragma unroll
  for (int m = 0; m < kTiles; ++m) {
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        p[m][n][i] = device::power_of_two(
            __fmaf_rn(p[m][n][i], scale, -rows[4 * kPairStep * n + i % 2].log_sum));
      }
    }
  }
}
/// Probabilities to gradients of scores, where the columns are queries. dp: gradients of the
/// probabilities.
template <int kTiles, int kColumns, int kPairStep = 2>
__device__ void to_score_gradients(Sums<kTiles, kColumns>& p, const Sums<kTiles, kColumns>& dp,
                                   const QueryRow* rows) {
#pragma unroll
  for (int m = 0; m < kTiles; ++m) {
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) p[m][n][i] *= dp[m][n][i] - rows[4 * kPairStep * n + i % 2].delta;
    }
  }
}
/// Scores to their gradients, where the rows are queries. `rows`: those of this lane.
template <int kTiles, int kColumns>
__device__ void to_score_gradients(Sums<kTiles, kColumns>& p, const Sums<kTiles, kColumns>& dp,
                                   const QueryRow (&rows)[kTiles][2], float scale) {
#pragma unroll
  for (int m = 0; m < kTiles; ++m) {
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const QueryRow& row = rows[m][i / 2];
        p[m][n][i] = device::power_of_two(__fmaf_rn(p[m][n][i], scale, -row.log_sum)) *
                     (dp[m][n][i] - row.delta);
      }
    }
  }
}

/// Replaces products of queries and keys by capped scores, and writes the slopes of the cap.
template <int kTiles, int kColumns>
__device__ void cap_scores(Sums<kTiles, kColumns>& scores, Sums<kTiles, kColumns>& slopes,
                           const SoftCap& cap) {
  cap_scores<kTiles, kColumns>(scores, cap);
#pragma unroll
  for (int m = 0; m < kTiles; ++m) {
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) slopes[m][n][i] = cap.slope(scores[m][n][i]);
    }
  }
}
/// Multiplies gradients of scores by the slopes of the cap.
template <int kTiles, int kColumns>
__device__ void multiply_by(Sums<kTiles, kColumns>& gradients,
                            const Sums<kTiles, kColumns>& slopes) {
#pragma unroll
  for (int m = 0; m < kTiles; ++m) {
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) gradients[m][n][i] *= slopes[m][n][i];
    }
  }
}

/// Zeroes elements whose query does not see their key. `key` and `query`: those of this lane's
/// first element. Keys are the rows.
template <int kTiles, int kStep>
__device__ void hide_keys_of_columns(Sums<kTiles, kStep>& p, int key, int query,
                                     const SequenceMask& mask) {
#pragma unroll
  for (int n = 0; n < kStep / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      // Range of rows in this lane's column whose keys its query sees.
      const int column = query + 8 * n + i;
      const int begin = mask.first_key(column) - key;
      const int end = column - key;
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = 16 * m + 8 * half;
          if (row > end || row < begin) p[m][n][2 * half + i] = 0.0F;
        }
      }
    }
  }
}

/// write_rows() with one factor.
template <int kWidth, int kTiles, int kColumns>
__device__ void write_rows(const Sums<kTiles, kColumns>& sums, float factor, Bf16* staging,
                           const AttentionRows<Bf16>& to, int first, int column) {
  float factors[kTiles][2];
#pragma unroll
  for (int i = 0; i < 2 * kTiles; ++i) factors[i / 2][i % 2] = factor;
  write_rows<kWidth, kTiles, kColumns>(sums, factors, staging, to, first, column);
}

}  // namespace ballast::model::cuda
