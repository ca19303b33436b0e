#include "src/model/compute/array_list.h"

#include <string>

#include <gtest/gtest.h>

#include "ballast/core/error.h"

namespace ballast::model {
namespace {

TEST(ArrayList, LaysOutPlacesInOrderInWholeCacheLines) {
  ArrayList list;
  const auto first = list.own("first", 10, {0, 1});
  const auto second = list.own("second", 100, {0, 1}, true);
  const auto place = list.place("shared", true);
  const auto third = list.own("third", 1, {0, 1});
  const auto small = list.add(place, "small", 8, {{0, 1}});
  const auto large = list.add(place, "large", 200, {{1, 2}});
  list.finish();
  EXPECT_EQ(list.offset(first, false), 0U);
  EXPECT_EQ(list.offset(second, false), 64U);
  EXPECT_EQ(list.offset(small, false), 192U);
  EXPECT_EQ(list.offset(large, false), 192U);
  EXPECT_EQ(list.offset(third, false), 192U + 256U);
  EXPECT_EQ(list.bytes(), 192U + 256U + 64U);
  EXPECT_EQ(list.offset(second, true), 0U);
  EXPECT_EQ(list.offset(large, true), 128U);
  EXPECT_EQ(list.known_bytes(), 128U + 256U);
  EXPECT_TRUE(list.is_known(large));
  EXPECT_FALSE(list.is_known(third));
}

std::string refusal(const std::vector<ArrayLife>& lives) {
  ArrayList list;
  const auto place = list.place("work");
  list.add(place, "values", 64, {{2, 5}, {8, 9}});
  list.add(place, "gradient", 64, lives);
  try {
    list.finish();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(ArrayList, RefusesArraysOfOnePlaceThatAreAliveTogether) {
  EXPECT_EQ(refusal({{0, 2}, {5, 8}, {9, 12}}), "");  // a value and its gradient may meet
  const std::string both = "values and gradient in 'work'";
  for (const ArrayLife life :
       {ArrayLife{1, 3}, ArrayLife{3, 4}, ArrayLife{4, 20}, ArrayLife{0, 30}}) {
    EXPECT_NE(refusal({life}).find(both), std::string::npos);
  }
}

TEST(ArrayList, MomentsOfTheBackwardPassFollowThoseOfTheForwardPassInReverse) {
  const LayerMoments first = {2, 0};
  const LayerMoments last = {2, 1};
  EXPECT_LT(first.at(LayerMoments::out), last.at(LayerMoments::before));
  EXPECT_LT(last.at(LayerMoments::out), last.at(LayerMoments::d_after));
  EXPECT_LT(last.at(LayerMoments::d_before), first.at(LayerMoments::d_after));
}

}  // namespace
}  // namespace ballast::model
