#include "src/model/description/program_draft.h"

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
  if (draft.shares_norm(block + 1)) {
    pass.operands.push_back(writes(Port::residual, draft.residual[block + 1]));
  }
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
  if (draft.shares_norm(block + 1)) {
    pass.operands.push_back(updates(Port::normed_gradient, draft.normed_gradient[block + 1]));
  }
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

Pass forward_of_tile(const ProgramDraft& draft, BlockId block, Kernel kernel, Whose whose) {
  const ProgramShape& shape = draft.shape;
  const BlockId half = shape.first_of(block);
  Pass pass = {.kernel = kernel,
               .block = block,
               .reference = number_of(whose),
               .curve = CostCurve::forward,
               .cost = shape.blocks[block].forward_cost(),
               .token_share = static_cast<float>(shape.blocks[block].token_share),
               .operands = {weights_of(block), reads(Port::normed, draft.rows_of(block, whose)),
                            updates(Port::partial_sums, draft.sums_of(block, whose)), workspace()}};
  if (shape.tensor > 1) {
    own_part(pass, draft, block, block == half + 1);
  } else if (shape.last_of(block) == block) {
    // The last tile rounds the sum of all.
    pass.operands.push_back(writes(Port::output, draft.output_of(block, whose)));
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
                   workspace(), reads(Port::activation_gradient, draft.gradient_of_results(half))}};
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

PassId tile(ProgramDraft& draft, BlockId block, Whose whose) {
  const bool shared = draft.block(block).role == BlockRole::shared_expert;
  Pass pass = forward_of_tile(draft, block, shared ? Kernel::shared_expert : Kernel::tile, whose);
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

namespace {

/// The norm and the choice of experts, with the operands of both directions.
Pass through_router(const ProgramDraft& draft, BlockId block, Whose whose = Whose::trained) {
  const ProgramShape& shape = draft.shape;
  Pass pass = {
      .kernel = Kernel::router,
      .block = block,
      .reference = number_of(whose),
      .curve = CostCurve::forward,
      .cost = {.flops = shape.blocks[block].forward_flops, .traffic = 2 * shape.activation},
      .operands = {reads(Port::input, draft.input_of(block, whose)), weights_of(block),
                   writes(Port::normed, draft.rows_of(block, whose)), workspace()}};
  // Targets mark padding rows, which only batches with positions and those of pairs have.
  const bool pads = shape.positions || shape.pairs;
  if (pads) pass.operands.push_back(reads(Port::batch, draft.batch));
  return pass;
}

/// Adds what the passes of experts read and add to.
void add_choices(Pass& pass, const ProgramDraft& draft, BlockId block, Whose whose) {
  pass.cost.traffic += draft.shape.partial_sums;
  pass.operands.push_back(writes(Port::partial_sums, draft.sums_of(block, whose)));
  pass.operands.push_back(writes(Port::routing, draft.routing_of(block, whose)));
}

bool is_exchanged(const ProgramDraft& draft, BlockId block) {
  return draft.block(block).role == BlockRole::exchanged_expert;
}

/// Adds the rows that routers dispatch to the expert, from all ranks if they share it. `rows_sent`:
/// activations sent per row; one fp32 result per row comes back.
void add_rows(Pass& pass, const ProgramDraft& draft, BlockId block, std::uint64_t rows_sent,
              Whose whose = Whose::trained) {
  const ProgramShape& shape = draft.shape;
  pass.operands.push_back(reads(Port::routing_counts, draft.routing_of(block, whose)));
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
  add_choices(pass, draft, block, Whose::trained);
  if (draft.shares_norm(block)) {
    pass.operands.push_back(reads(Port::residual, draft.residual[block]));
  } else if (draft.residual[block] != kNone) {
    pass.operands.push_back(writes(Port::residual, draft.residual[block]));
    pass.cost.traffic += 2 * draft.shape.activation;
  }
  if (training) {
    pass.operands.push_back(block == draft.first_router
                                ? writes(Port::router_totals, draft.router_totals)
                                : updates(Port::router_totals, draft.router_totals));
    if (block == draft.last_router && !draft.shape.counts_step) {
      pass.operands.push_back(writes(Port::losses, draft.router_losses));
    }
  }
  return draft.add(std::move(pass));
}

PassId reference_router(ProgramDraft& draft, BlockId block) {
  Pass pass = through_router(draft, block, Whose::reference);
  add_choices(pass, draft, block, Whose::reference);
  return draft.add(std::move(pass));
}

PassId router_again(ProgramDraft& draft, BlockId block) {
  return draft.add(through_router(draft, block));
}

PassId router_losses(ProgramDraft& draft) {
  Pass pass = {.kernel = Kernel::router_losses,
               .block = draft.last_router,
               .curve = CostCurve::forward,
               .operands = {updates(Port::router_totals, draft.router_totals),
                            writes(Port::losses, draft.router_losses)}};
  for (const ValueId routing : draft.routing) {
    if (routing != kNone) pass.operands.push_back(reads(Port::all_routing_counts, routing));
  }
  return draft.add(std::move(pass));
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
                            draft.shares_norm(block)
                                ? writes(Port::normed_gradient, draft.normed_gradient[block])
                                : updates(Port::activation_gradient, draft.flow),
                            workspace()}};
  add_gradient(pass, draft, block);
  pass.operands.push_back(reads(Port::normed, draft.rows[block]));
  pass.operands.push_back(reads(Port::router_totals, draft.router_totals));
  return draft.add(std::move(pass));
}

PassId expert(ProgramDraft& draft, BlockId block, Whose whose) {
  const bool exchanged = is_exchanged(draft, block);
  Pass pass =
      forward_of_tile(draft, block, exchanged ? Kernel::exchanged_expert : Kernel::expert, whose);
  add_rows(pass, draft, block, 1, whose);
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

PassId result_norm(ProgramDraft& draft, BlockId block) {
  const BlockId router = draft.shape.first_of(block - 1);
  return draft.add({.kernel = Kernel::result_norm,
                    .block = block,
                    .curve = CostCurve::forward,
                    .cost = {.traffic = 3 * draft.shape.activation},
                    .operands = {reads(Port::input, draft.input[block]), weights_of(block),
                                 reads(Port::residual, draft.residual[router]),
                                 writes(Port::output, draft.output(block)), workspace()}});
}

PassId result_norm_backward(ProgramDraft& draft, BlockId block) {
  const BlockId router = draft.shape.first_of(block - 1);
  Pass pass = {
      .kernel = Kernel::result_norm_backward,
      .block = block,
      .curve = CostCurve::backward,
      .cost = {.traffic = 3 * draft.shape.activation},
      .operands = {reads(Port::input, draft.input[block]), weights_of(block),
                   reads(Port::activation_gradient, draft.flow),
                   writes(Port::result_gradient, draft.result_gradient[router]), workspace()}};
  add_gradient(pass, draft, block);
  return draft.add(std::move(pass));
}

}  // namespace ballast::model::passes
