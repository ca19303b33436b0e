#include <algorithm>

#include "ballast/core/random.h"

#include "src/step/plan_types.h"
#include "tests/unit/step/interpreter.h"

// The part of Interpreter for routers and experts. A draw decides which experts have rows, so that
// every plan is run with many choices of its routers.

namespace ballast::step::named {

bool Interpreter::has_rows(std::uint32_t block, std::uint32_t micro, std::uint64_t run,
                           bool any_rank) const {
  const std::uint64_t draw = random_u64(work_.rows_bytes, run, block * 64 + micro) % 6;
  return draw < 2 || (any_rank && draw == 2);
}

bool Interpreter::has_rows_in_run(std::uint32_t block, std::uint64_t run, std::uint32_t micros,
                                  bool any_rank) const {
  for (std::uint32_t m = 0; m < micros; ++m) {
    if (has_rows(block, m, run, any_rank)) return true;
  }
  return false;
}

bool Interpreter::was_touched(std::uint32_t block) const {
  if (!is_trained(block)) return false;
  if (problem_.options.expert_updates == ExpertUpdates::all) return true;
  return !work_.blocks[block].is_expert ||
         has_rows_in_run(block, last_training_run_, last_micro_batches_, work_.world > 1);
}

void Interpreter::route(const Operation& op) {
  current_weights_in_use(op, op.block);
  need(op, Role::input, of_run(What::activation, op, op.micro));
  if (work_.packed) need(op, Role::batch, {What::batch, 0, op.micro, run_});
  pass(op, Role::workspace);
  put(op, Role::rows, of_run(What::normed, op, op.micro));
  // The backward pass only needs the rows again.
  if (op.buffer(Role::routing) == kNoBuffer) return;
  put(op, Role::row_sums, of_run(What::output_sums, op, op.micro));
  put(op, Role::routing, of_run(What::routing, op, op.micro + 1));
  if (!training_) return;
  const auto previous = previous_router(op.block);
  if (previous != op.block) {
    need(op, Role::router_totals, {What::router_totals, previous, op.micro, run_});
    --seen_uses_;
  }
  put(op, Role::router_totals, of_run(What::router_totals, op, op.micro));
  if (op.block == last_router()) pass(op, Role::losses);
}

std::uint32_t Interpreter::previous_router(std::uint32_t block) const {
  for (std::uint32_t b = block; b-- > 0;) {
    if (work_.blocks[b].routes) return b;
  }
  return block;
}

std::uint32_t Interpreter::last_router() const {
  return previous_router(static_cast<std::uint32_t>(work_.blocks.size()));
}

void Interpreter::gather_routing(const Operation& op) {
  need(op, Role::routing_source, of_run(What::routing, op, op.micro + 1));
  put(op, Role::routing, of_run(What::routing_of_ranks, op, op.micro + 1));
}

/// Micro-batch after micro-batch; an operation that reads the routings needs those so far.
void Interpreter::offload_routing(const Operation& op) {
  const What what = work_.world > 1 ? What::routing_of_ranks : What::routing;
  need(op, Role::routing_source, of_run(what, op, op.micro + 1));
  const BufferId id = op.buffer(Role::routing);
  const Content before = of_run(what, op, op.micro);
  if (op.micro > 0 && held_[id] != before) complain(op, "leaves a micro-batch out");
  put(op, Role::routing, of_run(what, op, op.micro + 1));
}

void Interpreter::need_routing(const Operation& op, std::uint32_t micros) {
  const BufferId id = op.buffer(Role::routing);
  if (id == kNoBuffer) return complain(op, "does not know the routing");
  const Content& held = held_[id];
  const What what = work_.world > 1 ? What::routing_of_ranks : What::routing;
  const bool known = held.what == what && held.block == work_.first_tile(op.block) &&
                     held.number == run_ && held.micro >= micros;
  if (!known) complain(op, "comes before the router");
}

bool Interpreter::holds(const Operation& op, const Condition& condition) {
  if (condition.always()) return true;
  if (condition.rows == Condition::Rows::in_step_before) {
    return last_training_run_ > 0 && last_training_run_ + 1 == run_ &&
           has_rows_in_run(op.block, last_training_run_, last_micro_batches_, condition.any_rank);
  }
  const bool one = condition.rows == Condition::Rows::in_micro_batch;
  need_routing(op, one ? condition.micro + 1 : plan_->micro_batches);
  return one ? has_rows(op.block, condition.micro, run_, condition.any_rank)
             : has_rows_in_run(op.block, run_, plan_->micro_batches, condition.any_rank);
}

bool Interpreter::is_idle(const Operation& op) {
  const bool wanted = holds(op, op.condition);
  const bool there = op.unless && holds(op, *op.unless);
  if (op.condition.reads_routing() || (op.unless && op.unless->reads_routing())) ++seen_uses_;
  const bool together = op.lane == Lane::gather || op.lane == Lane::reduce;
  const bool of_one = !op.condition.always() && !op.condition.any_rank;
  if (together && of_one) complain(op, "depends on the rows of one rank");
  return !wanted || there;
}

void Interpreter::rest(const Operation& op) {
  switch (op.action) {
    case Action::pack_gradient:
      if (problem_.placement.blocks[op.block].optimizer != Tier::device) break;
      put(op, Role::gradient, of_run(What::packed, op));
      break;
    case Action::reduce_gradient: {
      if (problem_.placement.blocks[op.block].optimizer != Tier::device) break;
      const bool in_place = op.buffer(Role::gradient_source) == kNoBuffer;
      put(op, Role::gradient, gradient(op, run_, in_place ? sums(op.block) : Extent::shard));
      break;
    }
    case Action::offload_gradient:
    case Action::fetch_gradient:
      put(op, Role::gradient, gradient(op, op.lag == 0 ? run_ : last_training_run_, own(op.block)));
      break;
    case Action::offload_statistics:
      put(op, Role::statistics, of_run(What::statistics, op));
      break;
    default:
      break;
  }
  if (op.plain.clears_when_idle != expects_zeros(op)) complain(op, "does not say what it clears");
  seen_uses_ = op.uses.size();
}

/// Whether its target becomes zeros when it has nothing to do. A gradient that is reduced in place
/// was cleared when it was packed.
bool Interpreter::expects_zeros(const Operation& op) const {
  const bool on_device = problem_.placement.blocks[op.block].optimizer == Tier::device;
  switch (op.action) {
    case Action::pack_gradient:
      return on_device;
    case Action::reduce_gradient:
      return on_device && op.buffer(Role::gradient_source) != kNoBuffer;
    case Action::offload_gradient:
    case Action::fetch_gradient:
    case Action::offload_statistics:
      return true;
    default:
      return false;
  }
}

/// An expert needs its weights only for rows.
void Interpreter::need_expert(const Operation& op) {
  need_routing(op, op.micro + 1);
  ++seen_uses_;
  // Rows of other ranks come to an expert that stays here.
  const bool of_all = work_.blocks[op.block].expert_parallel;
  if (has_rows(op.block, op.micro, run_, of_all)) return current_weights_in_use(op, op.block);
  ++seen_uses_;
}

void Interpreter::expert_backward(const Operation& op) {
  const std::uint32_t last = work_.last_tile(op.block);
  need_expert(op);
  pass(op, Role::workspace);
  const Content rows = {What::normed, work_.first_tile(op.block), op.micro, run_};
  need(op, Role::rows, rows);
  --seen_uses_;
  put(op, Role::rows, rows);
  need(op, Role::gradient_flow, {What::flow, last + 1, op.micro, run_});
  if (op.block != last) {
    need(op, Role::row_sums, {What::normed_gradient, op.block + 1, op.micro, run_});
    --seen_uses_;
  }
  put(op, Role::row_sums, of_run(What::normed_gradient, op, op.micro));
  // Plans that clear before the routers choose add in any case.
  const bool several = work_.world > 1;
  if (problem_.options.order == Order::micro_batch_major ||
      has_rows_in_run(op.block, run_, plan_->micro_batches, several)) {
    add_gradient(op);
  } else if (is_trained(op.block)) {
    ++seen_uses_;
  }
}

void Interpreter::router_backward(const Operation& op) {
  const Content gradient = {What::normed_gradient, op.block + 1, op.micro, run_};
  current_weights_in_use(op, op.block);
  pass(op, Role::workspace);
  need(op, Role::input, of_run(What::activation, op, op.micro));
  need(op, Role::rows, of_run(What::normed, op, op.micro));
  need(op, Role::router_totals, {What::router_totals, last_router(), op.micro, run_});
  need(op, Role::row_sums, gradient);
  --seen_uses_;
  put(op, Role::row_sums, gradient);
  need(op, Role::gradient_flow, {What::flow, work_.last_tile(op.block) + 1, op.micro, run_});
  --seen_uses_;
  put(op, Role::gradient_flow, of_run(What::flow, op, op.micro));
  add_gradient(op);
}

}  // namespace ballast::step::named
