#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "ballast/core/attention_class.h"
#include "ballast/core/dtype.h"
#include "ballast/core/units.h"
#include "ballast/model/architecture.h"
#include "ballast/model/kernels.h"
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
  result_norm,       ///< follows a half with experts: the norm of their sum
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
      0;               ///< number of the layer whose keys it attends to, see AttentionSpec::keys_of
  Bytes selected = 0;  ///< StepBlock::selected
  Bytes row_gradients = 0;   ///< StepBlock::row_gradients
  Bytes gradient = 0;        ///< fp32 sums; 0: frozen
  Bytes cleared = 0;         ///< KernelSizes::cleared
  bool by_token = false;     ///< GradientSum::by_token
  bool shares_norm = false;  ///< a router that reads the norm of the block before it
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
  bool pairs = false;                ///< requires layers in one piece, or with experts
  BlockId first_differentiated = 0;  ///< the embedding, the first block of a layer, or the head
  Bytes activation = 0;              ///< between two blocks
  Bytes batch = 0;                   ///< tokens, targets, sum rows and positions, if there are any
  Bytes rows = 0;                    ///< KernelSizes::rows
  Bytes partial_sums = 0;            ///< KernelSizes::sums
  Bytes tied_gradient = 0;           ///< fp32 sums of a tied tile; 0: not tied, or frozen
  Bytes routing = 0;                 ///< offsets of each expert's rows
  Bytes router_totals = 0;           ///< KernelSizes::router_totals
  Bytes losses = 0;                  ///< losses of the head
  Bytes router_losses = 0;
  bool counts_step = false;  ///< StepProgram::counts_step
  Bytes pair_results = 0;    ///< reference losses and row weights
  Bytes layer_inputs = 0;    ///< Port::layer_inputs; 0: none
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

namespace ballast::model::passes {

/// The model that a pass computes (Pass::reference).
enum class Whose : std::uint8_t { trained, reference };
inline std::uint8_t number_of(Whose whose) {
  return whose == Whose::reference ? 1 : 0;
}

/// A StepProgram under construction: its passes so far, and the values and sums that passes use.
class ProgramDraft {
 public:
  explicit ProgramDraft(const ProgramShape& model);

  const ProgramShape& shape;
  StepProgram program;

  // Values, by the block to which they belong; kNone if the block has none.
  ValueId batch = kNone;
  ValueId flow = kNone;        ///< gradient of the activation between two blocks
  std::vector<ValueId> input;  ///< for each block that begins something, and for the head
  std::vector<ValueId> kept;   ///< intermediates of layers in one piece
  std::vector<ValueId> kept_attention;
  std::vector<ValueId> rows;           ///< norm results of halves and of the head
  std::vector<ValueId> sums;           ///< sums over the tiles of a half
  std::vector<ValueId> rows_gradient;  ///< gradients of the norm results of halves and of the head
  std::vector<ValueId> routing;        ///< written by routers
  std::vector<ValueId> residual;       ///< Port::residual of halves with experts
  std::vector<ValueId> result_gradient;  ///< Port::result_gradient of routers
  // Values of the reference model: the output of its pass through the block or through the half
  // that the block is in, and those that the blocks of a half with experts share.
  std::vector<ValueId> reference;
  std::vector<ValueId> reference_rows;
  std::vector<ValueId> reference_sums;
  std::vector<ValueId> reference_routing;
  std::vector<ValueId> keys_values;  ///< written by layers whose keys others read
  std::vector<ValueId> keys_values_gradient;
  ValueId layer_inputs = kNone;
  ValueId layer_inputs_gradient = kNone;
  ValueId router_totals = kNone;
  ValueId router_losses = kNone;
  ValueId losses = kNone;
  ValueId pairs = kNone;
  ValueId reference_head_rows = kNone;
  ValueId logits = kNone;
  // With tensor parallelism.
  ValueId embedded = kNone;  ///< rows of the embedding that this place has, other rows zero
  /// Rounded sums of all places, of halves and of the head. Without tensor parallelism those of
  /// routers that read the norm of the block before them.
  std::vector<ValueId> normed_gradient;
  ValueId row_sums = kNone;  ///< softmax sums of this place's tiles
  ValueId all_row_sums = kNone;
  ValueId received = kNone;
  BlockId first_router = kNone;
  BlockId last_router = kNone;
  // Sums, by block.
  std::vector<SumId> gradient;
  std::vector<SumId> tied_gradient;  ///< for the embedding's tiles, added by the head

