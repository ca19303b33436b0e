#include <chrono>
#include <map>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tools/bench/step_times.h"

namespace ballast::tools::step_breakdown_test {
namespace {

/// `second` seconds after a fixed moment.
KernelTime at(int second) {
  return KernelTime(std::chrono::hours(1) + std::chrono::seconds(second));
}

std::map<std::string, double> seconds_by_name(const std::vector<KernelRow>& rows) {
  std::map<std::string, double> seconds;
  for (const KernelRow& row : rows) seconds[row.name] = row.seconds;
  return seconds;
}

TEST(StepBreakdown, InnerKernelsHaveTheirTimeAndUpdatesOnlyWhatNothingElseUses) {
  const std::vector<KernelSpan> spans = {
      {KernelGroup::product, {2, 3, 4}, at(2), at(5)},
      {KernelGroup::widening, {}, at(1), at(7)},
      {KernelGroup::pass, {}, at(0), at(8)},
      {KernelGroup::update, {}, at(6), at(11)},
      {KernelGroup::product, {2, 3, 4}, at(9), at(10)},
  };
  const auto rows = break_down(spans, at(0), at(12));
  EXPECT_EQ(seconds_by_name(rows), (std::map<std::string, double>{{"2 x 3 x 4", 4.0},
                                                                  {"widening", 3.0},
                                                                  {"passes outside kernels", 2.0},
                                                                  {"update", 2.0},
                                                                  {"rest", 1.0}}));
  EXPECT_EQ(rows.front().name, "2 x 3 x 4");
  EXPECT_EQ(rows.front().calls, 2U);
  EXPECT_EQ(rows.front().flops, 2.0 * 2.0 * 2.0 * 3.0 * 4.0);
  EXPECT_EQ(rows.back().name, "rest");
}

TEST(StepBreakdown, CutsKernelsAtTheEndsOfTheMeasuredTime) {
  const std::vector<KernelSpan> spans = {{KernelGroup::norm, {}, at(0), at(3)},
                                         {KernelGroup::norm, {}, at(4), at(4)},
                                         {KernelGroup::rotary, {}, at(5), at(9)},
                                         {KernelGroup::attention, {}, at(7), at(8)}};
  EXPECT_EQ(seconds_by_name(break_down(spans, at(2), at(6))),
            (std::map<std::string, double>{{"norm", 1.0}, {"rotary", 1.0}, {"rest", 2.0}}));
}

TEST(StepBreakdown, KernelsAreOnlyRecordedOnRequest) {
  { const KernelClock ignored(KernelGroup::norm); }
  KernelRecording recording;
  { const KernelClock kept(KernelGroup::product, {1, 2, 3}); }
  const auto spans = recording.take();
  ASSERT_EQ(spans.size(), 1U);
  EXPECT_EQ(spans.front().extents[1], 2U);
  EXPECT_TRUE(recording.take().empty());
}

}  // namespace
}  // namespace ballast::tools::step_breakdown_test
