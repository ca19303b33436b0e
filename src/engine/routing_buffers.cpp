#include "src/engine/routing_buffers.h"

#include <algorithm>

namespace ballast::engine {

bool RoutingBuffers::has_work(std::uint32_t micro_batches, const RowsByExpert& before) const {
  if (!holds(operation_.condition, micro_batches, before)) return false;
  return !operation_.unless || !holds(*operation_.unless, micro_batches, before);
}

bool RoutingBuffers::holds(const schedule::Condition& condition, std::uint32_t micro_batches,
                           const RowsByExpert& before) const {
  using Rows = schedule::Condition::Rows;
  if (condition.always()) return true;
  if (condition.rows == Rows::in_step_before) {
    return !before.empty() && before[block().layer][own_expert()] > 0;
  }
  const bool one = condition.rows == Rows::in_micro_batch;
  const std::uint32_t first = one ? condition.micro : 0;
  const std::uint32_t end = one ? condition.micro + 1 : micro_batches;
  const std::uint32_t ranks = condition.any_rank ? blueprint_.workload.world : 1;
  for (std::uint32_t m = first; m < end; ++m) {
    for (std::uint32_t r = 0; r < ranks; ++r) {
      if (choices_of(m, condition.any_rank ? r : shard_number(), own_expert()).count > 0) {
        return true;
      }
    }
  }
  return false;
}

model::SharedChoices RoutingBuffers::shared_choices(std::uint32_t micro) const {
  model::SharedChoices shared;
  for (std::uint32_t shard = 0; shard < block().experts; ++shard) {
    const std::uint64_t expert = block().expert + shard;
    shared.leaving.push_back(choices_of(micro, shard_number(), expert));
    shared.arriving.push_back(choices_of(micro, shard, own_expert()).count);
    for (std::uint32_t other = 0; other < block().experts; ++other) {
      shared.most = std::max(shared.most, choices_of(micro, other, expert).count);
    }
  }
  return shared;
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
      const auto starts = expert_starts(use.buffer, i / work.world, i % work.world);
      for (std::size_t e = 0; e < rows.size(); ++e) {
        rows[e] += static_cast<std::uint64_t>(starts[e + 1] - starts[e]);
      }
    }
    ++router;
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
