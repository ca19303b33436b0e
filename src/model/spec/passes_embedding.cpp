#include "src/model/spec/passes.h"

namespace ballast::model::passes {

PassId embed(ProgramDraft& draft, BlockId block) {
  const ProgramShape& shape = draft.shape;
  // All tiles write to the same activation. The first one begins its life.
  const ValueId out = shape.tensor > 1 ? draft.embedded : draft.output(block);
  return draft.add(
      {.kernel = Kernel::embed,
       .block = block,
       .curve = CostCurve::forward,
       .cost = {.flops = shape.blocks[block].forward_flops,
                // rows read and written
                .traffic = 2 * shape.activation / shape.tiles()},
       .operands = {weights_of(block),
                    shape.continues(block) ? updates(Port::output, out) : writes(Port::output, out),
                    reads(Port::batch, draft.batch)}});
}

PassId embed_backward(ProgramDraft& draft, BlockId block) {
  const ProgramShape& shape = draft.shape;
  Pass pass = {.kernel = Kernel::embed_backward,
               .block = block,
               .curve = CostCurve::backward,
               .cost = {.flops = shape.blocks[block].backward_flops(),
                        // rows read, fp32 rows read and written
                        .traffic = 5 * shape.activation / shape.tiles()},
               .operands = {updates(Port::activation_gradient, draft.flow),
                            reads(Port::batch, draft.batch)}};
  add_gradient(pass, draft, block);
  return draft.add(std::move(pass));
}

}  // namespace ballast::model::passes
