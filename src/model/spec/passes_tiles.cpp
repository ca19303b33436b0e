#include "src/model/spec/passes.h"

namespace ballast::model::passes {

namespace {

/// Lets a tile write what it adds to its own part of the partial sums. `first`: no other tile of
/// this place has written before.
void own_part(Pass& pass, const ProgramDraft& draft, BlockId block, bool first) {
  pass.number = block - draft.shape.first_of(block) - 1;
  for (Operand& operand : pass.operands) {
    if (operand.port != Port::partial_sums) continue;
    operand.access = first ? OperandAccess::writes : OperandAccess::updates;
  }
}

/// Cost of adding terms of `terms` bytes per place: each place receives its share of the elements
/// of all others' terms, and the sums of the other shares.
PassCost cost_of_sum(const ProgramShape& shape, Bytes terms) {
  const Bytes others = shape.tensor - 1;
  return {.traffic = 2 * terms + 2 * shape.activation,
          .exchanged = (terms + shape.activation) * others / shape.tensor};
}

}  // namespace

PassId sum_outputs(ProgramDraft& draft, BlockId half) {
  const Bytes terms = draft.shape.tiles_of_half(half) * draft.shape.partial_sums;
  return draft.add(
      {.kernel = Kernel::sum_tiles,
       .block = half,
       .number = draft.shape.tiles_of_half(half),
       .curve = CostCurve::forward,
       .cost = cost_of_sum(draft.shape, terms),
       .operands = {reads(Port::terms, draft.sums[half]), reads(Port::input, draft.input[half]),
                    writes(Port::output, draft.output(half)),
                    writes(Port::received, draft.received)}});
}

PassId sum_gradients(ProgramDraft& draft, BlockId half, std::uint32_t tiles) {
  return draft.add({.kernel = Kernel::sum_tiles,
                    .block = half,
                    .number = tiles,
                    .curve = CostCurve::backward,
                    .cost = cost_of_sum(draft.shape, tiles * draft.shape.partial_sums),
                    .operands = {reads(Port::terms, draft.rows_gradient[half]),
                                 writes(Port::normed_gradient, draft.normed_gradient[half]),
                                 writes(Port::received, draft.received)}});
}

PassId sum_embeddings(ProgramDraft& draft, BlockId block) {
  return draft.add(
      {.kernel = Kernel::sum_tiles,
       .block = block,
       .number = 1,
       .curve = CostCurve::forward,
       .cost = cost_of_sum(draft.shape, draft.shape.activation),
       .operands = {reads(Port::terms, draft.embedded), writes(Port::output, draft.output(block)),
                    writes(Port::received, draft.received)}});
}

Pass forward_of_tile(const ProgramDraft& draft, BlockId block, Kernel kernel) {
  const ProgramShape& shape = draft.shape;
  const BlockId half = shape.first_of(block);
  Pass pass = {.kernel = kernel,
               .block = block,
               .curve = CostCurve::forward,
               .cost = shape.blocks[block].forward_cost(),
               .token_share = static_cast<float>(shape.blocks[block].token_share),
               .operands = {weights_of(block), reads(Port::normed, draft.rows[half]),
                            updates(Port::partial_sums, draft.sums[half]), workspace()}};
  if (shape.tensor > 1) {
    own_part(pass, draft, block, block == half + 1);
  } else if (shape.last_of(block) == block) {
    // The last tile rounds the sum of all.
    pass.operands.push_back(writes(Port::output, draft.output(block)));
    pass.cost.traffic = shape.partial_sums + shape.activation;
  }
  return pass;
}

Pass backward_of_tile(const ProgramDraft& draft, BlockId block, Kernel kernel) {
  const ProgramShape& shape = draft.shape;
  const BlockShape& tile = shape.blocks[block];
  const BlockId half = shape.first_of(block);
  const ValueId sums = draft.rows_gradient[half];
  // The last tile runs first and overwrites the sums.
  const bool last = shape.last_of(block) == block;
  Pass pass = {
      .kernel = kernel,
      .block = block,
      .curve = CostCurve::backward,
      .cost = tile.backward_cost(),
      .token_share = static_cast<float>(tile.token_share),
      .operands = {weights_of(block), reads(Port::normed, draft.rows[half]),
                   last ? writes(Port::partial_sums, sums) : updates(Port::partial_sums, sums),
                   workspace(), reads(Port::activation_gradient, draft.flow)}};
  pass.cost += tile.recomputation_cost();
  add_gradient(pass, draft, block);
  if (shape.tensor > 1) own_part(pass, draft, block, last);
  return pass;
}

PassId norm(ProgramDraft& draft, BlockId block) {
  if (draft.shape.tensor > 1) return norm_again(draft, block);  // sum_outputs() reads the input
  return draft.add({.kernel = Kernel::norm,
                    .block = block,
                    .curve = CostCurve::forward,
                    .cost = {.traffic = 2 * draft.shape.activation + draft.shape.partial_sums},
                    .operands = {reads(Port::input, draft.input[block]), weights_of(block),
                                 writes(Port::normed, draft.rows[block]), workspace(),
                                 writes(Port::partial_sums, draft.sums[block])}});
}

PassId norm_again(ProgramDraft& draft, BlockId block) {
  return draft.add({.kernel = Kernel::norm,
                    .block = block,
                    .curve = CostCurve::forward,
                    .cost = {.traffic = 2 * draft.shape.activation},
                    .operands = {reads(Port::input, draft.input[block]), weights_of(block),
                                 writes(Port::normed, draft.rows[block]), workspace()}});
}

PassId norm_backward(ProgramDraft& draft, BlockId block) {
  Pass pass = {.kernel = Kernel::norm_backward,
               .block = block,
               .curve = CostCurve::backward,
               .cost = {.traffic = 3 * draft.shape.activation + draft.shape.partial_sums},
               .operands = {reads(Port::input, draft.input[block]), weights_of(block),
                            gradient_of_rows(draft, block),
                            updates(Port::activation_gradient, draft.flow), workspace()}};
  add_gradient(pass, draft, block);
  return draft.add(std::move(pass));
}

PassId tile(ProgramDraft& draft, BlockId block) {
  const bool shared = draft.block(block).role == BlockRole::shared_expert;
  Pass pass = forward_of_tile(draft, block, shared ? Kernel::shared_expert : Kernel::tile);
  if (draft.shape.positions) pass.operands.push_back(reads(Port::batch, draft.batch));
  return draft.add(std::move(pass));
}

PassId tile_backward(ProgramDraft& draft, BlockId block) {
  const bool shared = draft.block(block).role == BlockRole::shared_expert;
  Pass pass = backward_of_tile(draft, block,
                               shared ? Kernel::shared_expert_backward : Kernel::tile_backward);
  if (draft.shape.positions) pass.operands.push_back(reads(Port::batch, draft.batch));
  return draft.add(std::move(pass));
}

}  // namespace ballast::model::passes
