#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <map>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/core/error.h"
#include "ballast/plan/executor.h"
#include "ballast/step/plans.h"

#include "tests/support/random_problem.h"
#include "tests/unit/step/fake_run.h"

// Failures, interrupts and observers of overlapping plans.

namespace ballast::plan::executor_overlap_test {
namespace {

/// Host weights and NVMe states, gated: updates under the next forward pass, states read ahead.
struct Pipelined {
  step::BuildArguments placed = step::equal_blocks(4, 2, {Tier::host, Tier::nvme, Tier::device});
  Schedule schedule = build(placed);
};

/// The finished operations by run. Read it when nothing runs.
using Ran = std::set<std::pair<std::uint64_t, const Operation*>>;

/// Whether all predecessors of every member of `ran` have also run.
bool closed(const Ran& ran, const std::vector<const Plan*>& runs) {
  for (std::size_t r = 0; r < runs.size(); ++r) {
    const Plan& plan = *runs[r];
    const auto joins =
        r > 0 ? seam(*runs[r - 1], plan) : std::vector<std::vector<OpId>>(plan.operations.size());
    for (OpId id = 0; id < plan.operations.size(); ++id) {
      if (ran.count({r + 1, &plan.operations[id]}) == 0) continue;
      for (const OpId before : plan.operations[id].after) {
        if (ran.count({r + 1, &plan.operations[before]}) == 0) return false;
      }
      for (const OpId before : joins[id]) {
        if (ran.count({r, &runs[r - 1]->operations[before]}) == 0) return false;
      }
    }
  }
  return true;
}

TEST(Executor, AFailureInOverlappingRunsIsNamedAndStopsItsSuccessors) {
  const Pipelined pipelined;
  const Schedule& schedule = pipelined.schedule;
  const std::vector<const Plan*> runs = {&schedule.first, &schedule.steady, &schedule.steady};
  const step::OperationNames names(pipelined.placed.problem);
  for (const std::string_view victim :
       {"update", "fetch states", "forward", "offload gradient", "writeback states"}) {
    for (const bool serial : {false, true}) {
      Ran succeeded;
      std::mutex mutex;
      Executor executor(
          [&](const Operation& op, std::uint64_t run) {
            if (run == 2 && step::OperationNames::kind_of(op) == victim && op.block == 1) {
              throw Error(ErrorCategory::io, "broken");
            }
            const std::scoped_lock lock(mutex);
            succeeded.insert({run, &op});
          },
          names, {.serial = serial, .delay_seed = 5});
      try {
        step::submit_all(executor, runs, true);
        FAIL() << victim;
      } catch (const Error& error) {
        EXPECT_EQ(error.category(), ErrorCategory::io);
        const std::string message = error.what();
        EXPECT_EQ(message.rfind(victim, 0), 0U) << message;
        EXPECT_NE(message.find("of block"), std::string::npos) << message;
        EXPECT_NE(message.find(": broken"), std::string::npos) << message;
      }
      EXPECT_THROW(executor.submit(schedule.steady, 9), Error);
      EXPECT_THROW(executor.drain(), Error);
      const std::scoped_lock lock(mutex);
      EXPECT_TRUE(closed(succeeded, runs)) << victim;
    }
  }
}

TEST(Executor, AFailureOfAnotherKindIsNamedToo) {
  const Pipelined pipelined;
  Executor executor([](const Operation&, std::uint64_t) { throw std::runtime_error("odd"); },
                    [](const Operation&) { return std::string("the first one"); }, {});
  try {
    executor.submit(pipelined.schedule.first, 1);
    executor.drain();
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.category(), ErrorCategory::state);
    EXPECT_STREQ(error.what(), "the first one: odd");
  }
}

TEST(Executor, AnInterruptEndsTheWaitWithoutFinishingTheStep) {
  const Pipelined pipelined;
  const Schedule& schedule = pipelined.schedule;
  const std::size_t both = schedule.first.operations.size() + schedule.steady.operations.size();
  for (const std::size_t moment : {std::size_t{3}, schedule.first.operations.size() + 2}) {
    for (const bool serial : {false, true}) {
      std::atomic<bool> interrupted = false;
      std::atomic<std::size_t> ran = 0;
      Executor executor(
          [&](const Operation&, std::uint64_t) {
            if (++ran == moment) interrupted = true;
          },
          step::action_name, {.serial = serial, .interrupted = &interrupted});
      try {
        step::submit_all(executor, {&schedule.first, &schedule.steady}, false);
        FAIL();
      } catch (const Error& error) {
        EXPECT_EQ(error.category(), ErrorCategory::interrupted);
      }
      // Each lane may finish its current operation.
      EXPECT_LE(ran, moment + kLaneCount);
      EXPECT_LT(ran, both);
    }
  }
}

TEST(Executor, ADestroyedExecutorFinishesOnlyStartedOperations) {
  const Pipelined pipelined;
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    std::atomic<int> running = 0;
    {
      Executor executor(
          [&](const Operation&, std::uint64_t) {
            ++running;
            --running;
          },
          step::action_name, {.delay_seed = seed});
      executor.submit(pipelined.schedule.first, 1);
      executor.submit(pipelined.schedule.steady, 2);
    }
    EXPECT_EQ(running, 0);
  }
}

