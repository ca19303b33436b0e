#include "tests/plans/plan_names.h"

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <optional>
#include <utility>

#include <fmt/format.h>

#include "tests/support/named_operation.h"

namespace ballast::plans {

using plan::Buffer;
using plan::BufferId;
using plan::Kind;
using plan::kNoOp;
using plan::Lane;
using plan::Operation;
using plan::OpId;
using plan::Plan;
using step::named::Action;
using step::named::action_of;
using step::named::Role;

std::string_view action_name(const Operation& operation) {
  static constexpr std::string_view kNames[] = {"upload_batch",
                                                "fetch_weights",
                                                "upload_weights",
                                                "gather_weights",
                                                "decode_weights",
                                                "normalize",
                                                "route",
                                                "gather_routing",
                                                "offload_routing",
                                                "forward",
                                                "evaluate_head",
                                                "train_head",
                                                "scan_head",
                                                "differentiate_head",
                                                "end_head",
                                                "offload_activation",
                                                "writeback_activation",
                                                "fetch_activation",
                                                "upload_activation",
                                                "clear_gradient",
                                                "backward",
                                                "pack_gradient",
                                                "reduce_gradient",
                                                "offload_gradient",
                                                "writeback_gradient",
                                                "fetch_gradient",
                                                "offload_statistics",
                                                "offload_losses",
                                                "gate",
                                                "fetch_states",
                                                "upload_states",
                                                "offload_weights",
                                                "offload_states",
                                                "update_on_host",
                                                "update_on_device",
                                                "writeback_weights",
                                                "writeback_states",
                                                "initialize",
                                                "read"};
  static_assert(std::size(kNames) == static_cast<std::size_t>(Action::read) + 1);
  return kNames[static_cast<std::size_t>(step::named::action_of(operation))];
}

std::string_view role_name(const Operation& operation, const plan::Use& use) {
  static constexpr std::string_view kNames[] = {"weights",
                                                "weights_source",
                                                "output_weights",
                                                "batch",
                                                "batch_source",
                                                "input",
                                                "output",
                                                "gradient_flow",
                                                "intermediates",
                                                "accumulator",
                                                "output_accumulator",
                                                "rows",
                                                "routing",
                                                "routing_source",
                                                "router_totals",
                                                "row_sums",
                                                "gradient",
                                                "gradient_source",
                                                "states",
                                                "states_source",
                                                "statistics",
                                                "statistics_source",
                                                "losses",
                                                "pairs",
                                                "losses_source",
                                                "verdict",
                                                "undo_weights",
                                                "undo_states",
                                                "workspace"};
  static_assert(std::size(kNames) == static_cast<std::size_t>(Role::workspace) + 1);
  return kNames[static_cast<std::size_t>(step::named::role_of(operation, use))];
}

std::vector<plan::Use> uses_by_role(const Operation& operation) {
  std::vector<plan::Use> uses = operation.uses;
  std::stable_sort(uses.begin(), uses.end(), [&](const plan::Use& a, const plan::Use& b) {
    return role_name(operation, a) < role_name(operation, b);
  });
  return uses;
}

std::string_view lane_name(Lane lane) {
  return plan::to_string(lane);
}

std::string condition_name(const plan::Condition& condition) {
  static constexpr std::string_view kNames[] = {"", "in_micro_batch", "in_step", "in_step_before"};
  std::string name(kNames[static_cast<std::size_t>(condition.rows)]);
  if (condition.rows == plan::Condition::Rows::in_micro_batch) {
    name += fmt::format(" {}", condition.micro);
  }
  return condition.any_rank ? name + ", any rank" : name;
}

namespace {

/// The common name of buffers that are numbered by their first use; "" for others.
std::string_view pool_of(const Buffer& buffer) {
  if (buffer.kind == Kind::accumulators) return "gradient accumulator";
  for (const char* const name : {"rows between tiles", "rows of the head"}) {
    if (buffer.name.starts_with(name)) return "rows between tiles";
  }
  return "";
}

/// Inputs of the head are activations in transit, too.
std::string common_name(const std::string& name) {
  for (const std::string_view input : {"input of head, ", "input of head 0, "}) {
    if (name.starts_with(input)) return "activations in transit " + name.substr(input.size());
  }
  return name;
}

}  // namespace

std::vector<std::string> buffer_names(const std::vector<Buffer>& buffers,
                                      const std::vector<const Plan*>& plans) {
  std::vector<std::string> names(buffers.size());
  std::vector<std::pair<std::string_view, std::size_t>> pools;
  const auto name_pooled = [&](BufferId id) {
    const std::string_view pool = pool_of(buffers[id]);
    if (pool.empty() || !names[id].empty()) return;
    auto found = std::find_if(pools.begin(), pools.end(),
                              [&](const auto& entry) { return entry.first == pool; });
    if (found == pools.end()) found = pools.insert(pools.end(), {pool, 0});
    names[id] = fmt::format("{} {}", pool, found->second++);
  };
  for (const Plan* const plan : plans) {
    for (const Operation& operation : plan->operations) {
      for (const plan::Use& use : uses_by_role(operation)) name_pooled(use.buffer);
    }
  }
  for (BufferId id = 0; id < buffers.size(); ++id) {
    name_pooled(id);
    if (!names[id].empty()) continue;
    names[id] = common_name(buffers[id].name);
  }
  return names;
}

namespace {

bool uses_buffer(const Operation& operation, BufferId buffer) {
  return std::any_of(operation.uses.begin(), operation.uses.end(),
                     [buffer](const plan::Use& use) { return use.buffer == buffer; });
}

/// The operation after which the clear operation `id` normally is; kNoOp if it is there.
OpId normal_place(const Plan& plan, OpId id) {
  OpId last = id;
  for (OpId next = id + 1; next < plan.operations.size(); ++next) {
    const Operation& operation = plan.operations[next];
    if (action_of(operation) == Action::end_head &&
        uses_buffer(operation, plan.operations[id].uses.front().buffer)) {
      return last == id ? kNoOp : last;
    }
    if (operation.lane != Lane::compute || action_of(operation) == Action::decode_weights) continue;
    if (action_of(operation) != Action::differentiate_head) return kNoOp;
    last = next;
  }
  return kNoOp;
}

}  // namespace

Plan in_normal_order(const Plan& plan) {
  std::vector<OpId> order(plan.operations.size());
  std::iota(order.begin(), order.end(), OpId{0});
  for (OpId id = 0; id < plan.operations.size(); ++id) {
    if (action_of(plan.operations[id]) != Action::clear_gradient) continue;
    const OpId place = normal_place(plan, id);
    if (place == kNoOp) continue;
    const auto from = std::find(order.begin(), order.end(), id);
    std::rotate(from, from + 1, std::find(order.begin(), order.end(), place) + 1);
  }
  std::vector<OpId> moved(order.size());
  for (OpId at = 0; at < order.size(); ++at) moved[order[at]] = at;
  const auto move = [&](OpId& id) {
    if (id != kNoOp) id = moved[id];
  };
  Plan ordered = plan;
  for (OpId at = 0; at < order.size(); ++at) {
    ordered.operations[at] = plan.operations[order[at]];
    for (OpId& id : ordered.operations[at].after) move(id);
  }
  for (plan::Boundary& boundary : ordered.boundaries) {
    move(boundary.first_writer);
    move(boundary.last_writer);
    for (OpId& id : boundary.first_readers) move(id);
    for (OpId& id : boundary.last_readers) move(id);
  }
  move(ordered.gate);
  move(ordered.first_head);
  move(ordered.last_head);
  return ordered;
}

}  // namespace ballast::plans
