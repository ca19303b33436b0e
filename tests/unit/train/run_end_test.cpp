#include <gtest/gtest.h>

#include "ballast/train/run_options.h"

namespace ballast::train::run_end_test {
namespace {

RunEnd end_of(std::uint64_t steps, bool save_weights = true, std::uint64_t checkpoint_every = 0) {
  config::Config config;
  config.ballast.steps = steps;
  config.ballast.save_weights = save_weights;
  config.ballast.checkpoint_every = checkpoint_every;
  return RunEnd(config);
}

TEST(RunEnd, TheLastStepHasTheNumberOfSteps) {
  const RunEnd end = end_of(3);
  EXPECT_EQ(end.steps(), 3U);
  EXPECT_FALSE(end.is_last(2));
  EXPECT_TRUE(end.is_last(3));
  EXPECT_FALSE(end.is_last(4));
}

TEST(RunEnd, NoStepIsLeftAfterTheLastOne) {
  const RunEnd end = end_of(3);
  EXPECT_FALSE(end.is_reached_by(0));
  EXPECT_FALSE(end.is_reached_by(2));
  EXPECT_TRUE(end.is_reached_by(3));
  EXPECT_TRUE(end.is_reached_by(5));  // a checkpoint of a longer run
  EXPECT_EQ(end.left_after(1), 2U);
  EXPECT_EQ(end.left_after(3), 0U);
  EXPECT_EQ(end.left_after(5), 0U);
}

TEST(RunEnd, WeightsAreTheResultIfTheyAreSaved) {
  for (const std::uint64_t every : {0U, 2U}) {
    EXPECT_TRUE(end_of(3, true, every).is_complete(true, false));
    EXPECT_FALSE(end_of(3, true, every).is_complete(false, true));
  }
}

TEST(RunEnd, OtherwiseTheCheckpointOfTheLastStepIs) {
  EXPECT_TRUE(end_of(3, false, 2).is_complete(false, true));
  EXPECT_FALSE(end_of(3, false, 2).is_complete(false, false));
  EXPECT_TRUE(end_of(3, false).is_complete(false, false));  // it measures, or only logs losses
}

}  // namespace
}  // namespace ballast::train::run_end_test
