#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "ballast/model/architecture.h"
#include "ballast/model/family.h"

#include "src/model/description/layer_spec.h"
#include "src/model/description/rotary_angles.h"

// Consequences of the description of layers: their blocks, their tiles, and what they share.

namespace ballast::model {

/// Returns the layers of a complete config.
std::vector<LayerSpec> layers_of(const ModelConfig& config);

/// Returns the blocks of layer `index` of a complete config, each in one piece. A layer is one
/// block. With layer_tiles above 1, each sublayer is a block with its norm, then its tiles. The
/// sublayers before experts are one block; a block with the norm and the router, the shared expert
/// and the experts follow. The table of layer embeddings is a block after the others. Tensors are
/// in the order of the data flow.
std::vector<BlockSpec> blocks_of(const LayerSpec& layer, const ModelConfig& config,
                                 std::uint64_t index);
/// Returns blocks_of() with one piece per rank in a block. Throws Error(config) if the ranks cannot
/// share the experts.
std::vector<BlockSpec> joined_blocks_of(const LayerSpec& layer, const ModelConfig& config,
                                        std::uint64_t index, const RankSplit& split);
/// Returns the size of joined_blocks_of().
std::size_t count_blocks(const LayerSpec& layer, const ModelConfig& config, const RankSplit& split);

/// Returns the number of tiles into which the sublayer is cut if `most` are wanted.
std::uint64_t tiles_of(const BodySpec& body, std::uint64_t most);
/// Returns a layer whose bodies have the extents of the widest of tiles_of() tiles.
LayerSpec widest_tile(LayerSpec layer, std::uint64_t tiles);
/// Returns the layers of a model, or their widest tiles. A model without layers has one, for
/// operations that are used alone.
std::vector<LayerSpec> widest_tiles(const Architecture& model);
/// Returns the reason why such layers of a model cannot be cut into tiles, as a sentence about
/// "they", the layers; "" if they can be cut. `places`: tensor places that share the tiles.
std::string obstacle_to_tiles(std::span<const LayerSpec> layers, std::uint64_t places);

/// Returns the extents of attention in the layer, or those that the config gives if it has none.
HeadExtents heads_of(const LayerSpec& layer, const ModelConfig& config);
/// Returns the width of the widest sum over rows in the layers (biases, norms, logits).
std::uint64_t widest_sum(std::span<const LayerSpec> layers);

/// Returns the number of the layer whose keys and values layer `index` attends to.
std::uint64_t keys_of(std::span<const LayerSpec> layers, std::uint64_t index);
/// Returns the last layer that attends to the keys of layer `index`: `index` if no other layer
/// does.
std::uint64_t last_reader_of_keys(std::span<const LayerSpec> layers, std::uint64_t index);
/// Returns the values per token that each layer reads besides the residual stream; 0: none.
std::uint64_t layer_input_width(std::span<const LayerSpec> layers);
/// Returns whether layers read values of earlier ones besides the residual stream: keys and values,
/// or layer inputs.
bool links_layers(std::span<const LayerSpec> layers);
/// Whether experts read the norm before attention, or their sum has a norm.
bool norms_surround_experts(std::span<const LayerSpec> layers);
/// Returns whether a layer has a sublayer with a body of type B.
template <class B>
bool any_has(std::span<const LayerSpec> layers) {
  for (const LayerSpec& layer : layers) {
    if (layer.find<B>() != nullptr) return true;
  }
  return false;
}

/// Returns Family::rotaries() of a complete config. Throws Error(config).
std::vector<Rotary> rotaries_of(const ModelConfig& config);
/// Returns whether a token's result depends on the length of its document, for documents of up to
/// `length` tokens. Some scalings of rotary positions differ for long documents.
bool depends_on_documents(const ModelConfig& config, std::uint64_t length);

/// Coefficients of the router losses.
struct RouterLosses {
  double balance = 0.0;  ///< coefficient of the load-balancing loss
  double z = 0.0;        ///< coefficient of the z-loss
  [[nodiscard]] bool any() const { return balance != 0.0 || z != 0.0; }
};
/// Returns the coefficients in the config; zeros for families without experts.
RouterLosses router_losses(const ModelConfig& config);

}  // namespace ballast::model