TEST(Executor, ShowsEveryOperationOnceInAnOrderThatItsEdgesAllow) {
  for (std::uint64_t seed = 0; seed < 12; ++seed) {
    const step::BuildArguments placed = step::random_problem(seed, {.devices = true});
    const Schedule schedule = build(placed);
    const auto runs = step::random_runs(placed, schedule, seed, 5);
    std::vector<Span> spans;
    const auto nothing = [](const Operation&, std::uint64_t) {};
    Executor executor(nothing, step::action_name,
                      {.finish = seed % 2 == 0 ? Handler(nothing) : nullptr,
                       .devices = schedule.devices,
                       .serial = seed % 4 == 0,
                       .delay_seed = seed,
                       .observer = [&](const Span& span) { spans.push_back(span); }});
    step::submit_all(executor, runs.runs, true);
    std::map<std::pair<std::uint64_t, OpId>, Span> by_operation;
    for (const Span& span : spans) {
      EXPECT_LE(span.start, span.end);
      EXPECT_EQ(span.plan, runs.runs[span.run - 1]);
      EXPECT_TRUE(by_operation.emplace(std::pair{span.run, span.op}, span).second);
    }
    std::vector<Span> in_plan_order;
    for (std::size_t r = 0; r < runs.runs.size(); ++r) {
      for (OpId id = 0; id < runs.runs[r]->operations.size(); ++id) {
        const auto found = by_operation.find({r + 1, id});
        ASSERT_NE(found, by_operation.end());
        in_plan_order.push_back(found->second);
      }
    }
    EXPECT_EQ(in_plan_order.size(), spans.size());
    // In real time, too, uses of a buffer do not overlap, nor do two operations of a lane.
    EXPECT_EQ(step::find_conflicts(schedule, in_plan_order), std::vector<std::string>{});
    std::vector<double> lane_free(lane_count(schedule.devices), 0.0);
    for (const Span& span : in_plan_order) {
      double& free = lane_free[lane_number(span.operation())];
      EXPECT_GE(span.start, free);
      free = span.end;
    }
  }
}

TEST(Executor, CountsBytesAndBusyTimePerLane) {
  const Pipelined pipelined;
  const Schedule& schedule = pipelined.schedule;
  LaneTotals seen;
  Executor executor([](const Operation&, std::uint64_t) {}, step::action_name,
                    {.observer = [&](const Span& span) {
                      seen.busy_seconds[static_cast<std::size_t>(span.operation().lane)] +=
                          span.end - span.start;
                    }});
  step::submit_all(executor, {&schedule.first, &schedule.steady}, false);
  const LaneTotals totals = executor.totals();
  for (std::size_t lane = 0; lane < kLaneCount; ++lane) {
    EXPECT_EQ(totals.bytes[lane],
              schedule.first.bytes_on(kLanes[lane]) + schedule.steady.bytes_on(kLanes[lane]));
    EXPECT_EQ(totals.busy_seconds[lane], seen.busy_seconds[lane]);
    EXPECT_EQ(totals.busy_by_device[lane], seen.busy_seconds[lane]) << "one device";
  }
}

TEST(Executor, CountsTheTimeOfEachDeviceAndTheirMean) {
  Plan plan;
  for (const std::uint8_t device : {0, 1, 2, 1}) {
    Operation operation;
    operation.device = device;
    operation.bytes = 5;
    plan.operations.push_back(operation);
  }
  plan.operations.push_back({.action = Action::fetch, .lane = Lane::fetch, .uses = {}});
  LaneSeconds seen{};
  Executor executor([](const Operation&, std::uint64_t) {}, step::action_name,
                    {.devices = 3, .observer = [&](const Span& span) {
                       seen[lane_number(span.operation())] += span.end - span.start;
                     }});
  executor.submit(plan, 1);
  executor.drain();
  const LaneTotals totals = executor.totals();
  double sum = 0.0;
  for (std::uint8_t device = 0; device < 3; ++device) {
    const std::size_t number = lane_number(Lane::compute, device);
    EXPECT_GT(seen[number], 0.0);
    EXPECT_EQ(totals.busy_by_device[number], seen[number]);
    EXPECT_GT(totals.stalled_by_device[number] + seen[number], 0.0);
    sum += seen[number];
  }
  EXPECT_DOUBLE_EQ(totals.busy_seconds[static_cast<std::size_t>(Lane::compute)], sum / 3.0);
  EXPECT_EQ(totals.bytes[static_cast<std::size_t>(Lane::compute)], 20U);
  const auto fetch = static_cast<std::size_t>(Lane::fetch);
  EXPECT_EQ(totals.busy_seconds[fetch], seen[lane_number(Lane::fetch, 0)]) << "not divided";
}

TEST(Executor, CountsRunningOperationsUpToTheMoment) {
  const Pipelined pipelined;
  const Schedule& schedule = pipelined.schedule;
  std::atomic<bool> may_end = false;
  std::atomic<int> held = 0;
  std::array<double, kLaneCount> finished{};
  Executor executor(
      [&](const Operation& operation, std::uint64_t) {
        if (operation.lane != Lane::compute) return;
        ++held;
        while (!may_end) std::this_thread::yield();
      },
      step::action_name, {.observer = [&](const Span& span) {
        finished[static_cast<std::size_t>(span.operation().lane)] += span.end - span.start;
      }});
  executor.submit(schedule.first, 1);
  while (held == 0) std::this_thread::yield();
  const auto lane = static_cast<std::size_t>(Lane::compute);
  const LaneTotals before = executor.totals();
  const LaneTotals later = executor.totals();
  EXPECT_EQ(finished[lane], 0.0);
  EXPECT_GT(later.busy_seconds[lane], before.busy_seconds[lane]);
  may_end = true;
  executor.drain();
  // Time counted before its end is not counted again.
  EXPECT_EQ(executor.totals().busy_seconds[lane], finished[lane]);
}

}  // namespace
}  // namespace ballast::plan::executor_overlap_test
