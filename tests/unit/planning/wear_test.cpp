#include <vector>

#include <gtest/gtest.h>

#include "ballast/planning/forecast.h"

namespace ballast::planning {
namespace {

TEST(Wear, IsThePaceOfADayAndTheLifeOfTheBusiestDrive) {
  const std::vector<Bytes> one = {864'000'000};  // in 24 s: 36 MB/s, 3.1104 TB a day
  const auto wear = estimate_wear(one, 24.0);
  ASSERT_TRUE(wear);
  EXPECT_DOUBLE_EQ(wear->terabytes_per_day, 3.1104);
  EXPECT_DOUBLE_EQ(wear->days, 600.0 / 3.1104);
  EXPECT_EQ(describe(*wear), "3.1 TB a day at this pace: a drive rated 600 TBW lasts 193 days");
}

TEST(Wear, OfSeveralPathsIsThatOfTheOneThatGetsMost) {
  const std::vector<Bytes> three = {1'000'000'000, 6'000'000'000, 5'000'000'000};
  const auto wear = estimate_wear(three, 86400.0);
  ASSERT_TRUE(wear);
  EXPECT_DOUBLE_EQ(wear->terabytes_per_day, 0.012);
  EXPECT_DOUBLE_EQ(wear->days, 100'000.0);
}

TEST(Wear, IsUnknownWithoutBytesOrTime) {
  EXPECT_FALSE(estimate_wear({}, 5.0));
  EXPECT_FALSE(estimate_wear(std::vector<Bytes>{0, 0}, 5.0));
  EXPECT_FALSE(estimate_wear(std::vector<Bytes>{5}, 0.0));
}

TEST(Wear, IsToldInNumbersOfTheRightSize) {
  const auto life = [](double days) {
    const std::string text = describe({.terabytes_per_day = 1.0, .days = days});
    return text.substr(text.find("lasts ") + 6);
  };
  EXPECT_EQ(life(0.25), "0.25 days");
  EXPECT_EQ(life(1.0), "1 day");
  EXPECT_EQ(life(9.96), "10 days");
  EXPECT_EQ(life(1095.0), "1095 days");
  EXPECT_EQ(life(1461.0), "4 years");
  EXPECT_EQ(life(1e6), "more than 100 years");
  EXPECT_EQ(describe({.terabytes_per_day = 1234.5, .days = 1.0}).substr(0, 12), "1234 TB a da");
}

}  // namespace
}  // namespace ballast::planning
