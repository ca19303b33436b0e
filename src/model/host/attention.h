#pragma once

#include <cstddef>
#include <deque>
#include <vector>

#include "ballast/core/memory.h"
#include "ballast/model/attention.h"

#include "src/model/host/kernel_tables.h"
#include "src/model/host/products.h"

namespace ballast::model::host {

/// softmax(Q K^T * AttentionShape::score_scale()) V under a causal mask, one tile of query rows at
/// a time, so scratch memory is linear in the sequence length. The backward pass recomputes the
/// scores and uses the logarithm of each row's sum. Source: Dao et al., "FlashAttention", 2022,
/// section 3 (tiles and recomputation); here a tile processes all its keys at once, so the softmax
/// needs no rescaling. Own products in bf16 pair the keys and values of a head once for all its
/// tiles. Keys that no query of a tile sees (AttentionMask) are skipped in blocks, and
/// masked inside these.
template <class T>
class Attention {
 public:
  /// `threads`: size of the OpenMP team that runs it.
  Attention(const AttentionShape& shape, const RowKernels<T>& kernels, std::size_t threads);

  /// Bytes of scratch memory, a multiple of the cache line.
  [[nodiscard]] std::size_t scratch_bytes() const;

  /// qkv [tokens, row()], out [tokens, width()]. Writes log_sums for backward(); they include
  /// sinks.
  void forward(const AttentionMask& mask, const AttentionSinks<T>& sinks, const T* qkv, T* out,
               float* log_sums, std::byte* scratch);
  /// out and log_sums: results of forward(). dout: gradient of out. Writes dqkv.
  void backward(const AttentionMask& mask, const AttentionSinks<T>& sinks, const T* qkv,
                const T* out, const float* log_sums, const T* dout, T* dqkv, std::byte* scratch);

 private:
  struct Scratch;
  struct Head;
  struct Tile;
  struct Side;
  struct Gradients;

  Scratch take_scratch(Bump& bump) const;
  [[nodiscard]] Scratch scratch_of(std::byte* scratch, std::size_t thread) const;
  [[nodiscard]] Head head_of(std::size_t sequence, std::size_t head) const;
  void prepare();
  void prepare_tile(const Tile& tile);
  [[nodiscard]] Tile tile_at(std::size_t first, const AttentionMask& mask) const;
  void forward_head(const Head& head, const T* qkv, T* out, float* log_sums,
                    const Scratch& scratch) const;
  void backward_group(std::size_t sequence, std::size_t kv_head, const T* qkv, const T* out,
                      const float* log_sums, const T* dout, T* dqkv, const Scratch& scratch);
  void backward_tile(const Tile& tile, const Head& head, const Side& keys, const Side& values,
                     const Gradients& all, const Scratch& scratch) const;
  [[nodiscard]] Bf16Pairs paired(const T* rows, Bf16* to) const;
  [[nodiscard]] Bf16Pairs flipped(const T* rows, Bf16* to) const;
  void multiply_flipped(const Tile& tile, const Matrix& rows, const Side& side,
                        float* products) const;
  void weigh(const Tile& tile, T* weights, const Side& side, float* sums) const;
  void add_weighted(const Tile& tile, const T* weights, const Matrix& rows, float* gradient,
                    const Scratch& scratch) const;
  void cap_scores(const Tile& tile, float* scores) const;
  void add_sink(const Head& head, float* values, float* log_sums, std::size_t rows) const;
  [[nodiscard]] double sink_gradient(const Head& head, const float* log_sums, const float* delta,
                                     std::size_t rows) const;

  AttentionShape shape_;
  const RowKernels<T>& kernels_;
  std::size_t threads_;
  float scale_;
  float cap_;  ///< AttentionShape::cap
  std::size_t score_row_;
  std::size_t sum_row_;                 ///< stride of fp32 rows of head_dim elements
  bool is_own_;                         ///< whether products.h computes the products
  const T* sinks_ = nullptr;            ///< logits of the sinks in the current call
  std::vector<double> sink_gradients_;  ///< [sequences, heads], of the current call
  Products products_;
  bool prepared_ = false;
};

/// Makes attention for each shape of whole sequences' rows and all heads.
template <class T>
std::deque<Attention<T>> make_attentions(const std::vector<AttentionShape>& shapes,
                                         const RowKernels<T>& kernels, std::size_t threads) {
  std::deque<Attention<T>> made;
  for (const AttentionShape& shape : shapes) made.emplace_back(shape.by_heads(), kernels, threads);
  return made;
}

}  // namespace ballast::model::host
