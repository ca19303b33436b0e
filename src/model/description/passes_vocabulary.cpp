#include <initializer_list>

#include "src/model/description/program_draft.h"

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

namespace {

/// Writes the passes of the head, for all vocabulary tiles at once or tile by tile.
class HeadPasses {
 public:
  explicit HeadPasses(ProgramDraft& draft)
      : draft_(draft), shape_(draft.shape), head_(draft.program.head), tiles_(shape_.tiles()) {}

  /// Loss without gradients, for a vocabulary in one tile.
  PassId evaluate(Whose whose) {
    Pass pass = whole(Kernel::head_evaluate, whose);
    pass.cost.flops = draft_.block(head_).forward_flops;
    return draft_.add(std::move(pass));
  }

  /// Loss and gradients for all tiles.
  PassId train() {
    Pass pass = whole(Kernel::head_train, Whose::trained);
    pass.operands.push_back(writes(Port::activation_gradient, draft_.flow));
    add_gradient(pass, draft_, head_);
    for (std::uint32_t t = 0; t < tiles_; ++t) {
      // With pairs, the logits are computed twice.
      pass.cost.flops += ((is_trained(t) ? 3.0 : 2.0) + (shape_.pairs ? 1.0 : 0.0)) * flops_of(t);
      const BlockId block = shape_.block_of_tile(t);
      if (block == head_ || !is_trained(t)) continue;
      const SumId sum = shape_.tied ? draft_.tied_gradient[t] : draft_.gradient[block];
      pass.operands.push_back(adds_to(sum, Port::output_gradient));
    }
    if (draft_.logits != kNone) pass.operands.push_back(writes(Port::kept, draft_.logits));
    return draft_.add(std::move(pass));
  }

  /// The norm before the tiles.
  PassId norm(Whose whose) {
    const bool reference = whose == Whose::reference;
    const ValueId in = reference ? draft_.reference_input(head_) : draft_.input[head_];
    return draft_.add({.kernel = Kernel::norm,
                       .block = head_,
                       .reference = number_of(whose),
                       .curve = CostCurve::forward,
                       .cost = {.traffic = 2 * shape_.activation},
                       .operands = {reads(Port::input, in), weights_of(head_),
                                    writes(Port::normed, rows_of(whose)), workspace()}});
  }

  /// Adds a tile's logits to the row sums.
  PassId scan(std::uint32_t tile, Whose whose) {
    const bool shares = shape_.tensor > 1;
    Pass pass = visit(Kernel::head_scan, tile,
                      value(Port::normed, rows_of(whose),
                            shares ? OperandAccess::reads : OperandAccess::updates));
    if (shares) {
      pass.operands.push_back(tile == 0 ? writes(Port::row_sums, draft_.row_sums)
                                        : updates(Port::row_sums, draft_.row_sums));
    }
    pass.reference = number_of(whose);
    pass.cost.flops = flops_of(tile);
    // Gradients of pairs depend on the losses, so these are needed before the end.
    if (shape_.pairs && tile + 1 == tiles_) add_losses(pass, whose);
    return draft_.add(std::move(pass));
  }

  /// Adds a tile's contribution to the gradient of the norm and, unless the vocabulary is tied,
  /// computes the tile's gradient.
  PassId differentiate(std::uint32_t tile) {
    Pass pass = visit(Kernel::head_differentiate, tile, reads(Port::normed, draft_.rows[head_]));
    const BlockId block = pass.block;
    // The last tile runs first and overwrites the sums. With tensor parallelism each tile has its
    // own.
    const ValueId sums = draft_.rows_gradient[head_];
    pass.operands.push_back(tile + 1 == tiles_ ? writes(Port::partial_sums, sums)
                                               : updates(Port::partial_sums, sums));
    if (shape_.pairs) pass.operands.push_back(reads(Port::pairs, draft_.pairs));
    const bool gradient = !shape_.tied && is_trained(tile);
    if (gradient) add_gradient(pass, draft_, block);
    pass.cost.flops = (gradient ? 3.0 : 2.0) * flops_of(tile);
    return draft_.add(std::move(pass));
  }

