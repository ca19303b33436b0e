#include "src/engine/warm_up.h"

#include <algorithm>
#include <cstdint>
#include <set>
#include <tuple>

#include "ballast/core/error.h"
#include "ballast/step/labels.h"
#include "ballast/step/plans.h"

#include "src/engine/handlers.h"

namespace ballast::engine {
namespace {

using plan::Lane;
using plan::Operation;

/// False for updates, which would change weights and optimizer states. The updater loads their
/// kernels when it is made.
bool needs_kernels(const Operation& operation) {
  if (operation.action == plan::Action::update_on_device) return false;
  return operation.lane == Lane::compute || operation.lane == Lane::gather ||
         operation.lane == Lane::reduce;
}

/// The properties that select an operation's kernels, which every device loads: for a pass its
/// shape, and which of its ports are bound; for others the size of the block, and for a gather
/// whether it is in place and moves codes. Vocabulary tiles differ in their sizes.
auto kind_of(const Operation& operation, const Blueprint& blueprint) {
  std::uint64_t bound = 0;
  for (const plan::Use& use : operation.uses) {
    bound |= std::uint64_t{1} << static_cast<unsigned>(use.role);
  }
  const bool pass = operation.action == plan::Action::compute;
  const model::BlockSpec& block = blueprint.own().blocks[operation.block];
  const bool layer = block.kind == model::BlockKind::layer;
  const std::uint64_t size = layer ? block.elements : operation.block;
  const std::uint64_t shape =
      pass ? blueprint.problem.program().passes[step::pass_id(operation)].shape : size;
  return std::tuple(operation.device, operation.action, operation.payload, shape,
                    pass ? 0 : block.frozen_elements, operation.micro == 0, bound);
}

/// Pretends that the routers have dispatched a row to each expert, so that the kernels of experts
/// run too.
void give_rows_to_experts(Lanes& lanes, const plan::Plan& plan) {
  const Modules& modules = lanes.modules();
  const auto tokens = static_cast<std::int32_t>(modules.blueprint.shape.tokens());
  for (const Operation& operation : plan.operations) {
    const bool offloads = operation.action == plan::Action::offload;
    if (!offloads || !moves(operation, step::MovedValue::routing)) continue;
    const step::Problem& problem = modules.blueprint.problem;
    const HostBytes bytes = counts_of_micro_batch(
        problem, modules.store, operation.buffer(plan::Role::target), operation.micro);
    const std::size_t of_rank = problem.index->routing_bytes() / sizeof(std::int32_t);
    auto* const starts = reinterpret_cast<std::int32_t*>(bytes.data());
    for (std::size_t i = 0; i < problem.sharers * of_rank; ++i) {
      starts[i] = std::min(static_cast<std::int32_t>(i % of_rank), tokens);
    }
  }
}

}  // namespace

void warm_up(Lanes& lanes) {
  constexpr std::uint64_t kSubmission = 1;
  lanes.context(kSubmission).micro_batches = 1;
  const Blueprint& blueprint = lanes.modules().blueprint;
  const plan::Schedule& schedule = blueprint.schedule;
  std::set<decltype(kind_of(Operation(), blueprint))> done;
  for (const plan::Plan* plan : {&schedule.steady, &schedule.evaluation}) {
    give_rows_to_experts(lanes, *plan);
    for (const Operation& operation : plan->operations) {
      if (!needs_kernels(operation)) continue;
      if (!done.insert(kind_of(operation, blueprint)).second) continue;
      try {
        lanes.start(operation, kSubmission);
        if (lanes.is_queued(operation.lane)) lanes.finish(operation);
      } catch (const Error& error) {
        throw error.with_context(lanes.names()(operation));
      }
    }
  }
  lanes.clear_contexts();
}

}  // namespace ballast::engine
