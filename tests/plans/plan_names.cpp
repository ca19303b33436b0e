#include "tests/plans/plan_names.h"

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <optional>
#include <utility>

#include <fmt/format.h>

#include "ballast/step/labels.h"

namespace ballast::plans {

using model::Kernel;
using plan::Action;
using plan::Buffer;
using plan::BufferId;
using plan::Kind;
using plan::kNoOp;
using plan::Lane;
using plan::Operation;
using plan::OpId;
using plan::Plan;
using plan::Role;

namespace {

/// Name of the data that an operation moves: "weights".
std::string_view object_of(const Operation& operation) {
  static constexpr std::string_view kValues[] = {"batch", "activation", "routing", "losses",
                                                 "rows"};
  return operation.payload == plan::Payload::value ? kValues[operation.label]
                                                   : plan::to_string(operation.payload);
}

std::string_view pass_name(Kernel kernel) {
  switch (kernel) {
    case Kernel::norm:
      return "normalize";
    case Kernel::router:
      return "route";
    case Kernel::head_evaluate:
      return "evaluate_head";
    case Kernel::head_train:
      return "train_head";
    case Kernel::head_scan:
      return "scan_head";
    case Kernel::head_differentiate:
      return "differentiate_head";
    case Kernel::head_end:
      return "end_head";
    default:
      return model::to_string(kernel).ends_with("backward") ? "backward" : "forward";
  }
}

}  // namespace

std::string action_name(const Operation& operation) {
  switch (operation.action) {
    case Action::compute:
    case Action::exchange:
      return std::string(pass_name(step::kernel_of(operation)));
    case Action::update:
      return "update_on_host";
    case Action::update_on_device:
      return "update_on_device";
    case Action::gate:
      return "gate";
    case Action::initialize:
      return "initialize";
    case Action::read:
      return "read";
    default:
      return fmt::format("{}_{}", plan::to_string(operation.action), object_of(operation));
  }
}

std::string role_name(const Operation& operation, const plan::Use& use) {
  static constexpr std::string_view kRoles[] = {
      "",           "",       "weights", "states",       "gradient",    "output_accumulator",
      "statistics", "losses", "verdict", "undo_weights", "undo_states", "workspace",
      "tokens",     "routing"};
  static constexpr std::string_view kPorts[] = {"weights",
                                                "output_weights",
                                                "batch",
                                                "input",
                                                "output",
                                                "gradient_flow",
                                                "intermediates",
                                                "attention",
                                                "rows",
                                                "row_sums",
                                                "normed_gradient",
                                                "residual",
                                                "result_gradient",
                                                "softmax_sums",
                                                "all_softmax_sums",
                                                "terms",
                                                "received",
                                                "routing",
                                                "routing",
                                                "routing",
                                                "router_totals",
                                                "losses",
                                                "pairs",
                                                "keys_values",
                                                "keys_values_gradient",
                                                "layer_inputs",
                                                "layer_inputs_gradient",
                                                "table_rows",
                                                "accumulator",
                                                "output_accumulator",
                                                "table_accumulator",
                                                "workspace"};
  static_assert(std::size(kRoles) == static_cast<std::size_t>(Role::first_port));
  static_assert(std::size(kPorts) == model::kPortCount);
  if (use.role >= Role::first_port) {
    return std::string(kPorts[static_cast<std::size_t>(use.role) - std::size(kRoles)]);
  }
  const bool source = use.role == Role::source;
  if (!source && use.role != Role::target) {
    return std::string(kRoles[static_cast<std::size_t>(use.role)]);
  }
  if ((source && operation.action == Action::pack) || operation.action == Action::clear) {
    return "accumulator";
  }
  // Activations, and zeros for homes of activations and gradients.
  const bool zeros = operation.action == Action::initialize &&
                     operation.payload != plan::Payload::weights &&
                     operation.payload != plan::Payload::states;
  if (zeros || step::moves(operation, step::MovedValue::activation)) {
    return source ? "input" : "output";
  }
  return fmt::format("{}{}", object_of(operation),
                     source && operation.action != Action::read ? "_source" : "");
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

/// Returns the name that the golden hashes were made with. Inputs of the head are activations in
/// transit, too.
std::string common_name(const std::string& name) {
  if (name == "decision") return "verdict";
  if (name.starts_with("dequantised weights")) return "decoded weights" + name.substr(19);
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
    if (step::runs(operation, Kernel::head_end) &&
        uses_buffer(operation, plan.operations[id].uses.front().buffer)) {
      return last == id ? kNoOp : last;
    }
    if (operation.lane != Lane::compute || operation.action == Action::decode) continue;
    if (!step::runs(operation, Kernel::head_differentiate)) return kNoOp;
    last = next;
  }
  return kNoOp;
}

}  // namespace

Plan in_normal_order(const Plan& plan) {
  std::vector<OpId> order(plan.operations.size());
  std::iota(order.begin(), order.end(), OpId{0});
  for (OpId id = 0; id < plan.operations.size(); ++id) {
    if (plan.operations[id].action != Action::clear) continue;
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
