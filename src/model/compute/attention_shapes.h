#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "ballast/model/architecture.h"
#include "ballast/model/attention.h"
#include "ballast/model/family.h"
#include "ballast/model/kernel_sizes.h"

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
          .parts = shape.parts,
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

}  // namespace ballast::model