  /// Computes the gradient of a tied tile alone.
  PassId differentiate_tied(std::uint32_t tile) {
    Pass pass = visit(Kernel::head_differentiate, tile, reads(Port::normed, draft_.rows[head_]));
    pass.operands.push_back(adds_to(draft_.tied_gradient[tile], Port::output_gradient));
    pass.cost.flops = 2.0 * flops_of(tile);
    return draft_.add(std::move(pass));
  }

  /// Writes the losses, unless the last scan has, and the gradient of the norm.
  PassId end(bool training) {
    Pass pass = {.kernel = Kernel::head_end,
                 .block = head_,
                 .curve = CostCurve::head,
                 .cost = {.traffic = 4 * shape_.activation},
                 .operands = {weights_of(head_), reads(Port::batch, draft_.batch),
                              reads(Port::normed, draft_.rows[head_]), workspace()}};
    if (!shape_.pairs) pass.operands.push_back(writes(Port::losses, draft_.losses));
    if (training) {
      pass.operands.push_back(reads(Port::input, draft_.input[head_]));
      pass.operands.push_back(gradient_of_rows(draft_, head_));
      pass.operands.push_back(writes(Port::activation_gradient, draft_.flow));
      add_gradient(pass, draft_, head_);
    }
    return draft_.add(std::move(pass));
  }

  /// Gathers the softmax sums of the tiles of all tensor places and merges them.
  std::vector<PassId> share_sums() {
    const Bytes others = shape_.row_sums * (shape_.tensor - 1);
    const PassId share =
        draft_.add({.kernel = Kernel::share_row_sums,
                    .block = head_,
                    .curve = CostCurve::head,
                    .cost = {.exchanged = others},
                    .operands = {reads(Port::row_sums, draft_.row_sums),
                                 writes(Port::all_row_sums, draft_.all_row_sums)}});
    const PassId merge =
        draft_.add({.kernel = Kernel::head_merge,
                    .block = head_,
                    .curve = CostCurve::head,
                    .cost = {.traffic = shape_.row_sums + others},
                    .operands = {updates(Port::normed, draft_.rows[head_]),
                                 reads(Port::all_row_sums, draft_.all_row_sums), workspace()}});
    return {share, merge};
  }

  /// Appends one stop for the norm and one per tile.
  void scan_all(std::vector<Stop>& stops, HeadForm form) {
    stops.push_back({.passes = both([this](Whose whose) { return norm(whose); }), .form = form});
    for (std::uint32_t t = 0; t < tiles_; ++t) {
      stops.push_back(
          {.passes = both([this, t](Whose whose) { return scan(t, whose); }), .form = form});
    }
    if (shape_.tensor == 1) return;
    for (const PassId pass : share_sums()) stops.back().passes.push_back(pass);
  }

  /// The reference model's losses, in one stop with the trained model's pass that reads them.
  std::vector<PassId> whole_reference() {
    if (!shape_.pairs) return {};
    if (tiles_ == 1) return {evaluate(Whose::reference)};
    std::vector<PassId> passes = {norm(Whose::reference)};
    for (std::uint32_t t = 0; t < tiles_; ++t) passes.push_back(scan(t, Whose::reference));
    return passes;
  }

  /// The head's blocks in descending order.
  [[nodiscard]] std::vector<BlockId> blocks() const {
    std::vector<BlockId> blocks;
    for (auto b = static_cast<BlockId>(shape_.blocks.size()); b-- > head_;) blocks.push_back(b);
    return blocks;
  }

 private:
  [[nodiscard]] ValueId rows_of(Whose whose) const {
    return whose == Whose::reference ? draft_.reference_head_rows : draft_.rows[head_];
  }

  /// A pass of the reference model, if there is one, followed by the same pass of the trained
  /// model.
  template <class MakePass>
  [[nodiscard]] std::vector<PassId> both(MakePass make) {
    if (!shape_.pairs) return {make(Whose::trained)};
    const PassId reference = make(Whose::reference);
    return {reference, make(Whose::trained)};
  }

  /// Adds the operands of passes over all tiles.
  Pass whole(Kernel kernel, Whose whose) {
    const bool reference = whose == Whose::reference;
    const ValueId in = reference ? draft_.reference_input(head_) : draft_.input[head_];
    Pass pass = {.kernel = kernel,
                 .block = head_,
                 .reference = number_of(whose),
                 .curve = CostCurve::head,
                 .operands = {weights_of(head_), reads(Port::input, in),
                              reads(Port::batch, draft_.batch), workspace()}};
    add_losses(pass, whose);
    for (std::uint32_t t = 0; t < tiles_; ++t) {
      const BlockId block = shape_.block_of_tile(t);
      if (block != head_) pass.operands.push_back(weights_of(block, Port::output_weights));
    }
    return pass;
  }

