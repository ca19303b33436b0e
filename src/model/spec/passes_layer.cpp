#include "src/model/spec/passes.h"

namespace ballast::model::passes {
namespace {

/// The forward pass of a layer, with the arguments for both models.
Pass forward_through(const ProgramDraft& draft, BlockId block, ValueId in, ValueId out) {
  Pass pass = {.kernel = Kernel::layer,
               .block = block,
               .curve = CostCurve::forward,
               .cost = draft.block(block).forward_cost(),
               .operands = {weights_of(block), reads(Port::input, in), writes(Port::output, out),
                            workspace()}};
  if (draft.shape.positions) pass.operands.push_back(reads(Port::batch, draft.batch));
  const BlockId source = draft.source_of_keys(block);
  if (draft.keys_values[source] != kNone) {
    const auto access = source == block ? OperandAccess::writes : OperandAccess::reads;
    pass.operands.push_back(value(Port::keys_values, draft.keys_values[source], access));
  }
  if (const BlockId table = draft.table_of(block); table != kNone) {
    pass.operands.push_back(rows_of(table));
  }
  if (draft.layer_inputs != kNone) {
    const bool first = block == draft.shape.first_layer();
    pass.operands.push_back(value(Port::layer_inputs, draft.layer_inputs,
                                  first ? OperandAccess::writes : OperandAccess::reads));
  }
  return pass;
}

/// Adds what layers share besides the residual stream to a backward pass. The last layer that
/// reads a value begins its gradient.
void add_links(Pass& pass, const ProgramDraft& draft, BlockId block) {
  const BlockId source = draft.source_of_keys(block);
  const ValueId sums = draft.keys_values_gradient[source];
  if (source != block && draft.keys_values[source] != kNone) {
    pass.operands.push_back(reads(Port::keys_values, draft.keys_values[source]));
    const auto access =
        draft.is_last_reader(block) ? OperandAccess::writes : OperandAccess::updates;
    if (sums != kNone) pass.operands.push_back(value(Port::keys_values_gradient, sums, access));
  } else if (sums != kNone) {
    pass.operands.push_back(reads(Port::keys_values_gradient, sums));
  }
  if (const BlockId table = draft.table_of(block); table != kNone) {
    pass.operands.push_back(rows_of(table));
    if (!draft.block(table).is_frozen()) pass.operands.push_back(gradient_of_rows(table));
  }
  if (draft.layer_inputs == kNone) return;
  pass.operands.push_back(reads(Port::layer_inputs, draft.layer_inputs));
  if (draft.layer_inputs_gradient == kNone) return;
  const bool last = draft.shape.last_of(block) + 1 == draft.program.head;
  pass.operands.push_back(value(Port::layer_inputs_gradient, draft.layer_inputs_gradient,
                                last ? OperandAccess::writes : OperandAccess::updates));
}

}  // namespace

PassId layer(ProgramDraft& draft, BlockId block, bool training) {
  Pass pass = forward_through(draft, block, draft.input[block], draft.output(block));
  pass.cost.traffic = draft.block(block).norm_traffic;
  pass.cost.adapter_traffic = draft.block(block).adapter_traffic.forward;
  if (training && draft.kept[block] != kNone) {
    Operand kept = writes(Port::kept, draft.kept[block]);
    kept.optional = true;
    pass.operands.push_back(kept);
  }
  if (training && draft.kept_attention[block] != kNone) {
    Operand kept = writes(Port::kept_attention, draft.kept_attention[block]);
    kept.optional = true;
    pass.operands.push_back(kept);
  }
  return draft.add(std::move(pass));
}

PassId reference_layer(ProgramDraft& draft, BlockId block) {
  Pass pass = forward_through(draft, block, draft.reference_input(block), draft.reference[block]);
  pass.reference = 1;
  return draft.add(std::move(pass));
}

PassId layer_backward(ProgramDraft& draft, BlockId block) {
  const BlockShape& layer = draft.block(block);
  Pass pass = {.kernel = Kernel::layer_backward,
               .block = block,
               .curve = CostCurve::backward,
               .cost = layer.backward_cost(),
               .operands = {weights_of(block), reads(Port::input, draft.input[block]),
                            updates(Port::activation_gradient, draft.flow), workspace()}};
  pass.cost.traffic = layer.norm_traffic;
  pass.cost.adapter_traffic = layer.adapter_traffic.backward;
  if (draft.shape.positions) pass.operands.push_back(reads(Port::batch, draft.batch));
  add_links(pass, draft, block);
  add_gradient(pass, draft, block);
  PassCost again = layer.recomputation_cost();
  again.traffic = layer.norm_traffic;
  again.adapter_traffic = layer.adapter_traffic.recomputed;
  if (draft.kept[block] == kNone) {
    pass.cost += again;
  } else {
    // The pass overwrites the intermediates.
    Operand kept = updates(Port::kept, draft.kept[block]);
    kept.optional = true;
    kept.absent = again;
    pass.operands.push_back(kept);
  }
  if (draft.kept_attention[block] != kNone) {
    Operand kept = updates(Port::kept_attention, draft.kept_attention[block]);
    kept.optional = true;
    kept.spared = layer.attention_cost();
    pass.operands.push_back(kept);
  }
  return draft.add(std::move(pass));
}

}  // namespace ballast::model::passes
