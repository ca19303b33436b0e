#include "ballast/plan/executor.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/core/error.h"

#include "src/plan/ordering.h"
#include "tests/support/random_problem.h"
#include "tests/unit/plan/streams.h"
#include "tests/unit/step/fake_run.h"

namespace ballast::plan::executor_test {
namespace {

/// Whether a FakeMachine gets the serial result in every mode: `execute(machine, options, submit)`
/// makes an executor with these options that works on `machine` and calls `submit` with it. The
/// machine has no lock, so the thread sanitizer reports a missing edge as a data race.
template <class Execute>
void expect_serial_results(Execute execute) {
  for (std::uint64_t seed = 0; seed < 25; ++seed) {
    const step::BuildArguments placed = step::random_problem(seed, {.devices = seed % 4 == 0});
    const Schedule schedule = build(placed);
    const auto runs = step::random_runs(placed, schedule, seed, 6);
    const auto expected = step::serial_result(schedule, runs.runs);
    const auto run = [&](ExecutorOptions options, bool patient) {
      options.devices = schedule.devices;
      step::FakeMachine machine(schedule.buffers.size());
      execute(machine, options,
              [&](Executor& executor) { step::submit_all(executor, runs.runs, patient); });
      return machine.values();
    };
    EXPECT_EQ(run({.serial = true}, true), expected) << seed;
    EXPECT_EQ(run({}, true), expected) << seed;
    EXPECT_EQ(run({}, false), expected) << seed;
    EXPECT_EQ(run({.max_on_stream = kMaxOnFastStream}, false), expected) << seed;
    EXPECT_EQ(run({.delay_seed = seed}, seed % 2 == 0), expected) << seed;
  }
}

TEST(Executor, LanesWithRandomDelaysGiveTheSerialResult) {
  expect_serial_results(
      [](step::FakeMachine& machine, const ExecutorOptions& options, auto submit) {
        Executor executor([&](const Operation& op, std::uint64_t n) { machine.perform(op, n); },
                          step::action_name, options);
        submit(executor);
      });
}

TEST(Executor, QueuedLanesGiveTheSerialResult) {
  std::map<std::size_t, std::size_t> most;  // number enqueued, by the maximum allowed
  expect_serial_results(
      [&](step::FakeMachine& machine, const ExecutorOptions& options, auto submit) {
        const auto work = [&](const Operation& op, std::uint64_t n) {
          if (options.delay_seed)
            std::this_thread::sleep_for(std::chrono::microseconds(n % 3 * 40));
          machine.perform(op, n);
        };
        Streams streams(work, options.devices);
        Executor executor([&](const Operation& op, std::uint64_t n) { streams.start(op, n); },
                          step::action_name, streams.options(options));
        submit(executor);
        std::size_t& seen = most[options.max_on_stream];
        seen = std::max(seen, streams.most());
      });
  EXPECT_EQ(most[kMaxEnqueued], kMaxEnqueued) << "nothing was enqueued ahead, or too much";
  EXPECT_EQ(most[kMaxOnFastStream], kMaxOnFastStream) << "also on fast streams";
}

TEST(Turns, FollowTheirInputsAndNotThePlanOrderOfOtherLanes) {
  // A backward pass: the next weights are gathered while the gradient of the last ones is packed.
  Plan plan = chain({Lane::gather, Lane::compute, Lane::compute, Lane::reduce, Lane::gather,
                     Lane::compute, Lane::reduce});
  plan.operations[4].after.clear();
  const auto collective = [](const Operation& operation) {
    return operation.lane == Lane::gather || operation.lane == Lane::reduce;
  };
  const Turns turns = turns_of(plan, collective);
  EXPECT_EQ(turns.order[0], (std::vector<OpId>{0, 4, 3, 6}));
  EXPECT_EQ(turns.taken, (std::vector<bool>{true, false, false, true, true, false, true}));
  plan.operations[4].device = 1;
  EXPECT_EQ(turns_of(plan, collective).order[0], (std::vector<OpId>{0, 3, 6}));
  EXPECT_EQ(turns_of(plan, collective).order[1], (std::vector<OpId>{4}));
}

/// All gathers and reductions and some passes.
bool takes_turn(const Operation& operation) {
  return operation.lane == Lane::gather || operation.lane == Lane::reduce ||
         (operation.action == Action::compute && operation.block % 2 == 0);
}

TEST(Executor, TurnsHaveTheSameOrderWhateverTheTimes) {
  using Starts = std::vector<std::pair<const Operation*, std::uint64_t>>;
  using ByDevice = std::array<Starts, kMaxDevices>;
  std::size_t crossings = 0;
  for (std::uint64_t seed = 0; seed < 8; ++seed) {
    const step::BuildArguments placed =
        step::random_problem(seed, {.ranks = true, .devices = true});
    const Schedule schedule = build(placed);
    const auto runs = step::random_runs(placed, schedule, seed, 3);
    const auto starts_of = [&](std::uint64_t delay_seed) {
      ByDevice starts;
      std::mutex mutex;
      std::array<std::atomic<int>, kMaxDevices> in_turn{};
      step::FakeMachine machine(schedule.buffers.size());
      Streams streams([&](const Operation& op, std::uint64_t n) { machine.perform(op, n); },
                      schedule.devices);
      const ExecutorOptions options = {
          .takes_turn = takes_turn, .devices = schedule.devices, .delay_seed = delay_seed};
      Executor executor(
          [&](const Operation& op, std::uint64_t n) {
            if (takes_turn(op)) {
              EXPECT_EQ(++in_turn[op.device], 1) << "two at a time";
              const std::scoped_lock lock(mutex);
              starts[op.device].emplace_back(&op, n);
            }
            streams.start(op, n);
            if (takes_turn(op)) --in_turn[op.device];
          },
          step::action_name, streams.options(options));
      step::submit_all(executor, runs.runs, seed % 2 == 0);
      executor.drain();
      EXPECT_EQ(machine.values(), step::serial_result(schedule, runs.runs)) << seed;
      return starts;
    };
    const ByDevice all = starts_of(1);
    EXPECT_EQ(starts_of(2), all) << seed;
    for (const Starts& starts : all) {
      for (std::size_t i = 1; i < starts.size(); ++i) {
        crossings +=
            starts[i].second == starts[i - 1].second && starts[i].first < starts[i - 1].first;
      }
    }
  }
  EXPECT_GT(crossings, 0U) << "all turns are in plan order";
}

TEST(Executor, EnqueuesBehindRunningOperationsOfTheSameLaneOnly) {
  const Plan plan =
      chain({Lane::compute, Lane::compute, Lane::compute, Lane::offload, Lane::update});
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<OpId> started;
  const auto number = [&](const Operation& op) {
    return static_cast<OpId>(&op - plan.operations.data());
  };
  ExecutorOptions options;
  options.finish = [&](const Operation& op, std::uint64_t) {
    std::unique_lock lock(mutex);
    if (number(op) != 0) return;
    // The first operation runs until the second is enqueued, and then long enough for others to
    // start by mistake.
    EXPECT_TRUE(changed.wait_for(lock, std::chrono::seconds(60), [&] {
      return started.size() >= 2;
    })) << "nothing is enqueued ahead";
    changed.wait_for(lock, std::chrono::milliseconds(20), [&] { return started.size() > 2; });
    EXPECT_EQ(started, (std::vector<OpId>{0, 1}));
  };
  Executor executor(
      [&](const Operation& op, std::uint64_t) {
        const std::scoped_lock lock(mutex);
        started.push_back(number(op));
        changed.notify_all();
      },
      step::action_name, options);
  executor.submit(plan, 1);
  executor.drain();
  EXPECT_EQ(started, (std::vector<OpId>{0, 1, 2, 3, 4}));
  EXPECT_GT(executor.totals().enqueueing_seconds[static_cast<std::size_t>(Lane::compute)], 0.0);
}

TEST(Executor, AnotherStreamOfTheLaneWaitsForEnqueuedOperations) {
  Plan plan = chain({Lane::compute, Lane::compute});
  plan.operations[1].device = 1;
  std::atomic<bool> over = false;
  ExecutorOptions options = {.devices = 2};
  options.finish = [&](const Operation& op, std::uint64_t) {
    if (op.device > 0) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    over = true;
  };
  Executor executor([&](const Operation& op, std::uint64_t) { EXPECT_EQ(over, op.device > 0); },
                    step::action_name, options);
  executor.submit(plan, 1);
  executor.drain();
  EXPECT_TRUE(over);
}

TEST(Executor, RequestsOfALaneOverlapUnlessAnEdgeForbidsIt) {
  Plan plan = chain({Lane::fetch, Lane::fetch, Lane::fetch});
  plan.operations[1].after.clear();
  std::mutex mutex;
  std::condition_variable changed;
  std::set<OpId> started;
  std::set<OpId> finished;
  const auto number = [&](const Operation& op) {
    return static_cast<OpId>(&op - plan.operations.data());
  };
  ExecutorOptions options;
  options.finish = [&](const Operation& op, std::uint64_t) {
    std::unique_lock lock(mutex);
    EXPECT_TRUE(changed.wait_for(lock, std::chrono::seconds(60), [&] {
      return started.count(1) > 0;
    })) << "one at a time";
    finished.insert(number(op));
  };
  Executor executor(
      [&](const Operation& op, std::uint64_t) {
        const std::scoped_lock lock(mutex);
        if (number(op) == 2) {
          EXPECT_EQ(finished.count(1), 1U) << "before what it follows is over";
        }
        started.insert(number(op));
        changed.notify_all();
      },
      step::action_name, options);
  executor.submit(plan, 1);
  executor.drain();
  EXPECT_EQ(finished.size(), 3U);
}

TEST(Executor, OtherLanesWaitForEnqueuedOperations) {
  const Plan plan = chain({Lane::compute, Lane::offload});
  std::atomic<bool> over = false;
  ExecutorOptions options;
  options.finish = [&](const Operation& op, std::uint64_t) {
    if (op.lane != Lane::compute) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    over = true;
  };
  Executor executor(
      [&](const Operation& op, std::uint64_t) { EXPECT_EQ(over, op.lane == Lane::offload); },
      step::action_name, options);
  executor.submit(plan, 1);
  executor.drain();
  EXPECT_TRUE(over);
}

TEST(Executor, DestructionWaitsForEnqueuedOperations) {
  const Plan plan = chain({Lane::compute, Lane::compute, Lane::compute});
  std::atomic<int> started = 0;
  std::atomic<int> finished = 0;
  std::atomic<bool> given_up = false;
  {
    ExecutorOptions options;
    options.finish = [&](const Operation&, std::uint64_t) {
      while (!given_up) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      // Runs until it is ended.
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      ++finished;
    };
    Executor executor([&](const Operation&, std::uint64_t) { ++started; }, step::action_name,
                      options);
    executor.submit(plan, 1);
    while (started < static_cast<int>(kMaxEnqueued)) std::this_thread::yield();
    given_up = true;
  }
  EXPECT_EQ(finished, started);
}

TEST(Executor, AFailureWaitsForEnqueuedOperations) {
  const Plan plan = chain({Lane::compute, Lane::compute, Lane::offload});
  for (const bool serial : {false, true}) {
    std::atomic<int> started = 0;
    std::atomic<int> finished = 0;
    {
      ExecutorOptions options = {.serial = serial};
      options.finish = [&](const Operation&, std::uint64_t) {
        // Enqueues every operation that can be enqueued now.
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
        if (++finished == 1) throw Error(ErrorCategory::device, "broken");
      };
      Executor executor([&](const Operation&, std::uint64_t) { ++started; },
                        [](const Operation&) { return std::string("the first"); }, options);
      try {
        executor.submit(plan, 1);
        executor.drain();
        FAIL();
      } catch (const Error& error) {
        EXPECT_STREQ(error.what(), "the first: broken");
      }
    }
    EXPECT_EQ(started, finished);
    EXPECT_EQ(started, serial ? 1 : 2);
  }
}

}  // namespace
}  // namespace ballast::plan::executor_test
