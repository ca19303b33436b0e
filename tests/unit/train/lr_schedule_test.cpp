#include <cmath>
#include <vector>

#include <gtest/gtest.h>

#include "src/train/step_rules.h"
#include "tests/support/expect_error.h"

namespace ballast::train::lr_schedule_test {
namespace {

using config::SchedulerSection;
using Type = SchedulerSection::Type;

SchedulerSection section(Type type, std::uint64_t warmup, bool linear, std::uint64_t total = 0) {
  SchedulerSection result;
  result.type = type;
  result.warmup_num_steps = warmup;
  result.warmup_linear = linear;
  result.total_num_steps = total;
  return result;
}

std::vector<double> first_steps(const LrSchedule& schedule, std::uint64_t count) {
  std::vector<double> rates;
  for (std::uint64_t k = 1; k <= count; ++k) rates.push_back(schedule.at(k));
  return rates;
}

void expect_close(const std::vector<double>& actual, const std::vector<double>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t i = 0; i < actual.size(); ++i) {
    EXPECT_NEAR(actual[i], expected[i], 1e-15 + 1e-14 * std::abs(expected[i])) << "step " << i + 1;
  }
}

TEST(LrSchedule, ConstantIsTheOptimizersRate) {
  const LrSchedule schedule({}, 3e-4);
  EXPECT_EQ(schedule.at(1), 3e-4);
  EXPECT_EQ(schedule.at(1'000'000), 3e-4);
}

TEST(LrSchedule, LinearWarmupStaysAtItsMinimumForTwoSteps) {
  auto linear = section(Type::warmup, 4, true);
  linear.warmup_min_lr = 0.2;
  linear.warmup_max_lr = 1.0;
  expect_close(first_steps(LrSchedule(linear, 9.0), 8), {0.2, 0.2, 0.4, 0.6, 0.8, 1.0, 1.0, 1.0});
}

TEST(LrSchedule, LogWarmupFollowsTheLogarithm) {
  // ln(1..4) / ln(4) of 1e-3.
  const LrSchedule schedule(section(Type::warmup, 4, false), 1e-3);
  expect_close(first_steps(schedule, 7),
               {0.0, 0.0, 0.5e-3, 0.7924812503605781e-3, 1e-3, 1e-3, 1e-3});
}

TEST(LrSchedule, WarmupOfOneStepCountsAsTwo) {
  expect_close(first_steps(LrSchedule(section(Type::warmup, 1, true), 1.0), 5),
               {0.0, 0.0, 0.5, 1.0, 1.0});
}

TEST(LrSchedule, WarmupDecayFallsLinearlyToItsMinimumAndStays) {
  auto decay = section(Type::warmup_decay, 2, true, 6);
  decay.warmup_min_lr = 0.1;
  decay.warmup_max_lr = 0.9;
  expect_close(first_steps(LrSchedule(decay, 5.0), 10),
               {0.1, 0.1, 0.5, 0.9, 0.7, 0.5, 0.3, 0.1, 0.1, 0.1});
}

/// get_linear_schedule_with_warmup() of transformers, whose first step has step 0.
TEST(LrSchedule, LinearIsThatOfTransformers) {
  expect_close(first_steps(LrSchedule(section(Type::linear, 0, false, 4), 2.0), 6),
               {2.0, 1.5, 1.0, 0.5, 0.0, 0.0});
  expect_close(first_steps(LrSchedule(section(Type::linear, 2, false, 6), 2.0), 7),
               {0.0, 1.0, 2.0, 1.5, 1.0, 0.5, 0.0});
  test::expect_error(ErrorCategory::config, {"total_num_steps: linear needs at least 1"},
                     [] { LrSchedule(section(Type::linear, 0, false), 1.0); });
}

TEST(LrSchedule, IsDescribedInAFewWords) {
  config::Config c;
  c.optimizer.lr = 5e-5;
  c.optimizer.weight_decay = 0.0;
  EXPECT_EQ(describe_rate(c), "5e-05, constant; AdamW, weight decay 0");
  c.scheduler = section(Type::linear, 0, false, 100);
  EXPECT_EQ(describe_rate(c), "5e-05, linear to step 100; AdamW, weight decay 0");
  c.scheduler = section(Type::warmup_decay, 7, false, 100);
  c.scheduler.warmup_max_lr = 2e-3;
  EXPECT_EQ(describe_rate(c), "0.002, WarmupDecayLR to step 100, warm-up 7; AdamW, weight decay 0");
}

TEST(LrSchedule, WarmupCosineFallsToItsRatioAndStays) {
  auto cosine = section(Type::warmup_cosine, 2, true, 6);
  cosine.warmup_min_ratio = 0.2;
  cosine.cos_min_ratio = 0.1;
  // For t = 2 and later: 0.1 + 0.9 (1 + cos(pi p)) / 2 for p = 1/4, 1/2, 3/4, 1, 1.
  expect_close(first_steps(LrSchedule(cosine, 2.0), 8),
               {0.0, 0.4, 1.2, 1.736396103067893, 1.1, 0.463603896932107, 0.2, 0.2});
}

TEST(LrSchedule, WarmupCosineWithoutStepsLeftStaysAtItsFloor) {
  auto cosine = section(Type::warmup_cosine, 10, true, 10);
  cosine.cos_min_ratio = 0.25;
  EXPECT_EQ(LrSchedule(cosine, 1.0).at(12), 0.25);
  EXPECT_EQ(LrSchedule(cosine, 1.0).at(50), 0.25);
}

TEST(LrSchedule, DecayingSchedulesWantATotal) {
  for (const auto type : {Type::warmup_decay, Type::warmup_cosine}) {
    test::expect_error(ErrorCategory::config, {"total_num_steps"},
                       [&] { LrSchedule(section(type, 2, true), 1.0); });
  }
}

}  // namespace
}  // namespace ballast::train::lr_schedule_test
