#include <chrono>

#include <gtest/gtest.h>
#include <sys/resource.h>

#include "ballast/core/machine.h"

#include "src/model/host/team.h"

namespace ballast::model::host::short_waits_test {
namespace {

/// Number of times that the calling thread has slept.
long sleeps() {
  rusage used{};
  getrusage(RUSAGE_THREAD, &used);
  return used.ru_nvcsw;
}

/// Computes for half a millisecond.
void calculate() {
  const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(500);
  while (std::chrono::steady_clock::now() < end) {
  }
}

// By default, GCC's threads spin for longer than the pauses between these regions.
TEST(ShortWaits, ThreadsOfATeamSleepBetweenParallelRegions) {
  if (usable_cpus() < 2) GTEST_SKIP() << "one CPU: GCC's threads do not spin";
  constexpr int kRegions = 40;
  long before = 0;
  long slept = 0;
  for (int region = 0; region <= kRegions; ++region) {
    on_team(2, [&slept](std::size_t part) {
      if (part == 1) slept = sleeps();
    });
    if (region == 0) before = slept;
    calculate();
  }
  EXPECT_GE(slept - before, kRegions / 2);
}

}  // namespace
}  // namespace ballast::model::host::short_waits_test
