#include "src/model/spec/passes.h"

namespace ballast::model::passes {
namespace {

/// The norm and the choice of experts, with the operands of both directions.
Pass through_router(const ProgramDraft& draft, BlockId block) {
  const ProgramShape& shape = draft.shape;
  Pass pass = {
      .kernel = Kernel::router,
      .block = block,
      .curve = CostCurve::forward,
      .cost = {.flops = shape.blocks[block].forward_flops, .traffic = 2 * shape.activation},
      .operands = {reads(Port::input, draft.input[block]), weights_of(block),
                   writes(Port::normed, draft.rows[block]), workspace()}};
  // Targets mark padding rows, which only batches with positions have.
  if (shape.positions) pass.operands.push_back(reads(Port::batch, draft.batch));
  return pass;
}

bool is_exchanged(const ProgramDraft& draft, BlockId block) {
  return draft.block(block).role == BlockRole::exchanged_expert;
}

/// Adds the rows that routers dispatch to the expert, from all ranks if they share it. `rows_sent`:
/// activations sent per row; one fp32 result per row comes back.
void add_rows(Pass& pass, const ProgramDraft& draft, BlockId block, std::uint64_t rows_sent) {
  const ProgramShape& shape = draft.shape;
  pass.operands.push_back(reads(Port::routing_counts, draft.routing[shape.first_of(block)]));
  if (!is_exchanged(draft, block)) return;
  const double share = shape.blocks[block].token_share;
  pass.token_share = static_cast<float>(share * shape.ranks);
  const double rows = share * (shape.ranks - 1);
  pass.cost.exchanged = static_cast<Bytes>(
      rows * static_cast<double>(rows_sent * shape.activation + shape.partial_sums));
}

}  // namespace

PassId router(ProgramDraft& draft, BlockId block, bool training) {
  Pass pass = through_router(draft, block);
  pass.cost.traffic += draft.shape.partial_sums;
  pass.operands.push_back(writes(Port::partial_sums, draft.sums[block]));
  pass.operands.push_back(writes(Port::routing, draft.routing[block]));
  if (training) {
    pass.operands.push_back(block == draft.first_router
                                ? writes(Port::router_totals, draft.router_totals)
                                : updates(Port::router_totals, draft.router_totals));
    if (block == draft.last_router) {
      pass.operands.push_back(writes(Port::losses, draft.router_losses));
    }
  }
  return draft.add(std::move(pass));
}

PassId router_again(ProgramDraft& draft, BlockId block) {
  return draft.add(through_router(draft, block));
}

PassId router_backward(ProgramDraft& draft, BlockId block) {
  const ProgramShape& shape = draft.shape;
  Pass pass = {.kernel = Kernel::router_backward,
               .block = block,
               .curve = CostCurve::backward,
               .cost = {.flops = shape.blocks[block].backward_flops(),
                        .traffic = 3 * shape.activation + shape.partial_sums},
               .operands = {reads(Port::input, draft.input[block]), weights_of(block),
                            updates(Port::partial_sums, draft.rows_gradient[block]),
                            updates(Port::activation_gradient, draft.flow), workspace()}};
  add_gradient(pass, draft, block);
  pass.operands.push_back(reads(Port::normed, draft.rows[block]));
  pass.operands.push_back(reads(Port::router_totals, draft.router_totals));
  return draft.add(std::move(pass));
}

PassId expert(ProgramDraft& draft, BlockId block) {
  const bool exchanged = is_exchanged(draft, block);
  Pass pass = forward_of_tile(draft, block, exchanged ? Kernel::exchanged_expert : Kernel::expert);
  add_rows(pass, draft, block, 1);
  return draft.add(std::move(pass));
}

PassId expert_backward(ProgramDraft& draft, BlockId block) {
  const bool exchanged = is_exchanged(draft, block);
  Pass pass = backward_of_tile(
      draft, block, exchanged ? Kernel::exchanged_expert_backward : Kernel::expert_backward);
  // The gradients of the routing weights are written next to the rows.
  for (Operand& operand : pass.operands) {
    if (operand.port == Port::normed) operand.access = OperandAccess::updates;
  }
  add_rows(pass, draft, block, 2);
  return draft.add(std::move(pass));
}

}  // namespace ballast::model::passes
