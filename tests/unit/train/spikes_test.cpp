#include <cmath>
#include <limits>
#include <string>

#include <gtest/gtest.h>

#include "src/train/step_rules.h"

namespace ballast::train::spikes_test {
namespace {

using Action = config::SpikeSection::Action;
constexpr double kNotANumber = std::numeric_limits<double>::quiet_NaN();

config::SpikeSection options(std::uint64_t window, double factor) {
  return {.action = Action::warn, .window = window, .factor = factor};
}

/// Adds `count` losses 2 +- 0.1, whose mean is 2 and whose standard deviation is nearly 0.1.
void add_even(Spikes& spikes, int count) {
  for (int i = 0; i < count; ++i) EXPECT_EQ(spikes.add(i % 2 == 0 ? 1.9 : 2.1), "") << i;
}

TEST(Spikes, ExceedTheMeanByTheGivenStandardDeviations) {
  Spikes spikes(options(100, 6.0));
  add_even(spikes, 100);
  EXPECT_EQ(Spikes(spikes).add(2.6), "");
  EXPECT_EQ(Spikes(spikes).add(2.62),
            "loss 2.6200 is above 2.6030, 6 standard deviations above the mean 2.0000 of the last "
            "100 steps");
  EXPECT_EQ(Spikes(spikes).add(-100.0), "");
  Spikes narrow(options(100, 5.0));
  narrow.restart(spikes.losses());
  EXPECT_NE(narrow.add(2.6), "");
}

TEST(Spikes, AreNotSoughtBeforeTheWindowIsHalfFull) {
  Spikes spikes(options(20, 6.0));
  add_even(spikes, 9);
  EXPECT_EQ(Spikes(spikes).add(1e9), "");
  EXPECT_EQ(Spikes(spikes).add(kNotANumber), "");
  add_even(spikes, 1);
  EXPECT_NE(Spikes(spikes).add(1e9), "");
  EXPECT_EQ(Spikes(spikes).add(kNotANumber), "the loss is not finite");
  EXPECT_EQ(Spikes(spikes).add(std::numeric_limits<double>::infinity()), "the loss is not finite");
}

TEST(Spikes, AreReportedOnce) {
  Spikes spikes(options(50, 6.0));
  add_even(spikes, 50);
  EXPECT_NE(spikes.add(9.0), "");
  EXPECT_EQ(spikes.add(9.0), "");
  EXPECT_EQ(spikes.add(kNotANumber), "");
  add_even(spikes, 50);  // the spike has left the window
  EXPECT_NE(spikes.add(9.0), "");
}

TEST(Spikes, IgnoreStepsWithoutALoss) {
  Spikes spikes(options(50, 6.0));
  add_even(spikes, 50);
  const std::vector<double> before = spikes.losses();
  EXPECT_EQ(spikes.add(std::nullopt), "");
  EXPECT_EQ(spikes.losses(), before);
  EXPECT_NE(spikes.add(9.0), "");
  EXPECT_EQ(spikes.add(std::nullopt), "");
  EXPECT_EQ(spikes.add(9.0), "") << "the same spike";
}

TEST(Spikes, KeepTheLossesOfTheWindow) {
  Spikes spikes(options(4, 6.0));
  for (const double loss : {1.0, 2.0, 3.0, kNotANumber, 4.0, 5.0}) spikes.add(loss);
  EXPECT_EQ(spikes.losses(), (std::vector<double>{2.0, 3.0, 4.0, 5.0}));
  Spikes off({.action = Action::off});
  for (int i = 0; i < 100; ++i) EXPECT_EQ(off.add(i == 99 ? kNotANumber : 1.0), "");
  EXPECT_TRUE(off.losses().empty());
}

TEST(Spikes, ContinueAfterTheLossesOfACheckpoint) {
  Spikes before(options(20, 3.0));
  for (int i = 0; i < 33; ++i) before.add(2.0 + std::sin(i));
  Spikes after(options(20, 3.0));
  after.restart(before.losses());
  for (int i = 33; i < 80; ++i) {
    const double loss = i == 60 ? 9.0 : 2.0 + std::sin(i);
    EXPECT_EQ(before.add(loss), after.add(loss)) << i;
  }
}

}  // namespace
}  // namespace ballast::train::spikes_test
