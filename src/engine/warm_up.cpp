#include "src/engine/warm_up.h"

#include <set>
#include <tuple>

#include "ballast/core/error.h"

namespace ballast::engine {
namespace {

using schedule::Lane;
using schedule::Operation;
using schedule::Role;

bool needs_kernels(const Operation& operation) {
  return operation.lane == Lane::compute || operation.lane == Lane::gather ||
         operation.lane == Lane::reduce;
}

/// The properties that select an operation's kernels. All layers use the same kernels.
auto kind_of(const Operation& operation, const schedule::Workload& workload) {
  // Tiles of the vocabulary differ in their sizes.
  const bool layer = workload.is_layer(operation.block);
  const std::uint32_t place = layer ? workload.first_layer() : operation.block;
  const auto has = [&](Role role) { return operation.buffer(role) != schedule::kNoBuffer; };
  return std::tuple(operation.action, place, operation.micro == 0, has(Role::workspace),
                    has(Role::weights_source), has(Role::intermediates));
}

}  // namespace

void warm_up(Lanes& lanes) {
  constexpr std::uint64_t kSubmission = 1;
  lanes.context(kSubmission).micro_batches = 1;
  const schedule::Schedule& schedule = lanes.modules().blueprint.schedule;
  const schedule::Workload& workload = lanes.modules().blueprint.workload;
  std::set<decltype(kind_of(Operation(), workload))> done;
  for (const schedule::Plan* plan : {&schedule.steady, &schedule.evaluation}) {
    for (const Operation& operation : plan->operations) {
      if (!needs_kernels(operation)) continue;
      if (!done.insert(kind_of(operation, workload)).second) continue;
      try {
        lanes.start(operation, kSubmission);
        if (schedule::is_queued(operation.lane)) lanes.finish(operation);
      } catch (const Error& error) {
        throw error.with_context(schedule::describe(operation, workload));
      }
    }
  }
  lanes.clear_contexts();
}

}  // namespace ballast::engine
