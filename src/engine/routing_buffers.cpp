#include "src/engine/routing_buffers.h"

namespace ballast::engine {

bool RoutingBuffers::has_work(std::uint32_t micro_batches, const RowsByExpert& before) const {
  if (!holds(operation_.condition, micro_batches, before)) return false;
  return !operation_.unless || !holds(*operation_.unless, micro_batches, before);
}

bool RoutingBuffers::holds(const schedule::Condition& condition, std::uint32_t micro_batches,
                           const RowsByExpert& before) const {
  using Rows = schedule::Condition::Rows;
  if (condition.always()) return true;
  const std::uint64_t expert = model::RoutingCounts::expert_in(block(), shard_number());
  if (condition.rows == Rows::in_step_before) {
    return !before.empty() && before[block().layer][expert] > 0;
  }
  const bool one = condition.rows == Rows::in_micro_batch;
  const std::uint32_t first = one ? condition.micro : 0;
  const std::uint32_t end = one ? condition.micro + 1 : micro_batches;
  const std::uint32_t ranks = condition.any_rank ? blueprint_.workload.world : 1;
  for (std::uint32_t m = first; m < end; ++m) {
    const model::RoutingCounts routing = counts(operation_.buffer(Role::routing), m);
    for (std::uint32_t r = 0; r < ranks; ++r) {
      const std::uint32_t rank = condition.any_rank ? r : shard_number();
      if (routing.choices(rank, expert).count > 0) return true;
    }
  }
  return false;
}

void RoutingBuffers::note_routing(std::uint32_t micro_batches, StepResult& result) const {
  const schedule::Workload& work = blueprint_.workload;
  result.expert_rows.assign(blueprint_.model.config.num_layers, {});
  std::uint32_t router = 0;
  // The routings are in the order of the routers.
  for (const Use& use : operation_.uses) {
    if (use.role != Role::routing) continue;
    while (!work.blocks[router].routes) ++router;
    const model::BlockSpec& last = blueprint_.model.blocks[work.last_tile(router)];
    std::vector<std::uint64_t>& rows = result.expert_rows[last.layer];
    rows.resize(last.expert + last.experts);
    for (std::uint32_t i = 0; i < micro_batches * work.world; ++i) {
      const model::RoutingCounts routing = counts(use.buffer, i / work.world);
      for (std::size_t e = 0; e < rows.size(); ++e) {
        rows[e] += routing.choices(i % work.world, e).count;
      }
    }
    ++router;
  }
  const HostBytes bytes = host(Role::losses, work.losses_bytes);
  const auto* losses = reinterpret_cast<const double*>(bytes.data()) + first_router_loss();
  for (std::uint32_t m = 0; m < micro_batches; ++m) {
    result.balance_loss += losses[m * kRouterLosses] / micro_batches;
    result.router_z_loss += losses[m * kRouterLosses + 1] / micro_batches;
  }
}

}  // namespace ballast::engine