  [[nodiscard]] const BlockShape& block(BlockId id) const { return shape.blocks[id]; }
  /// Returns the output of the last block that continues `id`: the input of the next block.
  [[nodiscard]] ValueId output(BlockId id) const { return input[shape.last_of(id) + 1]; }
  /// Returns whether the half that `id` begins reads the norm of the block before it.
  [[nodiscard]] bool shares_norm(BlockId id) const { return block(id).shares_norm; }
  /// Returns the gradient of what the tiles of a half add up to.
  [[nodiscard]] ValueId gradient_of_results(BlockId half) const {
    return result_gradient[half] == kNone ? flow : result_gradient[half];
  }
  /// Returns the activation that the reference model's pass through `id` reads. Both models compute
  /// the same before the first differentiated block.
  [[nodiscard]] ValueId reference_input(BlockId id) const;
  // Values of the trained or the reference model, by the block that a pass computes.
  [[nodiscard]] ValueId input_of(BlockId id, Whose whose) const {
    return whose == Whose::reference ? reference_input(id) : input[id];
  }
  [[nodiscard]] ValueId output_of(BlockId id, Whose whose) const {
    return whose == Whose::reference ? reference[id] : output(id);
  }
  [[nodiscard]] ValueId rows_of(BlockId id, Whose whose) const {
    return (whose == Whose::reference ? reference_rows : rows)[shape.first_of(id)];
  }
  [[nodiscard]] ValueId sums_of(BlockId id, Whose whose) const {
    return (whose == Whose::reference ? reference_sums : sums)[shape.first_of(id)];
  }
  [[nodiscard]] ValueId routing_of(BlockId id, Whose whose) const {
    return (whose == Whose::reference ? reference_routing : routing)[shape.first_of(id)];
  }
  /// Returns the block of the layer whose keys and values the layer `id`, in one piece, reads.
  [[nodiscard]] BlockId source_of_keys(BlockId id) const;
  /// Returns whether the layer is the last one that reads keys and values of another.
  [[nodiscard]] bool is_last_reader(BlockId id) const;
  /// Returns the block with the table of the layer `id`, in one piece; kNone if it has none.
  [[nodiscard]] BlockId table_of(BlockId id) const {
    return block(id + 1).role == BlockRole::table ? id + 1 : kNone;
  }

  PassId add(Pass pass);
  /// Adds a recipe and lets it recompute `value`.
  void recompute(ValueId value, std::vector<Stop> stops);

 private:
  ClassId add_class(ValueClass one);
  ValueId add_value(StepValue value);
  void add_stream();
  void add_intermediates();
  void add_halves();
  void add_routing();
  void add_experts_around_norms();
  void add_head();
  void add_reference();
  void add_reference_half(BlockId router, ClassId activations);
  void add_links();
  void add_sums();
  void add_exchanges();

