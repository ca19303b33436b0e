#include "ballast/schedule/executor.h"

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/core/error.h"

#include "tests/unit/schedule/random_workload.h"

namespace ballast::schedule {
namespace {

/// A device that computes with numbers in place of tensors: every operation mixes what it reads
/// into what it writes, without any lock, so that a missing edge changes the result (and is a data
/// race for the thread sanitizer).
class FakeMachine {
 public:
  explicit FakeMachine(std::size_t buffers) : values_(buffers, 1) {}

  void perform(const Operation& operation, std::uint64_t step) {
    std::uint64_t mix = (static_cast<std::uint64_t>(operation.action) << 32) ^
                        (operation.block * 8191U) ^ (operation.micro * 131U) ^ (step << 48);
    for (const Use& use : operation.uses) mix = (mix ^ values_[use.buffer]) * 0x9E3779B97F4A7C15U;
    for (const Use& use : operation.uses) {
      if (use.writes) values_[use.buffer] = mix ^ use.buffer;
    }
  }

  [[nodiscard]] const std::vector<std::uint64_t>& values() const { return values_; }

 private:
  std::vector<std::uint64_t> values_;
};

std::vector<std::uint64_t> run(const Schedule& schedule, const ExecutorOptions& options) {
  FakeMachine machine(schedule.buffers.size());
  Executor executor([&](const Operation& op, std::uint64_t step) { machine.perform(op, step); },
                    [](const Operation&) { return std::string("operation"); }, options);
  std::uint64_t run = 0;
  for (const Plan* plan : {&schedule.first, &schedule.steady, &schedule.steady, &schedule.flush,
                           &schedule.evaluation, &schedule.first, &schedule.steady}) {
    executor.submit(*plan, ++run);
    if (plan->gate != kNoOp) executor.wait(plan->gate);
  }
  executor.drain();
  return machine.values();
}

TEST(Executor, LanesWithRandomDelaysGiveTheSerialResult) {
  for (std::uint64_t seed = 0; seed < 25; ++seed) {
    const Problem problem = random_problem(seed);
    const Schedule schedule = build(problem.workload, problem.placement, problem.options);
    const auto expected = run(schedule, {.serial = true});
    EXPECT_EQ(run(schedule, {}), expected) << seed;
    EXPECT_EQ(run(schedule, {.delay_seed = seed}), expected) << seed;
  }
}

Schedule small_schedule() {
  const Problem problem = random_problem(3);
  return build(problem.workload, problem.placement, problem.options);
}

TEST(Executor, AFailedOperationStopsTheRunAndIsNamed) {
  const Schedule schedule = small_schedule();
  for (const bool serial : {false, true}) {
    std::atomic<int> after_failure = 0;
    std::atomic<bool> failed = false;
    Executor executor(
        [&](const Operation& op, std::uint64_t) {
          if (op.action == Action::gate) {
            failed = true;
            throw Error(ErrorCategory::numeric, "no norm");
          }
          if (failed && op.action == Action::update_on_host) ++after_failure;
        },
        [](const Operation&) { return std::string("the gate"); }, {.serial = serial});
    try {
      executor.submit(schedule.first, 1);
      executor.drain();
      FAIL();
    } catch (const Error& error) {
      EXPECT_EQ(error.category(), ErrorCategory::numeric);
      EXPECT_STREQ(error.what(), "the gate: no norm");
    }
    EXPECT_THROW(executor.submit(schedule.first, 2), Error);
    EXPECT_EQ(after_failure, 0);
  }
}

TEST(Executor, AnInterruptEndsTheWaitWithoutFinishingTheStep) {
  const Schedule schedule = small_schedule();
  std::atomic<bool> interrupted = false;
  std::atomic<std::size_t> ran = 0;
  Executor executor(
      [&](const Operation&, std::uint64_t) {
        if (++ran == 3) interrupted = true;
      },
      [](const Operation&) { return std::string("operation"); }, {.interrupted = &interrupted});
  executor.submit(schedule.first, 1);
  try {
    executor.drain();
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.category(), ErrorCategory::interrupted);
  }
  EXPECT_LT(ran, schedule.first.operations.size());
}

TEST(Executor, CountsBytesAndBusyTimePerLane) {
  const Schedule schedule = small_schedule();
  Executor executor([](const Operation&, std::uint64_t) {},
                    [](const Operation&) { return std::string("operation"); }, {});
  executor.submit(schedule.first, 1);
  executor.drain();
  const LaneTotals totals = executor.totals();
  for (std::size_t lane = 0; lane < kLaneCount; ++lane) {
    EXPECT_EQ(totals.bytes[lane], schedule.first.bytes_on(kLanes[lane]));
  }
}

}  // namespace
}  // namespace ballast::schedule
