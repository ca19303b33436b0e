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
#include "src/model/description/layer_rules.h"
#include "src/model/ops/device_ops.h"

namespace ballast::model {

/// Shape of attention in layer `layer` of a model or of its tiles.
inline AttentionShape attention_shape(const ModelConfig& config, MicroBatchShape shape,
                                      std::uint64_t layer = 0) {
  const LayerSpec spec = family(config.family).layer(config, layer);
  const auto* const attention = spec.find<AttentionSpec>();
  const HeadExtents own = heads_of(spec, config);
  return {.sequences = shape.sequences,
          .length = shape.length,
          .heads = own.heads,
          .kv_heads = own.kv_heads,
          .head_dim = own.head_dim,
          .scale = attention == nullptr ? 0.0 : attention->scale,
          .cap = attention == nullptr ? 0.0 : attention->cap,
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

/// Returns the extents of the gated delta nets of a model for a micro-batch, if it has any.
inline DeltaShape delta_shape(const ModelConfig& config, const AttentionShape& attention) {
  for (std::uint64_t layer = 0; layer < config.num_layers; ++layer) {
    const LayerSpec spec = family(config.family).layer(config, layer);
    const auto* const delta = spec.find<DeltaSpec>();
    if (delta == nullptr) continue;
    return {.sequences = attention.sequences,
            .length = attention.length,
            .key_heads = delta->key_heads,
            .value_heads = delta->value_heads,
            .key_width = delta->key_width,
            .value_width = delta->value_width,
            .taps = delta->taps,
            .beta_factor = static_cast<float>(delta->beta_factor)};
  }
  return {};
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

}  // namespace ballast::model
