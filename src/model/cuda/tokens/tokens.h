#pragma once

#include <cstddef>
#include <cstdint>

#include <cuda_runtime_api.h>

#include "src/model/compute/formulas.h"
#include "src/model/compute/kernel_arguments.h"

namespace ballast::model::cuda {

// Kernels that use token ids. Conventions: rows.h. A token outside a table causes no access outside
// the arrays: it embeds as 0 (unless the table is a tile), and its gradient is dropped. A target in
// no tile has the loss NaN and an undefined gradient.

/// *first_bad = min(*first_bad, index of the first token outside [least, vocabulary)).
cudaError_t check_tokens(cudaStream_t stream, const std::int32_t* tokens, std::size_t count,
                         std::int32_t least, std::size_t vocabulary, std::uint32_t* first_bad);

struct EmbeddingExtents {
  std::size_t count = 0;   ///< tokens
  std::size_t length = 0;  ///< tokens per sequence
  std::size_t width = 0;
};
/// out [count, width] = row of each token (+ row of its position). Tiles: see Embedding.
template <class T>
cudaError_t embed(cudaStream_t stream, const Embedding<const T>& tables, const Ids& ids,
                  const EmbeddingExtents& extents, T* out);

/// Sum rows of the tokens [first, first + count), at first kNoSumRow.
struct RowsWithSums {
  std::size_t first = 0;
  std::size_t count = 0;
  std::uint32_t* sum_rows = nullptr;
};
/// Writes the sum rows of `count` tokens to the rows of those that have one.
cudaError_t find_sum_rows(cudaStream_t stream, const Ids& ids, std::size_t count,
                          const RowsWithSums& rows);

/// Adds dy [count, width] to the sum rows of the tokens and of the positions, each row in token
/// order.
/// `links`: scratch memory for 2 * count values. Equal tokens are found by comparison, so the work
/// grows with `count` times the number of different tokens. This is negligible compared with a
/// model up to about 64k tokens. dy is read once per table.
template <class T>
cudaError_t embed_backward(cudaStream_t stream, const Ids& ids, const T* dy,
                           const EmbeddingExtents& extents, const Embedding<float>& gradients,
                           std::uint32_t* links);

/// Applies the soft cap to a tile of logits.
cudaError_t cap_logits(cudaStream_t stream, const LogitTile& tile);
/// Computes the sums of a tile of logits and merges them with `sums`; the `first` tile overwrites
/// these. Sums of exponentials are in fp32 per thread in a fixed order, then in double. Rows with
/// negative targets have the sums of no logits. A row with NaN or +infinity has a total of NaN.
cudaError_t sum_logits(cudaStream_t stream, const LogitTile& tile, const std::int32_t* targets,
                       bool first, RowSum<float>* sums);
/// Merges the sums of all tiles: the result of sum_logits() for one tile after the other.
cudaError_t merge_row_sums(cudaStream_t stream, const RowSumsOfTiles& tiles, RowSum<float>* sums);
/// Overwrites each row of logits, from its start, with the gradients of scale * weight * loss in T;
/// the rest of the row is undefined. With a soft cap, these are gradients of the logits before the
/// cap. `weights`: weights of the rows; null: 1. Gradients replace
/// logits because logits are the largest intermediate.
template <class T>
cudaError_t logit_gradients(cudaStream_t stream, const LogitTile& tile, const std::int32_t* targets,
                            float scale, const float* weights, const RowSum<float>* sums);
/// losses[r] = cross-entropy of the row in nats, in double; 0 for a negative target.
cudaError_t row_losses(cudaStream_t stream, const RowSum<float>* sums, const std::int32_t* targets,
                       std::size_t rows, double* losses);
/// sums[p] = sum of losses [p * count, (p + 1) * count), in an order that depends only on `count`.
cudaError_t sum_losses(cudaStream_t stream, const double* losses, std::size_t count,
                       std::size_t parts, double* sums);
/// Writes the loss of each pair and the weights of its rows.
cudaError_t dpo_loss(cudaStream_t stream, const PairRows& rows, const Preference& how,
                     PairResult* results);

}  // namespace ballast::model::cuda
