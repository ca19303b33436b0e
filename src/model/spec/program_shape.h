#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ballast/core/attention_class.h"
#include "ballast/core/dtype.h"
#include "ballast/core/units.h"
#include "ballast/model/architecture.h"
#include "ballast/model/kernel_sizes.h"
#include "ballast/model/step_program.h"

namespace ballast::model {

/// The role of a block in a step.
enum class BlockRole : std::uint8_t {
  embedding,  ///< all rows of the vocabulary, or a tile of them
  layer,      ///< a layer in one piece, or the attention before experts
  norm,       ///< begins the first half of a layer in tiles
  mid_norm,   ///< begins the second half, whose input the first half computes
  router,     ///< begins a half with experts: its norm and router
  tile,       ///< continues a half, like the following roles
  shared_expert,
  expert,
  exchanged_expert,  ///< expert parallelism: each rank has a different expert in the block
  table,             ///< follows its layer, whose passes read the rows of their tokens; no passes
  head,              ///< the norm and, if it is neither tied nor in tiles, the output matrix
  head_tile          ///< a tile of the output matrix
};

/// Sizes and work of one block, for one micro-batch.
struct BlockShape {
  std::string name;
  BlockRole role = BlockRole::layer;
  double forward_flops = 0.0;
  double recomputed_flops = 0.0;        ///< Architecture::recomputed_flops()
  double frozen_flops = 0.0;            ///< Architecture::frozen_flops()
  double attention_flops = 0.0;         ///< Architecture::attention_flops()
  double attention_output_flops = 0.0;  ///< Architecture::attention_output_flops()
  /// Bytes received from the ranks that share the sequences: queries, keys and values, and results
  /// of attention. The backward pass receives their gradients, which have the same size.
  Bytes exchanged_projections = 0;
  Bytes exchanged_results = 0;
  Bytes norm_traffic = 0;         ///< weights that each pass reads for DoRA's norms
  AdapterValues adapter_traffic;  ///< BlockSpec::adapter_values of a micro-batch, in bytes
  AttentionClass attention = AttentionClass::heads_128;
  Bytes intermediates = 0;         ///< KernelSizes::intermediates
  Bytes kept_attention = 0;        ///< KernelSizes::attention
  Bytes keys_values = 0;           ///< keys and values that other layers read; 0: none do
  Bytes keys_values_gradient = 0;  ///< their fp32 sums
  std::uint32_t keys_of =
      0;                    ///< number of the layer whose keys it attends to, see Family::keys_of()
  Bytes selected = 0;       ///< StepBlock::selected
  Bytes row_gradients = 0;  ///< StepBlock::row_gradients
  Bytes gradient = 0;       ///< fp32 sums; 0: frozen
  Bytes cleared = 0;        ///< KernelSizes::cleared
  bool by_slots = false;    ///< GradientSum::by_slots
  double token_share = 1.0;  ///< share of an expert, assuming balanced routing
  std::uint32_t expert = 0;  ///< number of the (first) expert in its layer
  std::uint32_t layer = 0;   ///< number of its layer, which may have several blocks
  std::uint32_t alike = 0;   ///< equal for blocks with the same kernels

