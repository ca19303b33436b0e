#include "ballast/core/error.h"
#include "ballast/core/kernel_times.h"

#include "src/engine/handlers.h"
#include "src/engine/state_layout.h"

namespace ballast::engine {

using plan::Role;
using plan::Speculation;

namespace {

/// Returns the sub-group of the operation. `buffer(role, bytes)`: the memory of a role.
template <class Buffer>
cpu_adam::Shard shard_of(const CurrentOperation& at, Buffer buffer, Role weights, Role states,
                         const std::byte* gradient) {
  const plan::Operation& op = at.operation;
  return make_shard(at.blueprint(), op.block, op.sub_group,
                    buffer(weights, at.sizes().updated_weights(op.block)),
                    buffer(states, at.sizes().states(op.block, op.sub_group)), gradient);
}

/// Returns the undo buffers in host memory; null for values on NVMe.
cpu_adam::Shard undo_shard(const CurrentOperation& at, const std::byte* gradient) {
  const auto buffer = [&](Role role, Bytes bytes) {
    return at.has(role) ? at.host(role, bytes).data() : nullptr;
  };
  return shard_of(at, buffer, Role::undo_weights, Role::undo_states, gradient);
}

/// Returns whether the update may run, by the gate's decision. Speculative and eager updates do not
/// wait for it. With eager updates other blocks may already be updated, so a gradient that is not
/// finite is an error.
bool is_allowed(const CurrentOperation& at) {
  if (at.operation.speculation == Speculation::speculates) return true;
  if (!at.has(Role::statistics)) return !at.context.result.skipped;
  if (statistics_in(at, at.operation.buffer(Role::statistics)).non_finite == 0) return true;
  throw Error(ErrorCategory::numeric,
              "the gradient is not finite, and later blocks are already updated; set "
              "ballast.update to \"gated\", which skips such steps, or lower the learning rate");
}

}  // namespace

void run_update(const CurrentOperation& at) {
  const auto buffer = [&](Role role, Bytes bytes) { return at.host(role, bytes).data(); };
  const std::byte* gradient =
      buffer(Role::gradient, at.sizes().updated_gradient(at.operation.block));
  const cpu_adam::Shard shard = shard_of(at, buffer, Role::weights, Role::states, gradient);
  const cpu_adam::Updater& updater = at.modules().updater;
  if (at.operation.speculation == Speculation::redoes) {
    updater.restore(at.context.hyper.optimizer, shard, undo_shard(at, gradient));
  }
  if (!is_allowed(at)) return;
  if (at.operation.speculation != Speculation::speculates) {
    const KernelClock clock(KernelGroup::update);
    return updater.step(at.context.hyper, shard);
  }
  // The gate's coefficient is not known yet.
  cpu_adam::Hyper assumed = at.context.hyper;
  assumed.gradient_scale = at.context.unclipped_scale();
  const KernelClock clock(KernelGroup::update);
  updater.step(assumed, shard, undo_shard(at, gradient));
}

void run_update_on_device(const CurrentOperation& at) {
  const auto buffer = [&](Role role, Bytes bytes) { return at.device(role, bytes).raw(); };
  const std::byte* gradient =
      buffer(Role::gradient, at.sizes().updated_gradient(at.operation.block));
  const cpu_adam::Shard shard = shard_of(at, buffer, Role::weights, Role::states, gradient);
  if (is_allowed(at)) at.own().update.step(at.stream(), at.context.hyper, shard);
}

}  // namespace ballast::engine
