#pragma once

#include <cstddef>

#include <cuda_runtime_api.h>

#include "src/model/cuda/attention/attention.h"

namespace ballast::model::cuda {

/// What the backward pass needs to know of a query. Rows [sequences, heads, padded_length()]; those
/// behind the length are 0 and add nothing, for their queries and dout are 0 in a tile.
struct alignas(8) QueryRow {
  float log_sum = 0.0F;  ///< base 2, of the exponentials of scores
  float delta = 0.0F;    ///< sum of dout * out: the gradient's part that all keys share
};

/// A multiple of every tile's rows.
constexpr std::size_t padded_length(const AttentionShape& shape) {
  return (shape.length + 127) / 128 * 128;
}

template <class T>
cudaError_t gather_query_rows(cudaStream_t stream, const AttentionShape& shape, const T* out,
                              const float* log_sums, const T* dout, QueryRow* rows);

}  // namespace ballast::model::cuda
