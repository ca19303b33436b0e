#pragma once

#include <cstddef>
#include <cstdint>

#include <cuda_runtime_api.h>

namespace ballast::model::cuda {

// Kernels that use token ids. Conventions: rows.h. A token outside [0, vocabulary) causes no access
// outside the arrays: it embeds as 0, its gradient is dropped, and as a target it has the loss NaN
// and an undefined gradient.

/// *first_bad = min(*first_bad, index of the first token outside [0, vocabulary)).
cudaError_t check_tokens(cudaStream_t stream, const std::int32_t* tokens, std::size_t count,
                         std::size_t vocabulary, std::uint32_t* first_bad);

/// out[i] = table[tokens[i]] (+ positions[i % length] where that is not null, or times `scale`).
template <class T>
struct Embedding {
  const T* table = nullptr;      ///< [vocabulary, width]
  const T* positions = nullptr;  ///< [>= length, width] or null
  std::size_t vocabulary = 0;
  std::size_t width = 0;
  std::size_t length = 0;
  float scale = 1.0F;  ///< not together with positions
};
template <class T>
cudaError_t embed(cudaStream_t stream, const Embedding<T>& embedding, const std::int32_t* tokens,
                  std::size_t count, T* out);

/// Adds dy [count, width] times `scale` to the rows of the tokens, each row in token order, and (if
/// `positions` is not null) dy to those of their positions, in order of sequences. `links` is
/// scratch memory for 2
/// * count values. Positions of one token are found by comparison: the work grows with `count`
/// times the number of different tokens, which is negligible beside a model up to about 64k tokens.
/// dy is read once for each of the two tables.
template <class T>
cudaError_t embed_backward(cudaStream_t stream, const std::int32_t* tokens, std::size_t count,
                           const T* dy, std::size_t vocabulary, std::size_t width,
                           std::size_t length, float* table, float* positions, std::uint32_t* links,
                           float scale = 1.0F);

/// Cross-entropy in nats of each row of logits. Softmax and sum are in fp32, with fp32 partial sums
/// in a fixed order: losses[r] = log(sum exp(logits[r])) - logits[r][targets[r]], from there in
/// double. If `scale` is not 0, each row of logits is overwritten from its start with the gradients
/// of scale * loss, in T; the rest of the row is undefined. `stride`: floats from row to row, a
/// multiple of 4. A row with NaN or +infinity has the loss NaN. The gradients replace the logits,
/// because logits are the largest intermediate.
template <class T>
cudaError_t cross_entropy(cudaStream_t stream, float* logits, std::size_t rows, std::size_t stride,
                          std::size_t vocabulary, const std::int32_t* targets, float scale,
                          double* losses);
/// *sum = the sum of the losses, in an order that depends only on `count`.
cudaError_t sum_losses(cudaStream_t stream, const double* losses, std::size_t count, double* sum);

}  // namespace ballast::model::cuda
