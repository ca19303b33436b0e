#include <algorithm>
#include <cstdint>
#include <string>

#include <gtest/gtest.h>

#include "tools/report/run_data.h"

namespace ballast::tools::timeline_data_test {
namespace {

using text::Json;

void add(LaneTimeline& timeline, const std::string& lane, std::int64_t start, std::int64_t duration,
         std::uint64_t step, Bytes bytes = 0) {
  timeline.slices.push_back({.lane = lane,
                             .name = "block",
                             .start = start,
                             .duration = duration,
                             .step = step,
                             .bytes = bytes,
                             .after = {}});
}

/// `steps` steps of `each` operations of 10 ns that follow each other without a gap, on two lanes.
LaneTimeline made(std::uint64_t steps, std::int64_t each) {
  LaneTimeline timeline = {.predicted = true, .source = "made", .slices = {}};
  for (std::uint64_t step = 1; step <= steps; ++step) {
    for (std::int64_t i = 0; i < each; ++i) {
      const std::int64_t start = 10 * (static_cast<std::int64_t>(step - 1) * each + i);
      for (const char* lane : {"compute", "fetch"}) add(timeline, lane, start, 10, step, 3);
    }
  }
  return timeline;
}

std::int64_t number(const Json& value) {
  return static_cast<std::int64_t>(value.number());
}

/// The greatest end of the slices, and the sum of their bytes.
struct Extent {
  std::int64_t end = 0;
  std::int64_t bytes = 0;
};

Extent extent_of(const Json& drawn) {
  Extent extent;
  const auto& starts = drawn.find("start")->elements();
  for (std::size_t i = 0; i < starts.size(); ++i) {
    const std::int64_t end = number(starts[i]) + number(drawn.find("duration")->elements()[i]);
    extent.end = std::max(extent.end, end);
    extent.bytes += number(drawn.find("bytes")->elements()[i]);
  }
  return extent;
}

TEST(Timeline, AStepLastsFromTheEndOfTheOneBefore) {
  const Json drawn = timeline_json(made(3, 100));
  const auto& steps = drawn.find("steps")->elements();
  ASSERT_EQ(steps.size(), 3U);
  for (std::size_t i = 0; i < 3; ++i) {
    const auto from = static_cast<std::int64_t>(1000 * i);
    EXPECT_EQ(number(*steps[i].find("from")), from);
    EXPECT_EQ(number(*steps[i].find("to")), from + 1000);
    EXPECT_EQ(steps[i].find("whole")->flag(), i > 0);
  }
  EXPECT_EQ(number(*drawn.find("left_out")), 0);
  EXPECT_EQ(number(*drawn.find("joined")), 0);
}

TEST(Timeline, AnEvaluationAndIdleTimeBelongToNoStep) {
  LaneTimeline timeline = made(1, 100);
  add(timeline, "compute", 1200, 900, 0);
  add(timeline, "fetch", 2150, 100, 2);
  add(timeline, "compute", 2500, 10, 2);
  const Json drawn = timeline_json(timeline);
  const auto& steps = drawn.find("steps")->elements();
  ASSERT_EQ(steps.size(), 2U);
  EXPECT_EQ(number(*steps[0].find("to")), 1000);
  EXPECT_EQ(number(*steps[1].find("from")), 2150);
  EXPECT_EQ(number(*steps[1].find("to")), 2510);
  // If the metrics have the time of the step, work before it is left out, but no computation.
  const auto from = [&](double seconds) {
    const Json fitted = timeline_json(timeline, {{2, seconds}});
    // A prediction belongs to no run.
    EXPECT_EQ(fitted.compact(), drawn.compact());
    LaneTimeline measured = timeline;
    measured.predicted = false;
    const Json shown = timeline_json(measured, {{2, seconds}});
    return number(*shown.find("steps")->elements()[1].find("from"));
  };
  EXPECT_EQ(from(200e-9), 2310);
  EXPECT_EQ(from(1.0), 2150);
  EXPECT_EQ(from(1e-9), 2500);
}

TEST(Timeline, AStepOfSeveralDevicesEndsWithTheLastOfThem) {
  LaneTimeline timeline = {.predicted = true, .source = "made", .slices = {}};
  add(timeline, "compute, device 0", 0, 100, 1);
  add(timeline, "compute, device 1", 50, 150, 1);
  add(timeline, "compute, device 0", 100, 20, 1);
  add(timeline, "compute, device 0", 200, 30, 2);
  add(timeline, "compute, device 1", 230, 40, 2);
  const Json drawn = timeline_json(timeline);
  const auto& steps = drawn.find("steps")->elements();
  ASSERT_EQ(steps.size(), 2U);
  EXPECT_EQ(number(*steps[0].find("to")), 200);
  EXPECT_EQ(number(*steps[1].find("from")), 200);
  EXPECT_EQ(number(*steps[1].find("to")), 270);
}

TEST(Timeline, ALongStepIsWholeWithItsShortOperationsJoined) {
  constexpr std::int64_t kEach = 50'000;  // times two lanes: more than are drawn
  const LaneTimeline timeline = made(3, kEach);
  const Json drawn = timeline_json(timeline);
  EXPECT_LE(drawn.find("start")->elements().size(), 20'000U);
  const auto& steps = drawn.find("steps")->elements();
  ASSERT_EQ(steps.size(), 1U);
  EXPECT_EQ(number(*steps.front().find("step")), 2);
  const std::int64_t to = number(*steps.front().find("to"));
  EXPECT_EQ(to - number(*steps.front().find("from")), 10 * kEach);
  // The first and last operations of the step are drawn, and no byte is lost.
  const Extent extent = extent_of(drawn);
  EXPECT_GE(extent.end, to);
  const std::int64_t shown =
      static_cast<std::int64_t>(timeline.slices.size()) - number(*drawn.find("left_out"));
  EXPECT_EQ(extent.bytes, 3 * shown);
  EXPECT_GT(number(*drawn.find("joined")), kEach);
}

}  // namespace
}  // namespace ballast::tools::timeline_data_test
