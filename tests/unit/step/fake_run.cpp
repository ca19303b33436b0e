#include "tests/unit/step/fake_run.h"

#include <algorithm>
#include <map>
#include <utility>

#include <fmt/format.h>

#include "ballast/step/labels.h"

#include "tests/support/random_problem.h"

namespace ballast::step {
namespace {

using Seam = std::vector<std::vector<OpId>>;

/// Mostly short durations, sometimes long enough for all other operations to overtake.
double random_duration(Dice& dice) {
  const double base = static_cast<double>(dice.pick(1, 1000));
  return dice.pick(0, 9) == 0 ? 20.0 * base : base;
}

}  // namespace

std::vector<plan::Span> fake_spans(const std::vector<const Plan*>& runs, std::uint64_t seed,
                                   bool one_at_a_time) {
  Dice dice(seed);
  std::map<std::pair<const Plan*, const Plan*>, Seam> seams;
  std::vector<plan::Span> spans;
  std::vector<double> lane_free(plan::lane_count(plan::kMaxDevices), 0.0);
  std::vector<double> ended;         // ends in the current run
  std::vector<double> ended_before;  // ends in the previous run
  double finished = 0.0;             // end of the last run but one
  double finished_before = 0.0;      // end of the previous run
  for (std::size_t r = 0; r < runs.size(); ++r) {
    const Plan& plan = *runs[r];
    Seam joins(plan.operations.size());
    if (r > 0) {
      const auto [found, fresh] = seams.try_emplace({runs[r - 1], &plan});
      if (fresh) found->second = plan::seam(*runs[r - 1], plan);
      joins = found->second;
    }
    ended.assign(plan.operations.size(), 0.0);
    double finish = finished_before;
    for (OpId id = 0; id < plan.operations.size(); ++id) {
      const Operation& op = plan.operations[id];
      // Disk requests start in plan order and end in any order.
      double& free = lane_free[plan::lane_number(op)];
      double start = std::max(free, finished);
      for (const OpId before : op.after) start = std::max(start, ended[before]);
      for (const OpId before : joins[id]) start = std::max(start, ended_before[before]);
      ended[id] = start + random_duration(dice);
      free = one_at_a_time || plan::stream_of(op) ? ended[id] : start;
      finish = std::max(finish, ended[id]);
      spans.push_back({&plan, id, r + 1, start, ended[id]});
    }
    std::swap(ended, ended_before);
    finished = std::exchange(finished_before, finish);
  }
  return spans;
}

std::vector<std::uint64_t> serial_result(const Schedule& schedule,
                                         const std::vector<const Plan*>& runs) {
  FakeMachine machine(schedule.buffers.size());
  std::uint64_t number = 0;
  for (const Plan* plan : runs) {
    ++number;
    for (const Operation& op : plan->operations) machine.perform(op, number);
  }
  return machine.values();
}

std::vector<std::string> find_conflicts(const Schedule& schedule,
                                        const std::vector<plan::Span>& spans) {
  std::vector<std::string> conflicts;
  std::vector<double> written(schedule.buffers.size(), 0.0);
  std::vector<double> used(schedule.buffers.size(), 0.0);
  for (const plan::Span& span : spans) {
    const auto& uses = span.operation().uses;
    for (const Use& use : uses) {
      const double free = use.writes ? used[use.buffer] : written[use.buffer];
      if (span.start >= free) continue;
      conflicts.push_back(fmt::format("run {}, operation {} ({}): '{}' is still in use", span.run,
                                      span.op, to_string(span.operation().action),
                                      schedule.buffers[use.buffer].name));
    }
    for (const Use& use : uses) {
      used[use.buffer] = std::max(used[use.buffer], span.end);
      if (use.writes) written[use.buffer] = std::max(written[use.buffer], span.end);
    }
  }
  return conflicts;
}

}  // namespace ballast::step
