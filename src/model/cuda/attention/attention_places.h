#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "src/device/cuda/kernel_language.h"
#include "src/model/compute/formulas.h"
#include "src/model/cuda/attention/attention.h"

namespace ballast::model::cuda {

inline constexpr float kLog2E = 1.44269504088896340736F;

/// Returns whether the kernels support the extents.
inline bool has_kernels(const AttentionShape& shape) {
  return shape.head_dim % 8 == 0 && shape.head_dim > 0 && shape.head_dim <= kWidestHead &&
         shape.value_columns() % 8 == 0 && shape.value_columns() <= shape.head_dim &&
         shape.kv_heads > 0 && shape.heads % shape.kv_heads == 0;
}

/// Soft cap of scores (AttentionShape::cap).
struct SoftCap {
  float scale = 1.0F;  ///< score_scale(), which the cap applies before the softmax
  float cap = 0.0F;    ///< 0: none

  /// Returns the score of the product of a query and a key. Without a cap, the softmax scales it.
  [[nodiscard]] constexpr float score(float product) const {
    return cap > 0.0F ? formulas::soft_cap(product * scale, cap) : product;
  }
  /// Returns the derivative of a score with respect to the scaled product.
  [[nodiscard]] constexpr float slope(float score) const {
    return cap > 0.0F ? formulas::soft_cap_derivative(score, cap) : 1.0F;
  }
};
inline SoftCap cap_of(const AttentionShape& shape) {
  return {shape.score_scale(), static_cast<float>(shape.cap)};
}
/// Returns the factor of the scores in the softmax.
inline float softmax_scale(const AttentionShape& shape) {
  return shape.cap > 0.0 ? 1.0F : shape.score_scale();
}

/// AttentionMask of one sequence, for queries up to the end of a tile.
struct SequenceMask {
  const std::int32_t* positions = nullptr;
  int window = 0;  ///< hides nothing if it equals the length
  int length = 0;

  /// Returns the first key that a query sees. It never decreases with the query.
  [[nodiscard]] constexpr int first_key(int query) const {
    int seen = window;
    if (positions != nullptr) {
      query = query < length ? query : length - 1;
      const int document = positions[query] + 1;
      seen = document < seen ? document : seen;
    }
    return query < seen ? 0 : query + 1 - seen;
  }
  /// Returns the start of the step (of `step` keys) with the first key that `query` sees.
  [[nodiscard]] constexpr int first_step(int query, int step) const {
    return first_key(query) / step * step;
  }
};
constexpr SequenceMask mask_of(const AttentionShape& shape, std::size_t sequence) {
  const AttentionMask& mask = shape.mask;
  const std::size_t window =
      mask.window == 0 || mask.window > shape.length ? shape.length : mask.window;
  return {mask.positions == nullptr ? nullptr : mask.positions + sequence * shape.length,
          static_cast<int>(window), static_cast<int>(shape.length)};
}

/// Rows of one head of one sequence in memory.
template <class T>
struct AttentionRows {
  T* start = nullptr;
  unsigned step = 0;  ///< row stride in elements
  int length = 0;
  int size = 0;  ///< columns, a multiple of 8
};

/// Offsets of one head of one sequence in the arrays, in elements.
struct HeadPlace {
  std::size_t query;  ///< in qkv
  std::size_t key;
  std::size_t value;
  std::size_t out;  ///< in out
  std::size_t row;  ///< in [sequences, heads, length]
};
constexpr HeadPlace place_of(const AttentionShape& shape, std::size_t sequence, std::size_t head) {
  const std::size_t kv_head = head / (shape.heads / shape.kv_heads);
  const std::size_t row = sequence * shape.length * shape.row();
  HeadPlace at{};
  at.query = row + head * shape.head_dim;
  at.key = row + shape.width() + kv_head * shape.head_dim;
  at.value = at.key + shape.kv_width();
  at.out = sequence * shape.length * shape.width() + head * shape.head_dim;
  at.row = (sequence * shape.heads + head) * shape.length;
  return at;
}
template <class T>
constexpr AttentionRows<T> rows_in_qkv(const AttentionShape& shape, T* start) {
  return {start, static_cast<unsigned>(shape.row()), static_cast<int>(shape.length),
          static_cast<int>(shape.head_dim)};
}
template <class T>
constexpr AttentionRows<T> rows_in_out(const AttentionShape& shape, T* start) {
  return {start, static_cast<unsigned>(shape.width()), static_cast<int>(shape.length),
          static_cast<int>(shape.head_dim)};
}

/// A query's values for the backward pass. Rows are [sequences, heads, padded_length()]. Rows after
/// the end are 0 and add nothing, because their queries and dout are 0 in a tile.
struct alignas(8) QueryRow {
  float log_sum = 0.0F;  ///< base 2, for exponentials of scores
  float delta = 0.0F;    ///< sum of dout * out, the same for all keys
};

/// The length rounded up to a multiple of every tile's rows.
constexpr std::size_t padded_length(const AttentionShape& shape) {
  return (shape.length + 127) / 128 * 128;
}

/// Threads of one warp that share a row of a head, in kernels by query rows. Each has every
/// lanes_of_row()-th group of 8 columns.
inline unsigned lanes_of_row(const AttentionShape& shape) {
  return std::min(std::bit_ceil(static_cast<unsigned>(shape.head_dim / 8)), device::kWarp);
}
/// Blocks of `threads` threads, with lanes_of_row() threads per token. x: tokens, y: heads, z:
/// sequences.
inline device::LaunchConfig by_query_rows(cudaStream_t stream, const AttentionShape& shape,
                                          unsigned threads) {
  const std::size_t blocks = padded_length(shape) * lanes_of_row(shape) / threads;
  return {.stream = stream,
          .blocks = {static_cast<unsigned>(blocks), static_cast<unsigned>(shape.heads),
                     static_cast<unsigned>(shape.sequences)},
          .threads = threads};
}

template <class T>
cudaError_t gather_query_rows(cudaStream_t stream, const AttentionShape& shape, const T* out,
                              const float* log_sums, const T* dout, QueryRow* rows);

}  // namespace ballast::model::cuda
