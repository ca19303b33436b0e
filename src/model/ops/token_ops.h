#pragma once

#include <cstddef>
#include <cstdint>

#include "ballast/model/kernels.h"

#include "src/model/compute/formulas.h"
#include "src/model/compute/kernel_arguments.h"

namespace ballast::model {

/// Operations that use token ids: embeddings and their gradients.
template <class T>
class TokenOps {
 public:
  virtual ~TokenOps() = default;

  /// Throws Error(data) with the first token of the micro-batch that is not below the vocabulary
  /// size, or is below `least`. A device that computes asynchronously throws at a later wait for
  /// the stream.
  virtual void check_tokens(const std::int32_t* tokens, std::int32_t least) = 0;
  /// out[i] = row of its token (+ row of its position, if the embedding has positions). Tiles: see
  /// Embedding.
  virtual void embed(const Embedding<const T>& tables, const Ids& ids, T* out) = 0;
  /// Bytes of the scratch memory that embed_backward() gets.
  [[nodiscard]] virtual std::size_t embedding_scratch_bytes() const = 0;
  /// Adds dy to the sum rows of the tokens, in token order, and to the rows of their positions.
  virtual void embed_backward(const Ids& ids, const T* dy, const Embedding<float>& gradients,
                              std::byte* scratch) = 0;
};

/// Cross-entropy of logits.
template <class T>
class LossOps {
 public:
  virtual ~LossOps() = default;

  /// Multiplies a tile of logits by its factor and applies the soft cap.
  virtual void cap_logits(const LogitTile& tile) = 0;
  /// Computes the sums of a tile of logits and merges them with `sums`; the `first` tile overwrites
  /// these. Rows with negative targets have the sums of no logits.
  virtual void sum_logits(const LogitTile& tile, const std::int32_t* targets, bool first,
                          RowSum<float>* sums) = 0;
  /// Merges the sums of all tiles: the result of sum_logits() for one tile after the other.
  virtual void merge_row_sums(const RowSumsOfTiles& tiles, RowSum<float>* sums) = 0;
  /// Replaces logits by gradients of the rows' losses times `scale` and their `weights` (null: 1).
  /// With a soft cap, these are gradients of the logits before the cap; `scale` has their factor. 0
  /// for negative targets.
  virtual void logit_gradients(const LogitTile& tile, const std::int32_t* targets, float scale,
                               const float* weights, const RowSum<float>* sums) = 0;
  /// losses[r] = cross-entropy of the row in nats, 0 for a negative target.
  virtual void row_losses(const RowSum<float>* sums, const std::int32_t* targets, std::size_t rows,
                          double* losses) = 0;
  /// sums[p] = sum of losses [p * count, (p + 1) * count).
  virtual void sum_losses(const double* losses, std::size_t count, std::size_t parts,
                          double* sums) = 0;
  /// Writes the loss of each pair to results[rows.pairs], and rows.weights. Rows are added in
  /// order.
  virtual void dpo_loss(const PairRows& rows, const Preference& how, PairResult* results) = 0;
};

}  // namespace ballast::model
