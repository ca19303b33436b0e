#include "src/step/plan_types.h"
#include "tests/unit/step/interpreter.h"

// The part of Interpreter for the norm before tiles and for the tiles of layers.

namespace ballast::step::named {

void Interpreter::normalize(const Operation& op) {
  current_weights_in_use(op, op.block);
  need(op, Role::input, of_run(What::activation, op, op.micro));
  pass(op, Role::workspace);
  if (op.block == work_.head()) {
    put(op, Role::rows, {What::head_rows, 0, op.micro, run_});
    return;
  }
  put(op, Role::rows, of_run(What::normed, op, op.micro));
  if (op.buffer(Role::row_sums) == kNoBuffer) return;
  put(op, Role::row_sums, of_run(What::output_sums, op, op.micro));
}

void Interpreter::tile_forward(const Operation& op) {
  const bool expert = work_.blocks[op.block].is_expert;
  expert ? need_expert(op) : current_weights_in_use(op, op.block);
  if (work_.packed && !expert) batch_of(op);
  pass(op, Role::workspace);
  need(op, Role::rows, {What::normed, work_.first_tile(op.block), op.micro, run_});
  need(op, Role::row_sums, {What::output_sums, op.block - 1, op.micro, run_});
  --seen_uses_;
  put(op, Role::row_sums, of_run(What::output_sums, op, op.micro));
  if (work_.last_tile(op.block) != op.block) return;
  put(op, Role::output, {What::activation, op.block + 1, op.micro, run_});
}

void Interpreter::tile_backward(const Operation& op) {
  if (work_.blocks[op.block].is_expert) return expert_backward(op);
  const std::uint32_t last = work_.last_tile(op.block);
  current_weights_in_use(op, op.block);
  if (work_.packed) batch_of(op);
  pass(op, Role::workspace);
  need(op, Role::rows, {What::normed, work_.first_tile(op.block), op.micro, run_});
  need(op, Role::gradient_flow, {What::flow, last + 1, op.micro, run_});
  if (op.block != last) {
    need(op, Role::row_sums, {What::normed_gradient, op.block + 1, op.micro, run_});
    --seen_uses_;
  }
  put(op, Role::row_sums, of_run(What::normed_gradient, op, op.micro));
  add_gradient(op);
  const BlockWork& block = work_.blocks[op.block];
  if (op.flops != 2.0 * block.forward_flops - block.frozen_flops + block.recomputed_flops) {
    complain(op, "has the wrong FLOPs");
  }
}

void Interpreter::norm_backward(const Operation& op) {
  if (work_.blocks[op.block].routes) return router_backward(op);
  current_weights_in_use(op, op.block);
  pass(op, Role::workspace);
  need(op, Role::input, of_run(What::activation, op, op.micro));
  need(op, Role::row_sums, {What::normed_gradient, op.block + 1, op.micro, run_});
  need(op, Role::gradient_flow, {What::flow, work_.last_tile(op.block) + 1, op.micro, run_});
  --seen_uses_;
  put(op, Role::gradient_flow, of_run(What::flow, op, op.micro));
  add_gradient(op);
}

}  // namespace ballast::step::named