  std::map<std::vector<std::uint32_t>, std::uint16_t> shapes_;
};

// Operands.

inline Operand weights_of(BlockId block, Port port = Port::weights) {
  return {.port = port, .kind = OperandKind::weights, .number = block};
}
inline Operand rows_of(BlockId table) {
  return {.port = Port::table_rows, .kind = OperandKind::rows, .number = table};
}
inline Operand gradient_of_rows(BlockId table) {
  return {.port = Port::table_rows_gradient,
          .kind = OperandKind::rows,
          .number = table,
          .access = OperandAccess::writes};
}
inline Operand value(Port port, ValueId id, OperandAccess access) {
  return {.port = port, .kind = OperandKind::value, .number = id, .access = access};
}
inline Operand reads(Port port, ValueId id) {
  return value(port, id, OperandAccess::reads);
}
inline Operand writes(Port port, ValueId id) {
  return value(port, id, OperandAccess::writes);
}
inline Operand updates(Port port, ValueId id) {
  return value(port, id, OperandAccess::updates);
}
inline Operand workspace() {
  return {.port = Port::workspace, .kind = OperandKind::workspace, .access = OperandAccess::writes};
}
inline Operand adds_to(SumId sum, Port port = Port::gradient) {
  return {
      .port = port, .kind = OperandKind::gradient, .number = sum, .access = OperandAccess::updates};
}
/// The gradient of the norm's result in `block`, for the backward pass of the norm.
inline Operand gradient_of_rows(const ProgramDraft& draft, BlockId block) {
  return draft.shape.tensor > 1 ? reads(Port::normed_gradient, draft.normed_gradient[block])
                                : reads(Port::partial_sums, draft.rows_gradient[block]);
}
/// Adds the gradient sum of `block` to the operands, unless the block is frozen.
inline void add_gradient(Pass& pass, const ProgramDraft& draft, BlockId block) {
  if (draft.gradient[block] != kNone) pass.operands.push_back(adds_to(draft.gradient[block]));
}

// Passes by part of the model. With `training` false, they leave out what only a backward pass or a
// training step reads.

PassId embed(ProgramDraft& draft, BlockId block);
PassId embed_backward(ProgramDraft& draft, BlockId block);

PassId layer(ProgramDraft& draft, BlockId block, bool training);
PassId reference_layer(ProgramDraft& draft, BlockId block);
PassId layer_backward(ProgramDraft& draft, BlockId block);

/// The norm that begins a half.
PassId norm(ProgramDraft& draft, BlockId block);
/// Recomputes the norm's result for the backward pass.
PassId norm_again(ProgramDraft& draft, BlockId block);
PassId norm_backward(ProgramDraft& draft, BlockId block);
/// A tile of a layer, or a shared expert.
PassId tile(ProgramDraft& draft, BlockId block, Whose whose = Whose::trained);
PassId tile_backward(ProgramDraft& draft, BlockId block);

/// Tensor parallelism: sums over the tiles of all places. The result of half a layer, the gradient
/// of the rows of a half or of the head with `tiles` tiles of this place, and the embedding.
PassId sum_outputs(ProgramDraft& draft, BlockId half);
PassId sum_gradients(ProgramDraft& draft, BlockId half, std::uint32_t tiles);
PassId sum_embeddings(ProgramDraft& draft, BlockId block);

/// Passes of any kind of tile, including experts, with the arguments that all tiles have.
Pass forward_of_tile(const ProgramDraft& draft, BlockId block, Kernel kernel,
                     Whose whose = Whose::trained);
Pass backward_of_tile(const ProgramDraft& draft, BlockId block, Kernel kernel);

PassId router(ProgramDraft& draft, BlockId block, bool training);
/// The reference model's router, which counts in no loss.
PassId reference_router(ProgramDraft& draft, BlockId block);
PassId router_again(ProgramDraft& draft, BlockId block);
/// The losses of all routers, between the forward and the backward passes of a step.
PassId router_losses(ProgramDraft& draft);
PassId router_backward(ProgramDraft& draft, BlockId block);
PassId expert(ProgramDraft& draft, BlockId block, Whose whose = Whose::trained);
PassId expert_backward(ProgramDraft& draft, BlockId block);
/// The norm of the experts' sum, see SublayerSpec::after.
PassId result_norm(ProgramDraft& draft, BlockId block);
PassId result_norm_backward(ProgramDraft& draft, BlockId block);

/// Appends the stops of the head in a training step, for each form.
void train_head(ProgramDraft& draft, std::vector<Stop>& stops);
/// Appends the stops of the head in an evaluation.
void evaluate_head(ProgramDraft& draft, std::vector<Stop>& stops);
/// The gradient of a tied tile, in the backward pass of the embedding, after the head was visited
/// tile by tile.
PassId differentiate_tied(ProgramDraft& draft, BlockId block);

}  // namespace ballast::model::passes