  [[nodiscard]] bool is_frozen() const { return gradient == 0; }
  /// FLOPs of the backward pass, without recomputation.
  [[nodiscard]] double backward_flops() const { return 2.0 * forward_flops - frozen_flops; }
  /// Costs of the forward pass, of the backward pass without recomputation, and of recomputation,
  /// each without memory traffic.
  [[nodiscard]] PassCost forward_cost() const {
    return {.flops = forward_flops,
            .attention_flops = attention_flops,
            .exchanged = exchanged_projections + exchanged_results};
  }
  [[nodiscard]] PassCost backward_cost() const {
    return {.flops = backward_flops(),
            .attention_backward_flops = 2.0 * attention_flops,
            .exchanged = exchanged_projections + exchanged_results};
  }
  [[nodiscard]] PassCost recomputation_cost() const {
    return {.flops = recomputed_flops,
            .attention_flops = attention_flops,
            .exchanged = exchanged_projections + exchanged_results};
  }
  /// The part of recomputation_cost() in attention and the map after it. Projections are exchanged
  /// again in any case.
  [[nodiscard]] PassCost attention_cost() const {
    return {.flops = attention_output_flops,
            .attention_flops = attention_flops,
            .exchanged = exchanged_results};
  }
};

/// Sizes and work from which a StepProgram is written, without family, config or type. The blocks
/// are those of the embedding, the layers and the head. Sizes are in bytes per micro-batch.
struct ProgramShape {
  std::vector<BlockShape> blocks;
  bool tied = false;                 ///< the output matrix has the tiles of the embedding
  bool positions = false;            ///< layers read the positions of the tokens
  bool pairs = false;                ///< requires layers in one piece
  BlockId first_differentiated = 0;  ///< the embedding, the first block of a layer, or the head
  Bytes activation = 0;              ///< between two blocks
  Bytes batch = 0;                   ///< tokens, targets, slots and positions, if there are any
  Bytes rows = 0;                    ///< KernelSizes::rows
  Bytes partial_sums = 0;            ///< KernelSizes::sums
  Bytes tied_gradient = 0;           ///< fp32 sums of a tied tile; 0: not tied, or frozen
  Bytes routing = 0;                 ///< offsets of each expert's rows
  Bytes router_totals = 0;           ///< KernelSizes::router_totals
  Bytes losses = 0;                  ///< losses of the head
  Bytes router_losses = 0;
  Bytes pair_results = 0;  ///< reference losses and row weights
  Bytes layer_inputs = 0;  ///< Port::layer_inputs; 0: none
  /// Whether the gradient of layer inputs is wanted: for their projection, or for the embedding.
  bool trains_layer_inputs = false;
  std::uint32_t ranks = 1;
  std::uint32_t tensor = 1;  ///< tensor places; the blocks have the tiles of one of them
  Bytes row_sums = 0;        ///< softmax sums of the rows for this place's vocabulary tiles
  Bytes sum_scratch = 0;     ///< StepShape::sum_scratch

  /// Number of vocabulary tiles: blocks of the embedding and, unless tied, of the output matrix.
  [[nodiscard]] std::uint32_t tiles() const;
  [[nodiscard]] BlockId first_layer() const { return tiles(); }
  [[nodiscard]] BlockId head() const;
  /// Returns whether the head has passes for each of its tiles.
  [[nodiscard]] bool visits_tiles() const { return tiles() > 1 || tensor > 1; }
  /// Returns the block with tile `number` of the output matrix.
  [[nodiscard]] BlockId block_of_tile(std::uint32_t number) const {
    return tied ? number : head() + number + (visits_tiles() ? 1 : 0);
  }
  /// Returns the bytes of the sums over tiles: one sum of all tiles or, with tensor parallelism,
  /// one per tile of this place.
  [[nodiscard]] Bytes sums() const;
  /// Returns the number of tiles of the half that `block` begins.
  [[nodiscard]] std::uint32_t tiles_of_half(BlockId block) const { return last_of(block) - block; }
  [[nodiscard]] bool is_differentiated(BlockId block) const {
    return block >= first_differentiated;
  }
  /// Returns whether `block` continues the embedding, head or half layer of the preceding block.
  [[nodiscard]] bool continues(BlockId block) const;
  /// Returns the last block that continues `block`, or `block`.
  [[nodiscard]] BlockId last_of(BlockId block) const;
  /// Returns the block that `block` continues, or `block`.
  [[nodiscard]] BlockId first_of(BlockId block) const;
  /// Returns whether the head adds to the gradient of the embedding.
  [[nodiscard]] bool trains_tied() const { return tied_gradient > 0; }
};

/// `sizes` may lack the lists by block, which then count as zeros.
ProgramShape shape_of(const Architecture& model, DType type, const StepShape& shape,
                      const KernelSizes& sizes);

/// The second stage of write_program().
StepProgram write_program(const ProgramShape& shape);

}  // namespace ballast::model
