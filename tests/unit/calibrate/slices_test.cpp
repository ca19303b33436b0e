#include <algorithm>
#include <cmath>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/core/random.h"

#include "src/calibrate/calibration.h"

namespace ballast::calibrate::slices_test {
namespace {

constexpr double kAlone = 0.010;  ///< seconds of the work on an idle machine

/// A number between 0 and 1 that depends only on `seed` and `i`.
double unit(std::uint64_t seed, std::uint64_t i) {
  return static_cast<double>(random_u64(seed, i) % 10000) / 10000.0;
}

/// Simulates work of `threads` threads with an equal number of busy loops: each thread waits for
/// its CPU at times, and the others wait for it without using theirs.
std::vector<Slice> beside_busy_loops(std::uint64_t seed, double threads, std::size_t count) {
  std::vector<Slice> slices;
  for (std::size_t i = 0; i < count; ++i) {
    Slice slice = {.cpu = threads * kAlone * (0.98 + 0.08 * unit(seed, 3 * i))};
    const double longest = kAlone * (0.5 + 6.0 * unit(seed, 3 * i + 1));
    slice.waited = longest * (1.0 + (threads - 1.0) * unit(seed, 3 * i + 2));
    slice.wall = kAlone + slice.waited;
    slices.push_back(slice);
  }
  return slices;
}

double undisturbed_seconds(const std::vector<Slice>& slices, const SliceConditions& conditions) {
  return undisturbed_time(slices, conditions).seconds;
}

TEST(UndisturbedSeconds, AreTheMeanOnAQuietMachine) {
  const std::vector<Slice> slices = {{.wall = 0.0100, .cpu = 0.012},
                                     {.wall = 0.0108, .cpu = 0.012}};
  EXPECT_DOUBLE_EQ(undisturbed_seconds(slices, {.cpus = 2.0}), 0.0104);
  EXPECT_GT(undisturbed_seconds({}, {}), 0.0);
}

/// Other work that leaves most CPUs alone still lengthens many slices, through memory, shared cores
/// or the host of a virtual machine, without any wait that this process sees.
TEST(UndisturbedSeconds, AreThoseOfTheFastestSlicesOnALightlyUsedMachine) {
  constexpr double kJitter = 0.04;
  constexpr double kDisturbed = 0.6;
  for (std::uint64_t seed = 1; seed <= 100; ++seed) {
    std::vector<Slice> slices;
    for (std::uint64_t i = 0; i < 7; ++i) {
      double wall = kAlone * (1.0 + kJitter * unit(seed, 3 * i));
      if (i > 0 && unit(seed, 3 * i + 1) < kDisturbed) wall *= 1.1 + unit(seed, 3 * i + 2);
      slices.push_back({.wall = wall, .cpu = 2.0 * wall});
    }
    std::rotate(slices.begin(), slices.begin() + static_cast<std::ptrdiff_t>(seed % 7),
                slices.end());
    EXPECT_NEAR(undisturbed_seconds(slices, {.cpus = 2.0}), kAlone, 2.0 * kJitter * kAlone) << seed;
  }
}

/// The times of a drive differ without other work, and a run sees all of them.
TEST(UndisturbedSeconds, OfADriveAreTheMean) {
  const std::vector<Slice> slices = {{.wall = 0.010}, {.wall = 0.014}, {.wall = 0.012}};
  EXPECT_DOUBLE_EQ(undisturbed_seconds(slices, {.cpus = 0.0}), 0.012);
}

TEST(SliceEstimates, SayHowMuchTheSlicesDiffer) {
  const auto spread = [](const std::vector<double>& walls) {
    std::vector<Slice> slices;
    for (const double wall : walls) slices.push_back({.wall = wall});
    return undisturbed_time(slices, {}).spread;
  };
  EXPECT_DOUBLE_EQ(spread({0.010}), 0.0);
  EXPECT_DOUBLE_EQ(spread({0.010, 0.010, 0.010}), 0.0);
  EXPECT_NEAR(spread({0.010, 0.013, 0.020}), 0.3, 1e-9);
  // The median of three tells nothing of a single outlier.
  EXPECT_DOUBLE_EQ(spread({0.010, 0.010, 0.090}), 0.0);
}

TEST(UndisturbedSeconds, LeaveOutSlicesThatWaitedAndOutliers) {
  std::vector<Slice> slices(5, {.wall = 0.010, .cpu = 0.020});
  slices.push_back({.wall = 0.013, .cpu = 0.020, .waited = 0.003});
  slices.push_back({.wall = 0.050, .cpu = 0.020});
  EXPECT_DOUBLE_EQ(undisturbed_seconds(slices, {.cpus = 2.0}), 0.010);
}

TEST(UndisturbedSeconds, OfATeamAreNotAffectedByBusyLoops) {
  for (const double threads : {1.0, 2.0, 8.0}) {
    for (std::uint64_t seed = 1; seed <= 20; ++seed) {
      const auto slices = beside_busy_loops(seed, threads, 5);
      EXPECT_NEAR(undisturbed_seconds(slices, {.cpus = threads, .busy = true}), kAlone,
                  0.075 * kAlone)
          << threads << " threads, seed " << seed;
    }
  }
}

TEST(UndisturbedSeconds, OfOneThreadIncludeItsSleep) {
  // A throttled copy: it sleeps for 7 ms of the 10, and then waits 4 ms for its CPU.
  const std::vector<Slice> slices(3, {.wall = 0.014, .cpu = 0.003, .waited = 0.004});
  EXPECT_DOUBLE_EQ(undisturbed_seconds(slices, {.cpus = 1.0, .busy = true}), 0.010);
}

TEST(UndisturbedSeconds, OfWorkElsewhereDoNotDependOnCpuTime) {
  std::vector<Slice> slices(8, {.wall = 0.010, .cpu = 0.0001});
  for (std::size_t i = 0; i < 5; ++i) slices[i].wall = 0.030;  // the drive served other processes
  EXPECT_DOUBLE_EQ(undisturbed_seconds(slices, {.cpus = 0.0, .busy = true}), 0.010);
}

TEST(SliceClock, CountsWallAndCpuTime) {
  SliceClock clock;
  clock.start();
  volatile double sum = 0.0;
  for (int i = 0; i < 1000; ++i) sum = sum + std::sqrt(static_cast<double>(i));
  const Slice slice = clock.stop();
  EXPECT_GT(slice.wall, 0.0);
  EXPECT_GT(slice.cpu, 0.0);
  EXPECT_GE(slice.waited, 0.0);
}

}  // namespace
}  // namespace ballast::calibrate::slices_test
