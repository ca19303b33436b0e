#include <chrono>

#include <gtest/gtest.h>
#include <sys/resource.h>

#include "ballast/core/threads.h"

namespace ballast::polling_test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

/// A clock that advances with each reading.
Polling::Duration step;
Polling::TimePoint moment;
Polling::TimePoint stepping_clock() {
  return moment += step;
}

TEST(Polling, CountsLooksAndPauses) {
  step = milliseconds(100);
  Polling polling(Polling::Worker::polls, &stepping_clock);
  EXPECT_EQ(polling.seconds(), 0.0);
  polling.pause();
  polling.pause();
  EXPECT_NEAR(polling.seconds(), 0.4, 1e-9);
}

TEST(Polling, DoesNotCountATimeInWhichItWasStopped) {
  step = milliseconds(100);
  Polling polling(Polling::Worker::polls, &stepping_clock);
  polling.pause();
  moment += seconds(3600);
  polling.pause();
  EXPECT_NEAR(polling.seconds(), 0.3, 1e-9);
  polling.pause();
  EXPECT_NEAR(polling.seconds(), 0.5, 1e-9);
}

/// Number of sleeps of this thread so far. Yields do not count.
long sleeps() {
  rusage used = {};
  getrusage(RUSAGE_THREAD, &used);
  return used.ru_nvcsw;
}
Polling::Duration idle() {
  return {};
}
Polling::Duration busy() {
  static Polling::Duration used = {};
  return used += milliseconds(1);
}

TEST(Polling, SleepsIfOtherThreadsRanDuringPollsButNotIfPollsMadeProgress) {
  step = milliseconds(1);
  constexpr int kPolls = 100;
  const auto sleeps_of = [](Polling::CpuTime cpu_time) {
    Polling polling(Polling::Worker::polls, &stepping_clock, cpu_time);
    const long before = sleeps();
    for (int i = 0; i < kPolls; ++i) polling.pause();
    return sleeps() - before;
  };
  EXPECT_GE(sleeps_of(&idle), kPolls / 2);
  EXPECT_LT(sleeps_of(&busy), kPolls / 2);
}

TEST(Polling, LeavesTheCoreToOthersHoweverLongAQueryOfADeviceTakes) {
  constexpr int kPolls = 100;
  Polling polling(Polling::Worker::device, &std::chrono::steady_clock::now, &busy);
  const long before = sleeps();
  for (int i = 0; i < kPolls; ++i) polling.pause();
  EXPECT_GE(sleeps() - before, kPolls / 2);
}

}  // namespace
}  // namespace ballast::polling_test
