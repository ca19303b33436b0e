#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <variant>
#include <vector>

#include "ballast/core/memory.h"
#include "ballast/model/architecture.h"
#include "ballast/model/attention.h"
#include "ballast/model/compute.h"

#include "src/model/compute/layer_passes.h"
#include "src/model/compute/layer_shapes.h"
#include "src/model/compute/part.h"

namespace ballast::model {

/// Forward and backward passes of a model's layers, one layer or tile at a time.
template <class T>
class ModelLayers {
 public:
  using Call = LayerCall<T>;

  /// `shape`: that of attention in the first layer or its tiles.
  ModelLayers(const Architecture& model, const AttentionShape& shape, DeviceOps<T>& ops);
  ModelLayers(const ModelLayers&) = delete;
  ModelLayers& operator=(const ModelLayers&) = delete;

  /// Takes the memory for one call.
  void take_memory(Bump& bump);
  /// Takes memory that lasts between calls. Other blocks use the memory of take_memory() in
  /// between.
  void take_lasting_memory(Bump& bump);

  /// Bytes of the kept intermediates of a layer or of its first half. `layer` as in BlockWeights.
  [[nodiscard]] std::size_t intermediate_bytes(std::size_t layer) const;
  /// Bytes of the results of attention and of the map after it. `layer` as in BlockWeights.
  [[nodiscard]] std::size_t attention_bytes(std::size_t layer) const;

  /// Views as in Kernel::layer. Runs on `stream`.
  void forward(device::Stream& stream, const BlockWeights<T>& block,
               const LayerSequences& sequences, const T* in, T* out, const KeptValues& kept,
               const LayerLinks<T>& links = {});
  /// Views as in Kernel::layer_backward. Runs on `stream`.
  void backward(device::Stream& stream, const BlockWeights<T>& block,
                const LayerSequences& sequences, const T* in, T* dy, const KeptValues& kept,
                const LayerLinks<T>& links = {});

  // Tiles.

  /// Returns the norm of a block of BlockContent::norm, router or result_norm. `layer` as in
  /// BlockWeights.
  [[nodiscard]] NormAt norm_of(std::size_t layer) const;
  [[nodiscard]] const HeadNorms& head_norms() const { return tools_.head_norms; }
  /// Appends the weights of the norms of heads in `block` to the result of its norm.
  void append_head_norms(const BlockWeights<T>& block, T* normed);
  /// Adds the slices after `sums` to the gradients of the norms of heads in `block`.
  void add_head_norm_gradients(const BlockWeights<T>& block, const float* sums);
  /// Writes the tile's part of the output [N, H]. `x` [N, H]: result of the norm.
  void forward_tile(const BlockWeights<T>& block, const LayerSequences& sequences, const T* x,
                    float* part);
  /// Writes the tile's part of the gradient of `x` [N, H], and a tile of attention its slice of
  /// head_norms(), if there are any.
  void backward_tile(const BlockWeights<T>& block, const LayerSequences& sequences, const T* x,
                     const T* dy, float* part, float* slice);

 private:
  /// A norm of heads in the block of the norm before tiles.
  struct HeadNormAt {
    NormAt norm;
    std::size_t place = 0;
    std::size_t width = 0;
  };
  /// A block of a layer.
  struct Block {
    std::unique_ptr<LayerPasses<T>> passes;  ///< null: other passes compute it
    std::size_t heads = 0;                   ///< index in shapes_
    std::optional<NormAt> norm;              ///< before tiles
    std::vector<HeadNormAt> head_norms;
    std::size_t tiles = 0;  ///< number of attention tiles in its layer
  };

  LayerTools<T> make_tools(const Architecture& model, const AttentionShape& shape,
                           DeviceOps<T>& ops) const;
  /// Returns the MLP of a sublayer, or nullptr.
  template <class Body>
  static auto* mlp_of(Body& body) {
    auto* const both = std::get_if<MlpWithExpertsSpec>(&body);
    return both != nullptr ? &both->mlp : std::get_if<MlpSpec>(&body);
  }
  [[nodiscard]] bool is_gated() const;
  /// Returns the width of the widest MLP. A model of experts counts one, too, and so does a model
  /// without MLPs: `of_config`.
  [[nodiscard]] std::size_t width_of_mlps(std::size_t of_config) const;
  [[nodiscard]] bool has_unit_norms() const;

  void add_block(const ModelConfig& config, const BlockSpec& block);
  std::unique_ptr<LayerPasses<T>> make_passes(const LayerSpec& spec, const BlockSpec& block);
  void find_norms(const LayerSpec& spec, const BlockSpec& block, Block& made) const;
  [[nodiscard]] std::size_t heads_of(const LayerSpec& spec) const;
  /// Returns the layer with attention as its mixer: in memory, a tile of an MLP is behind the
  /// arrays of attention, whatever the mixer of its layer is.
  [[nodiscard]] LayerSpec with_attention(LayerSpec spec) const;
  /// Bytes of the arrays of any call without kept arrays. Every layer counts with the widest MLP of
  /// the model, also one with experts.
  [[nodiscard]] std::size_t workspace_bytes();

  [[nodiscard]] LayerPasses<T>& passes(std::size_t layer) const;
  Call begin(device::Stream& stream, const BlockWeights<T>& block, const LayerSequences& sequences,
             const KeptValues& kept, const LayerLinks<T>& links);
  Call call_of_tile(const BlockWeights<T>& block, const LayerSequences& sequences, const T* x,
                    float* slice) const;

  std::vector<LayerSpec> specs_;  ///< layers, or their widest tiles
  std::vector<AttentionShape> shapes_;
  std::size_t widest_;  ///< width of the widest MLP
  LayerTools<T> tools_;
  std::vector<Block> blocks_;  ///< blocks of layers, in order
  Bytes workspace_ = 0;        ///< result of workspace_bytes()
  std::byte* shared_ = nullptr;
  std::size_t taps_ = 0;  ///< elements of LayerTools::taps
};

}  // namespace ballast::model
