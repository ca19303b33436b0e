#include "src/step/plan_types.h"
#include "tests/unit/step/interpreter.h"

// The part of the interpreter that knows updates and their rollback.

namespace ballast::step::named {

/// A speculative writeback leaves the values before it in the other slot.
void Interpreter::keep_old(const Operation& op, Role home, Role undo) {
  if (op.lane != Lane::writeback || op.speculation != Speculation::speculates) return;
  put(op, undo, held_[op.buffer(home)]);
}

/// At the start of a rollback the results of speculative updates are wrong wherever they are.
void Interpreter::undo_speculative_updates() {
  for (std::uint32_t b = 0; b < work_.blocks.size(); ++b) {
    if (!problem_.placement.blocks[b].speculates || !was_touched(b)) continue;
    for (Content& content : held_) {
      const bool values = content.what == What::weights || content.what == What::states;
      if (values && content.block == b && content.number == updates_[b]) content.undone = true;
    }
    --updates_[b];
  }
}

/// Old values in host memory return to the place of the update; on NVMe they were fetched there.
void Interpreter::undo(const Operation& op) {
  const BlockPlacement& home_tiers = problem_.placement.blocks[op.block];
  if (undoes_on_host(op.block)) {
    const Use place = op.use(Role::weights);
    Content old = weights(op.block, own(op.block));
    old.trained_only = trained_on_host(op.block);
    need(op, Role::undo_weights, old);
    old.extent = place.shard ? torn_home(op.block) : own(op.block);
    old.micro = updated_groups_[op.block];
    held_[place.buffer] = old;
  }
  if (home_tiers.optimizer == Tier::host) {
    need(op, Role::undo_states, states(op));
    held_[op.buffer(Role::states)] = states(op);
  }
}

Content Interpreter::updated(const Operation& op, Content weights) const {
  ++weights.micro;
  if (weights.micro < work_.blocks[op.block].sub_groups.size()) return weights;
  ++weights.number;
  weights.micro = 0;
  return weights;
}

void Interpreter::update(const Operation& op) {
  if (!is_trained(op.block)) return complain(op, "updates a frozen block");
  const BlockPlacement& home_tiers = problem_.placement.blocks[op.block];
  const bool speculates = op.speculation == Speculation::speculates;
  const bool gated = problem_.options.update == Update::gated && !speculates;
  if ((op.speculation != Speculation::none) != home_tiers.speculates) {
    complain(op, "is not the kind of update that the block has");
  }
  if (op.speculation == Speculation::redoes) undo(op);
  const std::uint64_t run = op.lag == 0 ? run_ : last_training_run_;
  const std::uint64_t target = due_[op.block] + (op.lag == 0 ? 1 : 0);
  if (gated != (op.lag == 1)) complain(op, "is not where this kind of update belongs");
  if (updates_[op.block] + 1 != target) complain(op, "is not once per step");
  if (op.sub_group != updated_groups_[op.block]) complain(op, "is not in the order of sub-groups");
  const Use place = op.use(Role::weights);
  // A rank needs only its shard of the data that it keeps.
  const bool torn = place.shard && held_[place.buffer].extent == torn_home(op.block);
  const Extent found = torn ? torn_home(op.block) : place.shard ? home(op.block) : own(op.block);
  if (place.shard && own(op.block) == home(op.block))
    complain(op, "updates a shard where it should not");
  const auto partly = [&](Extent extent) {
    Content content = weights(op.block, extent);
    content.micro = updated_groups_[op.block];
    content.trained_only = held_[place.buffer].trained_only;
    return content;
  };
  need(op, Role::weights, partly(found));
  need(op, Role::states, states(op));
  seen_uses_ -= 2;
  const Extent extent = op.use(Role::gradient).shard ? sums(op.block) : own(op.block);
  need(op, Role::gradient, gradient(op, run, extent));
  if (gated) {
    need(op, Role::verdict, {What::verdict, 0, 0, run});
  } else if (!speculates) {
    need(op, Role::statistics, {What::statistics, op.block, 0, run});
  }
  if (speculates && undoes_on_host(op.block)) {
    // Complete when all sub-groups have been copied.
    Content old = updated(op, partly(own(op.block)));
    old.number = updates_[op.block];
    put(op, Role::undo_weights, old);
  }
  if (speculates && home_tiers.optimizer == Tier::host) put(op, Role::undo_states, states(op));
  const Content after = updated(op, partly(place.shard ? torn_home(op.block) : own(op.block)));
  ++updated_groups_[op.block];
  put(op, Role::states, states(op));
  put(op, Role::weights, after);
  if (after.micro > 0) return;
  ++updates_[op.block];
  updated_groups_[op.block] = 0;
}

/// Reads weights as they are kept, all of them up to date.
void Interpreter::decode(const Operation& op) {
  if (!work_.blocks[op.block].is_coded()) complain(op, "decodes weights without codes");
  need(op, Role::weights_source, weights(op.block, Extent::whole));
  Content decoded = weights(op.block, Extent::whole);
  decoded.decoded = true;
  put(op, Role::weights, decoded);
}

}  // namespace ballast::step::named
