#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "ballast/model/step_program.h"

#include "src/model/spec/program_shape.h"

namespace ballast::model::passes {

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
  std::vector<ValueId> reference;      ///< written by a reference model's pass through the block
  std::vector<ValueId> keys_values;    ///< written by layers whose keys others read
  std::vector<ValueId> keys_values_gradient;
  ValueId layer_inputs = kNone;
  ValueId layer_inputs_gradient = kNone;
  ValueId router_totals = kNone;
  ValueId router_losses = kNone;
  ValueId losses = kNone;
  ValueId pairs = kNone;
  ValueId reference_rows = kNone;
  ValueId logits = kNone;
  // With tensor parallelism.
  ValueId embedded = kNone;  ///< rows of the embedding that this place has, other rows zero
  std::vector<ValueId> normed_gradient;  ///< rounded sums of all places, of halves and of the head
  ValueId row_sums = kNone;              ///< softmax sums of this place's tiles
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
  /// Returns the activation that the reference model's pass through `id` reads. Both models compute
  /// the same before the first differentiated block.
  [[nodiscard]] ValueId reference_input(BlockId id) const;
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
  void add_head();
  void add_reference();
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
PassId tile(ProgramDraft& draft, BlockId block);
PassId tile_backward(ProgramDraft& draft, BlockId block);

/// Tensor parallelism: sums over the tiles of all places. The result of half a layer, the gradient
/// of the rows of a half or of the head with `tiles` tiles of this place, and the embedding.
PassId sum_outputs(ProgramDraft& draft, BlockId half);
PassId sum_gradients(ProgramDraft& draft, BlockId half, std::uint32_t tiles);
PassId sum_embeddings(ProgramDraft& draft, BlockId block);

/// Passes of any kind of tile, including experts, with the arguments that all tiles have.
Pass forward_of_tile(const ProgramDraft& draft, BlockId block, Kernel kernel);
Pass backward_of_tile(const ProgramDraft& draft, BlockId block, Kernel kernel);

PassId router(ProgramDraft& draft, BlockId block, bool training);
PassId router_again(ProgramDraft& draft, BlockId block);
PassId router_backward(ProgramDraft& draft, BlockId block);
PassId expert(ProgramDraft& draft, BlockId block);
PassId expert_backward(ProgramDraft& draft, BlockId block);

/// Appends the stops of the head in a training step, for each form.
void train_head(ProgramDraft& draft, std::vector<Stop>& stops);
/// Appends the stops of the head in an evaluation.
void evaluate_head(ProgramDraft& draft, std::vector<Stop>& stops);
/// The gradient of a tied tile, in the backward pass of the embedding, after the head was visited
/// tile by tile.
PassId differentiate_tied(ProgramDraft& draft, BlockId block);

}  // namespace ballast::model::passes
