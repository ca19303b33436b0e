#include "src/engine/routing_buffers.h"

namespace ballast::engine {

bool RoutingBuffers::has_work(std::uint32_t micro_batches,
                              const std::vector<std::uint64_t>& before) const {
  if (!holds(operation_.condition, micro_batches, before)) return false;
  return !operation_.unless || !holds(*operation_.unless, micro_batches, before);
}

bool RoutingBuffers::holds(const schedule::Condition& condition, std::uint32_t micro_batches,
                           const std::vector<std::uint64_t>& before) const {
  using Rows = schedule::Condition::Rows;
  if (condition.always()) return true;
  if (condition.rows == Rows::in_step_before) {
    return !before.empty() && before[operation_.block] > 0;
  }
  const bool one = condition.rows == Rows::in_micro_batch;
  const std::uint32_t first = one ? condition.micro : 0;
  const std::uint32_t end = one ? condition.micro + 1 : micro_batches;
  const std::uint32_t ranks = condition.any_rank ? blueprint_.workload.world : 1;
  for (std::uint32_t m = first; m < end; ++m) {
    for (std::uint32_t r = 0; r < ranks; ++r) {
      if (expert_choices(m, condition.any_rank ? r : shard_number()).count > 0) return true;
    }
  }
  return false;
}

void RoutingBuffers::note_routing(std::uint32_t micro_batches, StepResult& result) const {
  const schedule::Workload& work = blueprint_.workload;
  result.expert_rows.assign(work.blocks.size(), 0);
  std::uint32_t router = 0;
  // The routings are in the order of the routers.
  for (const Use& use : operation_.uses) {
    if (use.role != Role::routing) continue;
    while (!work.blocks[router].routes) ++router;
    const std::uint32_t last = work.last_tile(router);
    for (std::uint32_t tile = router + 1; tile <= last; ++tile) {
      if (!work.blocks[tile].is_expert) continue;
      const std::uint64_t expert = blueprint_.model.blocks[tile].expert;
      for (std::uint32_t i = 0; i < micro_batches * work.world; ++i) {
        const auto starts = expert_starts(use.buffer, i / work.world, i % work.world);
        result.expert_rows[tile] += static_cast<std::uint64_t>(starts[expert + 1] - starts[expert]);
      }
    }
    router = last;
  }
  const HostBytes bytes = host(Role::losses, work.losses_bytes);
  // Behind the losses of the head.
  const auto* losses = reinterpret_cast<const double*>(bytes.data()) + blueprint_.micro_batches;
  for (std::uint32_t m = 0; m < micro_batches; ++m) {
    result.balance_loss += losses[m * kRouterLosses] / micro_batches;
    result.router_z_loss += losses[m * kRouterLosses + 1] / micro_batches;
  }
}

}  // namespace ballast::engine
