#include "src/step/plan_types.h"
#include "tests/unit/step/interpreter.h"

// The part of Interpreter for the head and the tiles of the vocabulary.

namespace ballast::step::named {

void Interpreter::add_losses(const Operation& op) {
  const Content losses = {What::losses, 0, op.micro, run_};
  if (op.micro > 0 && held_[op.buffer(Role::losses)] != losses) {
    complain(op, "adds to losses that lack a micro-batch");
  }
  put(op, Role::losses, {What::losses, 0, op.micro + 1, run_});
}

void Interpreter::head(const Operation& op) {
  current_weights_in_use(op, op.block);
  need(op, Role::input, of_run(What::activation, op, op.micro));
  need(op, Role::batch, {What::batch, 0, op.micro, run_});
  pass(op, Role::workspace);
  std::uint32_t weights_of = work_.tied ? 0 : 1;
  std::uint32_t sums_of = weights_of;
  for (const Use& use : op.uses) {
    if (use.role == Role::output_weights) {
      const std::uint32_t block = work_.block_of_tile(weights_of++);
      ++seen_uses_;
      if (held_[use.buffer] != weights(block, Extent::whole)) complain(op, "needs other weights");
      if (updates_[block] != due_[block]) complain(op, "runs with a tile of another step");
    } else if (use.role == Role::output_accumulator) {
      const std::uint32_t tile = sums_of++;
      add_to(op, use, work_.tied ? What::tied_accumulator : What::accumulator,
             work_.block_of_tile(tile));
    }
  }
  if (weights_of != work_.vocabulary_tiles) complain(op, "does not use all tiles");
  add_losses(op);
  if (op.action == Action::evaluate_head) return;
  const std::uint32_t wanted = trains_tile(0) ? work_.vocabulary_tiles : work_.tied ? 0 : 1;
  if (sums_of != wanted) complain(op, "does not add to the sums of all tiles");
  if (work_.vocabulary_tiles > 1) put(op, Role::intermediates, {});
  put(op, Role::gradient_flow, of_run(What::flow, op, op.micro));
  add_gradient(op);
}

void Interpreter::scan_head(const Operation& op) {
  current_weights_in_use(op, op.block);
  need(op, Role::batch, {What::batch, 0, op.micro, run_});
  pass(op, Role::workspace);
  need(op, Role::rows, {What::head_rows, tile_of(op), op.micro, run_});
  --seen_uses_;
  put(op, Role::rows, {What::head_rows, tile_of(op) + 1, op.micro, run_});
}

void Interpreter::differentiate_head(const Operation& op) {
  const std::uint32_t tile = tile_of(op);
  current_weights_in_use(op, op.block);
  need(op, Role::batch, {What::batch, 0, op.micro, run_});
  pass(op, Role::workspace);
  need(op, Role::rows, {What::head_rows, work_.vocabulary_tiles, op.micro, run_});
  if (op.buffer(Role::row_sums) != kNoBuffer) {
    if (tile + 1 < work_.vocabulary_tiles) {
      need(op, Role::row_sums, {What::normed_gradient, work_.head() + tile + 1, op.micro, run_});
      --seen_uses_;
    }
    put(op, Role::row_sums, {What::normed_gradient, work_.head() + tile, op.micro, run_});
  } else if (!work_.tied) {
    complain(op, "adds nothing to the gradient of the norm");
  }
  if (!work_.tied && !trains_tile(tile)) {
    if (op.buffer(Role::accumulator) != kNoBuffer) complain(op, "has sums of a frozen tile");
    return;
  }
  if (!work_.tied) return add_to(op, op.use(Role::accumulator), What::accumulator, op.block);
  const Use sums = op.use(Role::output_accumulator);
  if (sums.buffer != kNoBuffer) add_to(op, sums, What::tied_accumulator, tile);
}

void Interpreter::end_head(const Operation& op) {
  current_weights_in_use(op, op.block);
  need(op, Role::batch, {What::batch, 0, op.micro, run_});
  pass(op, Role::workspace);
  need(op, Role::rows, {What::head_rows, work_.vocabulary_tiles, op.micro, run_});
  add_losses(op);
  if (!training_) return;
  need(op, Role::input, of_run(What::activation, op, op.micro));
  need(op, Role::row_sums, {What::normed_gradient, work_.head(), op.micro, run_});
  put(op, Role::gradient_flow, of_run(What::flow, op, op.micro));
  if (work_.tied || !trains_tile(0)) return add_gradient(op);
  // The first tile has already added its part of all micro-batches that pass the head together.
  const bool all = problem_.options.order == Order::layer_major;
  need(op, Role::accumulator,
       of_run(What::accumulator, op, all ? plan_->micro_batches : op.micro + 1));
  if (!op.use(Role::accumulator).writes) complain(op, "does not say that it writes sums");
}

}  // namespace ballast::step::named
