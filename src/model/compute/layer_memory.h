#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "ballast/core/units.h"
#include "ballast/model/architecture.h"
#include "ballast/model/attention.h"
#include "ballast/model/block_layout.h"
#include "ballast/model/family.h"
#include "ballast/model/kernels.h"

#include "src/model/compute/kernel_arguments.h"
#include "src/model/ops/device_ops.h"

namespace ballast::model {

/// Shape of attention in layer `layer` of a model or of its tiles.
inline AttentionShape attention_shape(const ModelConfig& config, MicroBatchShape shape,
                                      std::uint64_t layer = 0) {
  const HeadExtents own = family(config.family).heads(config, layer);
  return {.sequences = shape.sequences,
          .length = shape.length,
          .heads = own.heads,
          .kv_heads = own.kv_heads,
          .head_dim = own.head_dim,
          .scale = family(config.family).score_scale(config),
          .cap = family(config.family).score_cap(config),
          .slices = shape.slices,
          .value_dim = own.value_dim};
}

/// Returns whether two shapes of the same micro-batch have the same heads.
inline bool have_same_heads(const AttentionShape& a, const AttentionShape& b) {
  return a.heads == b.heads && a.kv_heads == b.kv_heads && a.head_dim == b.head_dim;
}

/// Shapes of attention in the layers of a model, each once, in the order of the layers. A model
/// without layers has one shape, too, for operations that are used alone.
inline std::vector<AttentionShape> attention_shapes(const ModelConfig& config,
                                                    MicroBatchShape shape) {
  std::vector<AttentionShape> shapes;
  const std::uint64_t layers = std::max<std::uint64_t>(config.num_layers, 1);
  for (std::uint64_t layer = 0; layer < layers; ++layer) {
    const AttentionShape own = attention_shape(config, shape, layer);
    const bool known = std::any_of(shapes.begin(), shapes.end(), [&](const AttentionShape& one) {
      return have_same_heads(one, own);
    });
    if (!known) shapes.push_back(own);
  }
  return shapes;
}

/// Row length of queries, keys and values together in the widest of `shapes`.
inline std::size_t widest_row(const std::vector<AttentionShape>& shapes) {
  std::size_t widest = 0;
  for (const AttentionShape& shape : shapes) widest = std::max(widest, shape.row());
  return widest;
}

/// Places of the norms of heads in tiles of attention. The weights, [head_dim] for queries and for
/// keys or [value_width] for the results of a gated delta net, belong to the block of the norm
/// before attention. Its pass appends them to its result (Port::normed), from which all tiles read
/// them. Each tile writes its part of their gradients to its own slice after the sums
/// (Port::partial_sums), and the norm's backward pass adds the slices in the order of the tiles.
class HeadNorms {
 public:
  HeadNorms() = default;
  /// `activation`: elements of the norm's result and of the sums. `width`: that of the widest norm
  /// of a layer. `tiles`: the largest number of attention tiles in a layer.
  HeadNorms(std::size_t activation, std::size_t width, std::size_t tiles)
      : begin_(round_up(activation, kTensorStep)),
        step_(round_up(width, kTensorStep)),
        tiles_(tiles) {}

  [[nodiscard]] bool empty() const { return tiles_ == 0; }
  /// Elements of queries and keys together, and the offset of the keys. Other norms are in the
  /// place of the queries.
  [[nodiscard]] std::size_t size() const { return 2 * step_; }
  [[nodiscard]] std::size_t keys() const { return step_; }
  /// Returns the appended weights of the norm's result `normed`.
  template <class T>
  [[nodiscard]] T* weights(T* normed) const {
    return normed + begin_;
  }
  [[nodiscard]] float* slice(float* sums, std::size_t tile) const {
    return sums + begin_ + tile * size();
  }
  [[nodiscard]] const float* slice(const float* sums, std::size_t tile) const {
    return sums + begin_ + tile * size();
  }
  /// Elements of Port::normed and of Port::partial_sums; 0 without norms of heads.
  [[nodiscard]] std::size_t rows() const { return empty() ? 0 : begin_ + size(); }
  [[nodiscard]] std::size_t sums() const { return empty() ? 0 : begin_ + tiles_ * size(); }

