#include "src/model/spec/passes.h"

namespace ballast::model::passes {

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
  if (shape.last_of(block) == block) {
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
  return pass;
}

PassId norm(ProgramDraft& draft, BlockId block) {
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
                            reads(Port::partial_sums, draft.rows_gradient[block]),
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
