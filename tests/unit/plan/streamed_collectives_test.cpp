// Collectives on streams: what the host enqueues without waiting, and what it waits for.
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/plan/executor.h"

#include "tests/support/random_problem.h"
#include "tests/unit/plan/streams.h"
#include "tests/unit/step/fake_run.h"

namespace ballast::plan::streamed_collectives_test {
namespace {

using executor_test::chain;
using executor_test::Streams;

/// Runs a plan on streams that do nothing before `held` operations have started, or much later if
/// they never do.
class HeldStreams {
 public:
  HeldStreams(const Plan& plan, std::size_t held) : plan_(plan), held_(held) {}

  void run(ExecutorOptions options = {}) {
    options.max_on_stream = kMaxOnFastStream;
    options.follow = [this](const Operation& next, const Operation& before, std::uint64_t) {
      const std::scoped_lock lock(mutex_);
      followed.emplace_back(number(next), number(before));
    };
    options.finish = [this](const Operation& operation, std::uint64_t) {
      std::unique_lock lock(mutex_);
      changed_.wait_for(lock, kLong, [this] { return started.size() >= held_; });
      if (started_at_first_end == 0) started_at_first_end = started.size();
      finished.push_back(number(operation));
    };
    Executor executor(
        [this](const Operation& operation, std::uint64_t) {
          const std::scoped_lock lock(mutex_);
          started.push_back(number(operation));
          changed_.notify_all();
        },
        step::action_name, options);
    executor.submit(plan_, 1);
    executor.drain();
  }

  std::vector<OpId> started;
  std::vector<OpId> finished;
  std::vector<std::pair<OpId, OpId>> followed;  ///< an operation and one that it follows
  std::size_t started_at_first_end = 0;

 private:
  static constexpr auto kLong = std::chrono::seconds(5);

  [[nodiscard]] OpId number(const Operation& operation) const {
    return static_cast<OpId>(&operation - plan_.operations.data());
  }

  const Plan& plan_;
  std::size_t held_;
  std::mutex mutex_;
  std::condition_variable changed_;
};

using Pairs = std::vector<std::pair<OpId, OpId>>;

TEST(StreamedCollectives, PassesAndTheirSumsAreEnqueuedWithoutAWaitOfTheHost) {
  // Two layers in tiles: each half ends with a sum over ranks, which the next half reads.
  const Plan plan = chain({Lane::compute, Lane::reduce, Lane::compute, Lane::reduce, Lane::compute,
                           Lane::reduce, Lane::compute, Lane::gather});
  HeldStreams streams(plan, plan.operations.size());
  streams.run();
  EXPECT_EQ(streams.started_at_first_end, plan.operations.size());
  EXPECT_EQ(streams.followed, (Pairs{{1, 0}, {2, 1}, {3, 2}, {4, 3}, {5, 4}, {6, 5}, {7, 6}}));
  EXPECT_EQ(streams.finished, streams.started) << "an operation ends after those that it needs";
}

TEST(StreamedCollectives, TheHostWaitsForWhatItReadsOrChanges) {
  // The counts of routers are offloaded and decide what the next gather does. An update reads the
  // offloaded sum. An upload reads what the update has written.
  const Plan plan = chain({Lane::reduce, Lane::offload, Lane::gather, Lane::offload, Lane::update,
                           Lane::upload, Lane::gather});
  HeldStreams streams(plan, 2);
  streams.run();
  EXPECT_EQ(streams.started_at_first_end, 2U) << "the gather waits for the offload";
  // Later operations follow only what has not finished when they start.
  const Pairs possible = {{1, 0}, {3, 2}, {6, 5}};
  EXPECT_EQ(streams.followed.front(), possible.front());
  for (const auto& pair : streams.followed) {
    EXPECT_NE(std::find(possible.begin(), possible.end(), pair), possible.end()) << pair.first;
  }
}

TEST(StreamedCollectives, OnlyStreamsOfOneDeviceWaitForEachOther) {
  Plan plan = chain({Lane::compute, Lane::reduce, Lane::upload, Lane::compute});
  plan.operations[1].device = 1;
  HeldStreams streams(plan, 1);
  streams.run({.devices = 2});
  EXPECT_EQ(streams.followed, Pairs());
}

TEST(StreamedCollectives, APassThatExchangesRowsFollowsTheCollectivesBeforeIt) {
  Plan plan = chain({Lane::gather, Lane::reduce, Lane::compute, Lane::gather, Lane::compute});
  for (Operation& operation : plan.operations) operation.after.clear();
  plan.operations[2].action = Action::transfer;  // takes a turn
  HeldStreams streams(plan, plan.operations.size());
  streams.run({.takes_turn = [](const Operation& operation) {
    return is_collective_lane(operation.lane) || operation.action == Action::transfer;
  }});
  EXPECT_EQ(streams.started_at_first_end, plan.operations.size());
  EXPECT_EQ(streams.followed, (Pairs{{2, 1}})) << "the last pass exchanges nothing";
}

TEST(StreamedCollectives, GiveTheSerialResult) {
  for (std::uint64_t seed = 0; seed < 24; ++seed) {
    const step::BuildArguments placed =
        step::random_problem(seed, {.ranks = true, .devices = seed % 4 == 0});
    const Schedule schedule = build(placed);
    const auto runs = step::random_runs(placed, schedule, seed, 4);
    step::FakeMachine machine(schedule.buffers.size());
    Streams streams([&](const Operation& op, std::uint64_t n) { machine.perform(op, n); },
                    schedule.devices, true);
    std::map<std::pair<const Plan*, std::uint64_t>, std::map<OpId, Span>> spans;
    ExecutorOptions options = {
        .max_on_stream = kMaxOnFastStream,
        .takes_turn =
            [](const Operation& operation) {
              return is_collective_lane(operation.lane) ||
                     (operation.action == Action::compute && operation.block % 2 == 0);
            },
        .devices = schedule.devices};
    if (seed % 2 == 0) options.delay_seed = seed;
    options.observer = [&](const Span& span) {
      spans[{span.plan, span.run}].emplace(span.op, span);
    };
    {
      Executor executor([&](const Operation& op, std::uint64_t n) { streams.start(op, n); },
                        step::action_name, streams.options(options));
      step::submit_all(executor, runs.runs, seed % 3 == 0);
      executor.drain();
    }
    EXPECT_EQ(machine.values(), step::serial_result(schedule, runs.runs)) << seed;
    for (const auto& [run, of_run] : spans) {
      for (const auto& [id, span] : of_run) {
        for (const OpId before : run.first->operations[id].after) {
          EXPECT_LE(of_run.at(before).end, span.start) << "the times of two operations overlap";
        }
      }
    }
  }
}

}  // namespace
}  // namespace ballast::plan::streamed_collectives_test
