#include <atomic>
#include <chrono>
#include <stdexcept>
#include <thread>

#include <gtest/gtest.h>

#include "src/calibrate/calibration.h"

namespace ballast::calibrate::overlap_test {
namespace {

using std::chrono::milliseconds;

void sleep(milliseconds time) {
  std::this_thread::sleep_for(time);
}

TEST(OverlapSpeeds, AreLowIfEachWorkHindersTheOther) {
  std::atomic<bool> bursting = false;
  std::atomic<int> calls = 0;
  const auto work = [&] {
    while (bursting) sleep(milliseconds(1));
    ++calls;
    sleep(milliseconds(1));
  };
  const auto bursts = [&] {
    const int before = calls;
    sleep(milliseconds(4));
    if (calls == before) return;
    bursting = true;
    sleep(milliseconds(40));
    bursting = false;
  };
  const OverlapSpeeds speeds = overlap_speeds(work, bursts);
  EXPECT_LT(speeds.work, 0.8);
  EXPECT_LT(speeds.bursts, 0.8);
  EXPECT_GT(speeds.work, 0.0);
  EXPECT_GT(speeds.bursts, 0.0);
}

TEST(OverlapSpeeds, AreAtMostOne) {
  const auto nap = [] { sleep(milliseconds(1)); };
  const OverlapSpeeds speeds = overlap_speeds(nap, nap);
  EXPECT_LE(speeds.work, 1.0);
  EXPECT_LE(speeds.bursts, 1.0);
}

TEST(OverlapSpeeds, FailuresReachTheCaller) {
  const auto nap = [] { sleep(milliseconds(1)); };
  int calls = 0;
  const auto fails_later = [&] {
    nap();
    if (++calls == 4) throw std::runtime_error("the drive failed");
  };
  EXPECT_THROW(overlap_speeds(nap, fails_later), std::runtime_error);
  EXPECT_EQ(calls, 4);
  calls = 0;
  EXPECT_THROW(overlap_speeds(fails_later, nap), std::runtime_error);
  EXPECT_EQ(calls, 4);
}

}  // namespace
}  // namespace ballast::calibrate::overlap_test
