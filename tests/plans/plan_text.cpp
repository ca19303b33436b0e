#include "tests/plans/plan_text.h"

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <span>
#include <string_view>
#include <tuple>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "ballast/core/error.h"
#include "ballast/core/memory.h"
#include "ballast/plan/simulator.h"
#include "ballast/state/checksum.h"
#include "ballast/step/labels.h"

#include "tests/plans/plan_names.h"

namespace ballast::plans {
namespace {

using plan::BufferId;
using plan::kNoBuffer;
using plan::kNoOp;
using plan::Operation;
using plan::OpId;
using plan::Plan;
using plan::Schedule;

constexpr std::array kPlanNames = {"first",      "steady",  "flush",          "rollback",
                                   "evaluation", "partial", "partial_steady", "fill",
                                   "refill",     "read",    "read_part"};

/// Pairs of plans of which the second may follow the first.
constexpr std::array<std::pair<const char*, const char*>, 33> kSeams = {
    {{"fill", "first"},
     {"fill", "evaluation"},
     {"fill", "read"},
     {"refill", "first"},
     {"first", "steady"},
     {"first", "flush"},
     {"first", "rollback"},
     {"first", "partial_steady"},
     {"steady", "steady"},
     {"steady", "flush"},
     {"steady", "rollback"},
     {"steady", "partial_steady"},
     {"steady", "evaluation"},
     {"steady", "read"},
     {"partial", "steady"},
     {"partial", "flush"},
     {"partial_steady", "steady"},
     {"partial_steady", "flush"},
     {"partial_steady", "rollback"},
     {"partial_steady", "evaluation"},
     {"flush", "first"},
     {"flush", "partial"},
     {"flush", "evaluation"},
     {"flush", "read"},
     {"flush", "rollback"},
     {"rollback", "first"},
     {"rollback", "evaluation"},
     {"rollback", "read"},
     {"evaluation", "first"},
     {"evaluation", "evaluation"},
     {"evaluation", "read"},
     {"read", "first"},
     {"read_part", "read"}}};

/// Exact and readable: doubles in hexadecimal.
std::string exact(double value) {
  return fmt::format("{:a}", value);
}

std::string_view speculation_name(plan::Speculation speculation) {
  constexpr std::string_view kNames[] = {"", "speculates", "redoes"};
  return kNames[static_cast<std::size_t>(speculation)];
}

/// Fields that have their usual value are left out.
std::string describe(OpId id, const Operation& operation, const std::vector<std::string>& buffers) {
  std::string text = fmt::format("{} {} {} block {} micro {}", id, lane_name(operation.lane),
                                 action_name(operation), operation.block, operation.micro);
  const auto add = [&](std::string_view name, const std::string& value) {
    text += fmt::format(" {} {}", name, value);
  };
  if (operation.sub_group > 0) add("sub_group", std::to_string(operation.sub_group));
  if (operation.lag > 0) add("lag", std::to_string(operation.lag));
  if (operation.speculation != plan::Speculation::none) {
    text += fmt::format(" {}", speculation_name(operation.speculation));
  }
  if (step::is_reference(operation)) text += " reference";
  if (!operation.condition.always()) add("if", condition_name(operation.condition));
  if (operation.unless) add("unless", condition_name(*operation.unless));
  if (operation.likelihood != 1.0F) add("likelihood", exact(operation.likelihood));
  if (operation.token_share != 1.0F) add("token_share", exact(operation.token_share));
  if (operation.bytes > 0) add("bytes", std::to_string(operation.bytes));
  if (operation.offset > 0) add("offset", std::to_string(operation.offset));
  if (operation.flops != 0.0) add("flops", exact(operation.flops));
  if (operation.traffic > 0) add("traffic", std::to_string(operation.traffic));
  std::vector<std::string> uses;
  for (const plan::Use& use : uses_by_role(operation)) {
    uses.push_back(fmt::format("{}:{}:{}{}", role_name(operation, use), buffers[use.buffer],
                               use.writes ? "w" : "r", use.shard ? ":shard" : ""));
  }
  std::vector<OpId> after = operation.after;
  std::sort(after.begin(), after.end());
  return fmt::format("{} {{{}}} <- {{{}}}\n", text, fmt::join(uses, "; "), fmt::join(after, " "));
}

std::string text_of(const Plan& plan, const std::vector<std::string>& buffers) {
  if (plan.operations.empty()) return "";
  std::string text = fmt::format("plan micro_batches {}{}{}{}\n", plan.micro_batches,
                                 plan.gate == kNoOp ? "" : fmt::format(" gate {}", plan.gate),
                                 plan.applies_updates ? " applies_updates" : "",
                                 plan.leaves_updates ? " leaves_updates" : "");
  for (OpId id = 0; id < plan.operations.size(); ++id) {
    text += describe(id, plan.operations[id], buffers);
  }
  return text;
}

std::string text_of_buffers(const step::Problem& problem, const step::Placement& place,
                            const step::Options& options, const Schedule& schedule,
                            const std::vector<std::string>& names) {
  const auto name = [&](BufferId id) { return id == kNoBuffer ? "none" : names[id]; };
  std::vector<std::string> lines;
  for (BufferId id = 0; id < names.size(); ++id) {
    const plan::Buffer& buffer = schedule.buffers[id];
    lines.push_back(fmt::format("{} {}: {} {}\n", to_string(buffer.tier), to_string(buffer.kind),
                                names[id], buffer.bytes));
  }
  std::sort(lines.begin(), lines.end());
  std::string text = fmt::format("{}", fmt::join(lines, ""));
  const auto add = [&](std::string_view what, const std::vector<BufferId>& ids) {
    std::vector<std::string> listed;
    for (const BufferId id : ids) listed.push_back(name(id));
    text += fmt::format("{}: {}\n", what, fmt::join(listed, "; "));
  };
  add("weight homes", schedule.weight_home);
  add("trained homes", schedule.trained_home);
  for (const auto& homes : schedule.state_home) add("state homes", homes);
  add("batches", schedule.batch_host);
  add("workspace and staging",
      {schedule.workspace.front(), schedule.weight_staging, schedule.state_staging,
       schedule.activation_staging, schedule.gradient_staging});
  std::map<std::pair<std::string_view, std::string_view>, Bytes> sums;
  for (const plan::Buffer& buffer : step::sum_buffers(problem, place, options)) {
    sums[{to_string(buffer.tier), to_string(buffer.kind)}] += buffer.bytes;
  }
  for (const auto& [line, bytes] : sums) {
    text += fmt::format("sum {} {}: {}\n", line.first, line.second, bytes);
  }
  return text;
}

std::string text_of_placement(const engine::Blueprint& blueprint) {
  const step::Options& options = blueprint.options;
  std::string text = fmt::format(
      "micro_batches {} x {} x {} order {} update {} buffers {} {} {} {} {} {} checkpoints {}\n",
      blueprint.micro_batches, blueprint.shape.sequences, blueprint.shape.length,
      static_cast<int>(options.order), static_cast<int>(options.update),
      options.buffers.weight_slots, options.buffers.gradient_slots, options.buffers.weight_staging,
      options.buffers.state_staging, options.buffers.activation_staging,
      options.buffers.gradient_staging, options.kept_checkpoints);
  const auto kept_name = [](step::Kept kept) {
    if (kept == step::Kept::nothing) return "";
    return kept == step::Kept::all ? " keeps" : " keeps attention";
  };
  for (const step::BlockPlacement& block : blueprint.placement.blocks) {
    text += fmt::format("weights {} states {} activations {} gradients {}{}{}\n",
                        to_string(block.weights), to_string(block.optimizer),
                        to_string(block.activations), to_string(block.gradients),
                        kept_name(block.kept), block.speculates ? " speculates" : "");
  }
  return text;
}

std::string text_of_seams(const AllPlans& all) {
  std::string text;
  for (const auto& [before, next] : kSeams) {
    const Plan& from = all.find(before);
    const Plan& to = all.find(next);
    if (from.operations.empty() || to.operations.empty()) continue;
    text += fmt::format("{} -> {}\n", before, next);
    const auto edges = plan::seam(from, to);
    for (OpId id = 0; id < edges.size(); ++id) {
      if (edges[id].empty()) continue;
      std::vector<OpId> after = edges[id];
      std::sort(after.begin(), after.end());
      text += fmt::format("{} {} <- {{{}}}\n", id, action_name(to.operations[id]),
                          fmt::join(after, " "));
    }
  }
  return text;
}

/// Logarithms of other versions of the C library may differ in their last bit.
std::string seconds(double value) {
  return fmt::format("{:.12g}", value);
}

std::string text_of_simulation(AllPlans& all, const plan::Rates& rates) {
  Schedule& schedule = all.schedule;
  schedule.first = all.find("first");
  schedule.steady = all.find("steady");
  const plan::Prediction prediction = plan::simulate(schedule, rates, {});
  std::string text = fmt::format("{}: step {}\n", rates.name, seconds(prediction.step_seconds));
  for (const plan::Lane lane : plan::lanes_of(schedule.devices)) {
    const auto index = static_cast<std::size_t>(lane);
    text += fmt::format("{}: busy {} stalled {} bytes {}\n", lane_name(lane),
                        seconds(prediction.busy_seconds[index]),
                        seconds(prediction.stalled_seconds[index]), prediction.bytes[index]);
  }
  for (const auto& bound : prediction.bounds) {
    text += fmt::format("bound {} {}\n", lane_name(bound.lane), seconds(bound.seconds));
  }
  return text;
}

}  // namespace

std::vector<std::string> section_names() {
  std::vector<std::string> names = {"placement", "buffers"};
  names.insert(names.end(), kPlanNames.begin(), kPlanNames.end());
  names.emplace_back("seams");
  names.emplace_back("simulated");
  return names;
}

const Plan& AllPlans::find(const std::string& name) const {
  const auto found = std::find_if(plans.begin(), plans.end(),
                                  [&](const Named& named) { return named.name == name; });
  expects(found != plans.end(), "plans: there is no plan of that name");
  return found->plan;
}

AllPlans build_plans(const step::Problem& problem, const step::Placement& place,
                     const step::Options& options) {
  const auto blocks = static_cast<std::uint32_t>(problem.blocks.size());
  const std::uint32_t some = std::max(1U, problem.micro_batches - 1);
  AllPlans all;
  all.schedule = step::build(problem, place, options);
  const bool trains = options.purpose == step::Purpose::training;
  const auto partial = [&](bool applies) {
    return trains ? step::build_partial_step(problem, place, options, some, applies) : Plan{};
  };
  const Plan plans[] = {
      all.schedule.first,
      all.schedule.steady,
      all.schedule.flush,
      all.schedule.rollback,
      all.schedule.evaluation,
      partial(false),
      partial(true),
      step::build_fill(problem, place, options),
      step::build_fill(problem, place, options, step::kHomesInMemory),
      step::build_read(problem, place, options, 0, blocks),
      step::build_read(problem, place, options, blocks / 2, 1, step::homes_on(Tier::host))};
  static_assert(std::size(plans) == kPlanNames.size());
  for (std::size_t i = 0; i < kPlanNames.size(); ++i) {
    all.plans.push_back({kPlanNames[i], in_normal_order(plans[i])});
  }
  return all;
}

namespace {

void require_unique(const std::vector<std::string>& names) {
  std::set<std::string_view> seen;
  for (const std::string& name : names) {
    if (!seen.insert(name).second) {
      throw Error(ErrorCategory::state, fmt::format("plans: two buffers are named '{}'", name));
    }
  }
}

}  // namespace

std::vector<PlanSection> dump_plans(const step::Problem& problem, const step::Placement& place,
                                    const step::Options& options,
                                    const std::vector<plan::Rates>& rates) {
  AllPlans all = build_plans(problem, place, options);
  std::vector<const Plan*> plans;
  for (const AllPlans::Named& named : all.plans) plans.push_back(&named.plan);
  const std::vector<std::string> buffers = buffer_names(all.schedule.buffers, plans);
  require_unique(buffers);
  std::vector<PlanSection> sections;
  sections.push_back({"buffers", text_of_buffers(problem, place, options, all.schedule, buffers)});
  for (const AllPlans::Named& named : all.plans) {
    sections.push_back({named.name, text_of(named.plan, buffers)});
  }
  sections.push_back({"seams", text_of_seams(all)});
  std::string simulated;
  if (options.purpose == step::Purpose::training) {
    for (const plan::Rates& machine : rates) simulated += text_of_simulation(all, machine);
  }
  sections.push_back({"simulated", std::move(simulated)});
  return sections;
}

std::vector<PlanSection> dump_plans(const engine::Blueprint& blueprint,
                                    const std::vector<plan::Rates>& rates) {
  std::vector<PlanSection> sections =
      dump_plans(blueprint.problem, blueprint.placement, blueprint.options, rates);
  sections.insert(sections.begin(), {"placement", text_of_placement(blueprint)});
  return sections;
}

std::string hash_of(const std::string& text) {
  if (text.empty()) return "-";
  return fmt::format("{:016x}",
                     state::checksum(ConstHostBytes(std::as_bytes(std::span<const char>(text)))));
}

}  // namespace ballast::plans
