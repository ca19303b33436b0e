#include "src/engine/routing_buffers.h"

namespace ballast::engine {

bool RoutingBuffers::has_work(std::uint32_t micro_batches,
                              const std::vector<std::uint64_t>& before) const {
  switch (operation_.condition) {
    case schedule::Condition::none:
      return true;
    case schedule::Condition::rows_in_micro_batch:
      return expert_choices(operation_.micro).count > 0;
    case schedule::Condition::rows_in_step:
      break;
  }
  if (operation_.lag > 0) return before[operation_.block] > 0;
  for (std::uint32_t m = 0; m < micro_batches; ++m) {
    if (expert_choices(m).count > 0) return true;
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
      for (std::uint32_t m = 0; m < micro_batches; ++m) {
        const auto starts = expert_starts(use.buffer, m);
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