 private:
  std::size_t begin_ = 0;
  std::size_t step_ = 0;
  std::size_t tiles_ = 0;
};

/// The first half of a layer.
enum class Mixer { attention, delta_net };

/// Optional arrays that a family's layers need, and their form.
struct LayerArrays {
  std::size_t wide = 0;  ///< width of the widest MLP; 0: intermediate_size
  std::size_t mlp = 2;   ///< arrays [N, I] for hidden and activated together, 2 or 3
  /// True: the layer runs its MLP with Layer::by_chunks(). False: on all rows at once.
  bool cuts_mlp = false;
  bool norm1 = true;
  bool projected = false;
  bool projected_values = false;  ///< projected has values, too
  bool output_gate = false;       ///< see DecoderSpec
  bool attention_out = false;
  bool mlp_out = false;
  std::size_t query_rank = 0;   ///< see LatentSpec
  std::size_t rank = 0;         ///< see LatentSpec
  std::size_t shared_keys = 0;  ///< LatentSpec::rotating
  std::size_t expanded = 0;     ///< keys and values of all heads from LatentSpec::up
  DeltaShape delta;             ///< that of the layers with Mixer::delta_net
  /// True if layers are cut into tiles: a call is for one tile, and the caller owns its input.
  bool tiles = false;
  HeadNorms head_norms;  ///< empty unless layers are cut into tiles
  /// True if Layer::compute() skips attention, because its result was kept.
  bool keeps_attention = false;
};

/// Memory of a layer's values between its forward and backward pass. At most one is not null.
struct KeptValues {
  std::byte* all = nullptr;        ///< Port::kept
  std::byte* attention = nullptr;  ///< Port::kept_attention
};

/// Intermediates of one layer, with N tokens, H hidden_size, A heads x head_dim, I
/// intermediate_size. The forward pass writes them; the backward pass reads and overwrites them. If
/// the MLP is cut, hidden, activated and mlp_out are in its MlpChunks. For tiles of layers, A and I
/// are those of the widest tile, and norm1, middle and norm2 do not exist.
template <class T>
struct LayerMemory {
  T* norm1 = nullptr;      ///< [N, H] input of the attention's projection
  T* projected = nullptr;  ///< [N, queries | keys] before their norms, perhaps with values, with an
                           ///< output gate [N, queries | gates | keys]
  // Results of maps of low rank and of their norms (LatentSpec), later their gradients.
  T* low_queries = nullptr;         ///< [N, query_rank]
  T* low_queries_normed = nullptr;  ///< [N, query_rank]
  T* low = nullptr;                 ///< [N, rank | shared keys]
  T* low_normed = nullptr;          ///< [N, rank]
  /// [N, queries | keys | values]. If ranks share sequences, Layer::exchange_projections() turns it
  /// into whole sequences of the rank's heads.
  T* qkv = nullptr;
  // Arrays of a gated delta net, which replace those of attention.
  T* mixed = nullptr;       ///< [N, DeltaShape::row()]
  T* channels = nullptr;    ///< [N, DeltaShape::channels()] after the convolution
  T* recurred = nullptr;    ///< [N, DeltaShape::values()]
  float* states = nullptr;  ///< DeltaShape::states()

  T* attention = nullptr;      ///< [N, A]
  T* attended = nullptr;       ///< like attention, by heads; only if ranks share sequences
  T* attention_out = nullptr;  ///< [N, H] before its norm, later its gradient
  T* middle = nullptr;         ///< [N, H] residual stream between attention and MLP
  T* norm2 = nullptr;          ///< [N, H] input of the MLP
  T* hidden = nullptr;         ///< [N, I] gelu's input, or 2 N I elements of gate and up
  T* activated = nullptr;      ///< [N, I], later its gradient
  T* mlp_out = nullptr;        ///< [N, H] before its norm, later its gradient
  T* dqkv = nullptr;           ///< like qkv or mixed, in the memory of hidden and activated
  T* gradient = nullptr;  ///< [N, H, A or values], of norm2, attention, then norm1; norm2's memory.
                          ///< Before that [N, expanded] or its gradient, if there are maps of
                          ///< low rank
  float* log_sums = nullptr;  ///< log-sums of attention
};

/// Rows [first, first + rows) of a layer and the intermediates of its MLP for these rows.
template <class T>
struct MlpChunk {
  std::size_t first = 0;
  std::size_t rows = 0;
  std::size_t width = 0;   ///< I of the layer or tile
  T* hidden = nullptr;     ///< like LayerMemory's, with `rows` instead of N
  T* activated = nullptr;  ///< like LayerMemory's
  T* mlp_out = nullptr;    ///< like LayerMemory's
};

}  // namespace ballast::model
