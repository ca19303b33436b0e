#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ballast/model/architecture.h"
#include "ballast/model/family.h"
#include "ballast/model/lora.h"

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

/// A parameter of transformers' class that has one map of all experts of a layer, to which PEFT
/// adds one adapter with a part for each expert.
struct StackedMap {
  std::string name;  ///< with the block's prefix
  std::uint64_t in = 0;
  std::uint64_t out = 0;
  StoredRows rows;  ///< order of the outputs in files, if it is another
  std::uint64_t experts = 0;
};
/// Returns the parameters that hold the maps of a block with an expert, in the order of the class:
/// gate and up together, and the last one. Nothing for other blocks.
std::vector<StackedMap> stacked_maps(const Architecture& model, const BlockSpec& block);
/// Names in the class, without prefixes.
inline constexpr std::string_view kStackedGateUp = "gate_up_proj";
inline constexpr std::string_view kStackedDown = "down_proj";

// Adapters of routers, of shared experts, and of routed experts: of each map of each expert, or of
// the maps of all experts together (StackedMap).

/// Returns whether the tensor is the gate of a shared expert: a map to one number, which like a
/// router decides how much each token uses the expert.
bool is_shared_gate(const BlockSpec& block, const TensorSpec& tensor);

/// Returns whether the tensor is a router, or a map of a routed or shared expert.
bool is_map_of_experts(const BlockSpec& block, const TensorSpec& tensor);

/// Returns whether the block holds a router, or a routed or shared expert.
bool is_of_experts(const BlockSpec& block);

/// Returns whether a target names a module, like a list of target_modules in PEFT.
bool is_target(std::string_view target, std::string_view module);
/// Like is_target(), also for the name in transformers' class of a router or shared expert, and for
/// "experts.*.NAME", the maps of all experts.
bool names_map(std::string_view target, const Architecture& model, const BlockSpec& block,
               std::string_view module);
/// Returns whether a target names a parameter of stacked_maps(). "down_proj" alone does only if the
/// experts have no maps of that name.
bool names_stack(std::string_view target, const Architecture& model, const BlockSpec& block,
                 const StackedMap& map);

/// Refuses what adapters of experts cannot be, and adapters of an expert's map both alone and in
/// one for all experts. Sets TensorSpec::name_in_files. Call it when all adapters are added.
void complete_expert_adapters(Architecture& model, const AdapterConfig& wanted,
                              const Refuse& refuse);

/// Coefficients of the router losses.
struct RouterLosses {
  double balance = 0.0;  ///< coefficient of the load-balancing loss
  double z = 0.0;        ///< coefficient of the z-loss
  [[nodiscard]] bool any() const { return balance != 0.0 || z != 0.0; }
};
/// Returns the coefficients in the config; zeros for families without experts.
RouterLosses router_losses(const ModelConfig& config);

}  // namespace ballast::model
