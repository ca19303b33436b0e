#include "src/engine/counts.h"

#include <algorithm>
#include <span>
#include <vector>

#include "ballast/schedule/labels.h"

#include "src/engine/report.h"

namespace ballast::engine {

using schedule::BufferId;
using schedule::Role;

namespace {

/// Where the rows of each expert of a layer begin among the choices of a micro-batch: what the
/// router of rank owner_of(`shard`) has written; one more than there are experts.
std::span<const std::int32_t> expert_starts(const CurrentOperation& at, BufferId counts,
                                            std::uint32_t micro, std::uint32_t shard) {
  const Bytes bytes = at.workload().routing_bytes;
  const HostBytes all = counts_of_micro_batch(at.workload(), at.modules().store, counts, micro);
  return {reinterpret_cast<const std::int32_t*>(all.data() + shard * bytes),
          bytes / sizeof(std::int32_t)};
}

const model::BlockSpec& block_of(const CurrentOperation& at) {
  return at.blueprint().model.blocks[at.operation.block];
}

/// The expert of the operation's block that this rank has.
std::uint64_t own_expert(const CurrentOperation& at) {
  const model::BlockSpec& block = block_of(at);
  return block.expert + (block.experts > 1 ? at.shard_number() : 0);
}

/// `role`: of the buffer with the counts.
model::ExpertChoices choices_of(const CurrentOperation& at, Role role, std::uint32_t micro,
                                std::uint32_t shard, std::uint64_t expert) {
  const auto starts = expert_starts(at, at.operation.buffer(role), micro, shard);
  const auto first = static_cast<std::size_t>(starts[expert]);
  return {first, static_cast<std::size_t>(starts[expert + 1]) - first};
}

constexpr Role kCountsOfPass = schedule::role_of(model::Port::routing_counts);

bool holds(const CurrentOperation& at, const schedule::Condition& condition) {
  using Rows = schedule::Condition::Rows;
  if (condition.always()) return true;
  if (condition.rows == Rows::in_step_before) {
    const auto& rows = at.before.result.expert_rows;
    return !rows.empty() && rows[block_of(at).layer][own_expert(at)] > 0;
  }
  const bool one = condition.rows == Rows::in_micro_batch;
  const std::uint32_t first = one ? condition.micro : 0;
  const std::uint32_t end = one ? condition.micro + 1 : at.context.micro_batches;
  const std::uint32_t ranks = condition.any_rank ? at.workload().world : 1;
  for (std::uint32_t m = first; m < end; ++m) {
    for (std::uint32_t r = 0; r < ranks; ++r) {
      const std::uint32_t shard = condition.any_rank ? r : at.shard_number();
      if (choices_of(at, Role::counts, m, shard, own_expert(at)).count > 0) return true;
    }
  }
  return false;
}

}  // namespace

Bytes counts_of_micro_batch(const schedule::Workload& workload) {
  return workload.world * workload.routing_bytes;
}

HostBytes counts_of_micro_batch(const schedule::Workload& workload, state::Store& store,
                                BufferId counts, std::uint32_t micro) {
  const Bytes bytes = counts_of_micro_batch(workload);
  return store.host(counts, (micro + 1) * bytes).subspan(micro * bytes);
}

model::ExpertChoices expert_choices(const CurrentOperation& at) {
  return choices_of(at, kCountsOfPass, at.operation.micro, at.shard_number(), own_expert(at));
}

model::SharedChoices shared_choices(const CurrentOperation& at) {
  const auto choices = [&](std::uint32_t shard, std::uint64_t expert) {
    return choices_of(at, kCountsOfPass, at.operation.micro, shard, expert);
  };
  const model::BlockSpec& block = block_of(at);
  model::SharedChoices shared;
  for (std::uint32_t shard = 0; shard < block.experts; ++shard) {
    const std::uint64_t expert = block.expert + shard;
    shared.leaving.push_back(choices(at.shard_number(), expert));
    shared.arriving.push_back(choices(shard, own_expert(at)).count);
    for (std::uint32_t other = 0; other < block.experts; ++other) {
      shared.most = std::max(shared.most, choices(other, expert).count);
    }
  }
  return shared;
}

bool has_work(const CurrentOperation& at) {
  const schedule::Operation& operation = at.operation;
  return holds(at, operation.condition) && !(operation.unless && holds(at, *operation.unless));
}

void report_routing(const CurrentOperation& at) {
  const schedule::Workload& work = at.workload();
  const std::uint32_t micro_batches = at.context.micro_batches;
  StepResult& result = at.context.result;
  result.expert_rows.assign(at.blueprint().model.config.num_layers, {});
  std::uint32_t router = 0;
  // The counts are in the order of the routers.
  for (const schedule::Use& use : at.operation.uses) {
    if (use.role != Role::counts) continue;
    while (!work.blocks[router].routes) ++router;
    const model::BlockSpec& last = at.blueprint().model.blocks[work.last_tile(router)];
    std::vector<std::uint64_t>& rows = result.expert_rows[last.layer];
    rows.resize(last.expert + last.experts);
    for (std::uint32_t i = 0; i < micro_batches * work.world; ++i) {
      const auto starts = expert_starts(at, use.buffer, i / work.world, i % work.world);
      for (std::size_t e = 0; e < rows.size(); ++e) {
        rows[e] += static_cast<std::uint64_t>(starts[e + 1] - starts[e]);
      }
    }
    ++router;
  }
  const HostBytes report = at.host(Role::losses, work.losses_bytes);
  for (std::uint32_t m = 0; m < micro_batches; ++m) {
    const auto losses = reported<const double>(report, router_losses_in(at.blueprint(), m));
    result.balance_loss += losses[0] / micro_batches;
    result.router_z_loss += losses[1] / micro_batches;
  }
}

}  // namespace ballast::engine
