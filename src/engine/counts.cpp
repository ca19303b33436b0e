#include "src/engine/counts.h"

#include <vector>

#include "src/engine/report.h"
#include "src/model/compute/routing.h"

namespace ballast::engine {

using plan::BufferId;
using plan::Role;

namespace {

model::RoutingCounts counts_in(const CurrentOperation& at, BufferId counts, std::uint32_t micro) {
  return {routing_of(at, counts, micro), at.problem().sharers};
}

const model::BlockSpec& block_of(const CurrentOperation& at) {
  return at.blueprint().own().blocks[at.operation.block];
}

bool holds(const CurrentOperation& at, const plan::Condition& condition) {
  using Rows = plan::Condition::Rows;
  if (condition.always()) return true;
  const model::BlockSpec& block = block_of(at);
  const std::uint64_t expert = model::RoutingCounts::expert_in(block, at.shard_number());
  if (condition.rows == Rows::in_step_before) {
    const auto& rows = at.before.result.expert_rows;
    return !rows.empty() && rows[block.layer][expert] > 0;
  }
  const bool one = condition.rows == Rows::in_micro_batch;
  const std::uint32_t first = one ? condition.micro : 0;
  const std::uint32_t end = one ? condition.micro + 1 : at.context.micro_batches;
  const std::uint32_t ranks = condition.any_rank ? at.problem().sharers : 1;
  for (std::uint32_t m = first; m < end; ++m) {
    const model::RoutingCounts counts = counts_in(at, at.operation.buffer(Role::counts), m);
    for (std::uint32_t r = 0; r < ranks; ++r) {
      const std::uint32_t rank = condition.any_rank ? r : at.shard_number();
      if (counts.choices(rank, expert).count > 0) return true;
    }
  }
  return false;
}

}  // namespace

Bytes counts_of_micro_batch(const step::Problem& problem) {
  return problem.sharers * problem.table->routing_bytes();
}

HostBytes counts_of_micro_batch(const step::Problem& problem, state::Store& store, BufferId counts,
                                std::uint32_t micro) {
  const Bytes bytes = counts_of_micro_batch(problem);
  return store.host(counts, (micro + 1) * bytes).subspan(micro * bytes);
}

std::span<const std::int32_t> routing_of(const CurrentOperation& at, BufferId counts,
                                         std::uint32_t micro) {
  const HostBytes all = counts_of_micro_batch(at.problem(), at.modules().store, counts, micro);
  return {reinterpret_cast<const std::int32_t*>(all.data()), all.size() / sizeof(std::int32_t)};
}

bool has_work(const CurrentOperation& at) {
  const plan::Operation& operation = at.operation;
  return holds(at, operation.condition) && !(operation.unless && holds(at, *operation.unless));
}

void report_routing(const CurrentOperation& at) {
  const step::Problem& problem = at.problem();
  const step::ProgramTable& table = *problem.table;
  const std::uint32_t micro_batches = at.context.micro_batches;
  StepResult& result = at.context.result;
  result.expert_rows.assign(at.blueprint().own().config.num_layers, {});
  auto routing = table.values().counts.begin();
  // The counts are in the order of the routers.
  for (const plan::Use& use : at.operation.uses) {
    if (use.role != Role::counts) continue;
    const model::BlockId end = table.counting_in(*routing++).end;
    const model::BlockSpec& last = at.blueprint().own().blocks[end - 1];
    std::vector<std::uint64_t>& rows = result.expert_rows[last.layer];
    rows.resize(last.expert + last.pieces);
    for (std::uint32_t i = 0; i < micro_batches * problem.sharers; ++i) {
      const model::RoutingCounts counts = counts_in(at, use.buffer, i / problem.sharers);
      for (std::size_t e = 0; e < rows.size(); ++e) {
        rows[e] += counts.choices(i % problem.sharers, e).count;
      }
    }
  }
  const ReportPart part = report_parts(problem).back();
  const HostBytes report = at.host(Role::losses, part.at(problem.micro_batches));
  for (std::uint32_t m = 0; m < micro_batches; ++m) {
    const auto losses = part.in(report, m);
    result.balance_loss += losses[0] / micro_batches;
    result.router_z_loss += losses[1] / micro_batches;
  }
}

}  // namespace ballast::engine