  /// Adds the operands of a visit to one tile.
  Pass visit(Kernel kernel, std::uint32_t tile, const Operand& rows) {
    const BlockId block = shape_.block_of_tile(tile);
    return {.kernel = kernel,
            .block = block,
            .number = tile,
            .curve = CostCurve::head,
            .operands = {weights_of(block), reads(Port::batch, draft_.batch), rows, workspace()}};
  }

  /// Adds the output for a pass that has the losses of all rows. The reference model's losses go to
  /// the trained model's pass, which compares its own with them and writes the weights of the rows.
  void add_losses(Pass& pass, Whose whose) const {
    const bool reference = whose == Whose::reference;
    if (!reference) pass.operands.push_back(writes(Port::losses, draft_.losses));
    if (!shape_.pairs) return;
    pass.operands.push_back(reference ? writes(Port::pairs, draft_.pairs)
                                      : updates(Port::pairs, draft_.pairs));
  }

  /// Returns whether the tile of the output matrix has a gradient.
  [[nodiscard]] bool is_trained(std::uint32_t tile) const {
    if (shape_.tied) return shape_.trains_tied();
    return draft_.block(shape_.block_of_tile(tile)).frozen_flops == 0.0;
  }

  /// Tiles have nearly the same size.
  [[nodiscard]] double flops_of(std::uint32_t tile) const {
    if (shape_.tied) return draft_.block(head_).forward_flops / tiles_;
    return draft_.block(shape_.block_of_tile(tile)).forward_flops;
  }

  ProgramDraft& draft_;
  const ProgramShape& shape_;
  BlockId head_;
  std::uint32_t tiles_;
};

/// Visits each tile twice: first for the sums of its logits, then for its gradients.
void visit_tiles(ProgramDraft& draft, std::vector<Stop>& stops, HeadForm form) {
  HeadPasses head(draft);
  head.scan_all(stops, form);
  const BlockId norm = draft.program.head;
  for (std::uint32_t t = draft.shape.tiles(); t-- > 0;) {
    Stop stop = {.passes = {head.differentiate(t)}, .form = form, .backward = true};
    if (t == 0 && draft.shape.tensor > 1) {
      stop.passes.push_back(sum_gradients(draft, norm, draft.shape.tiles()));
    }
    // The block with the norm finishes below, and a tied head has no other block.
    const BlockId block = draft.shape.block_of_tile(t);
    if (!draft.shape.tied && block != norm) stop.finishes = {block};
    stops.push_back(std::move(stop));
  }
  stops.push_back({.passes = {head.end(true)}, .finishes = {norm}, .form = form, .backward = true});
}

}  // namespace

void train_head(ProgramDraft& draft, std::vector<Stop>& stops) {
  if (draft.shape.tensor > 1) return visit_tiles(draft, stops, HeadForm::any);
  const bool choice = draft.program.one_pass.has_value();
  HeadPasses head(draft);
  Stop one = {.passes = head.whole_reference(),
              .finishes = head.blocks(),
              .form = choice ? HeadForm::one_pass : HeadForm::any,
              .backward = true};
  one.passes.push_back(head.train());
  stops.push_back(std::move(one));
  if (choice) visit_tiles(draft, stops, HeadForm::visits);
}

void evaluate_head(ProgramDraft& draft, std::vector<Stop>& stops) {
  HeadPasses head(draft);
  if (!draft.shape.visits_tiles()) {
    Stop one = {.passes = head.whole_reference()};
    one.passes.push_back(head.evaluate(Whose::trained));
    return stops.push_back(std::move(one));
  }
  head.scan_all(stops, HeadForm::any);
  // With pairs, the last scan has written the losses.
  if (!draft.shape.pairs) stops.push_back({.passes = {head.end(false)}});
}

PassId differentiate_tied(ProgramDraft& draft, BlockId block) {
  return HeadPasses(draft).differentiate_tied(block);
}

}  // namespace ballast::model::passes
