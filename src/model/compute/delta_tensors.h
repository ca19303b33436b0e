#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "ballast/core/element_range.h"
#include "ballast/model/architecture.h"
#include "ballast/model/attention.h"

#include "src/model/compute/delta_shape.h"
#include "src/model/compute/tensor_offsets.h"
#include "src/model/spec/families/decoder.h"

namespace ballast::model {

/// Tensors of a DeltaSpec in a block.
struct DeltaAt {
  std::vector<LinearAt> maps;  ///< their input is the layer's, their outputs are side by side
  /// The convolution's weights. A tile has three ranges: channels of queries, keys and values.
  std::vector<ElementRange> convolution;
  Elems decay = 0;
  Elems shift = 0;
  NormAt norm;               ///< in a tile: offsets in the weights of HeadNorms
  bool by_key_head = false;  ///< see DeltaSpec
};

/// Finds the tensors of `spec` whose inputs are `maps`.
inline DeltaAt find_delta(const BlockSpec& block, const DeltaSpec& spec,
                          const std::vector<LinearAt>& maps) {
  const bool tile = block.part == LayerPart::attention;
  DeltaAt at = {.maps = joined(maps),
                .decay = block.tensor(spec.decay).offset,
                .shift = block.tensor(spec.shift).offset,
                .norm = tile ? NormAt() : find_norm(block, spec.norm),
                .by_key_head = spec.by_key_head};
  const std::string& convolution = block.tensor(spec.convolution + ".weight").name;
  for (const TensorSpec& tensor : block.tensors) {
    if (tensor.name != convolution) continue;
    at.convolution.push_back({tensor.offset, tensor.offset + tensor.size});
  }
  number_adapters(at.maps);
  return at;
}

/// Returns the extents of the gated delta nets of a model for a micro-batch, if it has any.
inline DeltaShape delta_shape(const ModelConfig& config, const AttentionShape& attention) {
  const auto* const described = dynamic_cast<const DecoderFamily*>(&family(config.family));
  for (std::uint64_t layer = 0; described != nullptr && layer < config.num_layers; ++layer) {
    const DeltaSpec spec = described->decoder(config, layer).delta;
    if (spec.key_heads == 0) continue;
    return {.sequences = attention.sequences,
            .length = attention.length,
            .key_heads = spec.key_heads,
            .value_heads = spec.value_heads,
            .key_width = spec.key_width,
            .value_width = spec.value_width,
            .taps = spec.taps};
  }
  return {};
}

}  // namespace ballast::model
