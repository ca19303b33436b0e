#include "src/planning/advice.h"

#include <gtest/gtest.h>

namespace ballast::planning {
namespace {

using schedule::Lane;

/// What is said of a run of 10 seconds with these lane times.
std::string advice(double compute, Lane lane, double busy) {
  engine::Blueprint blueprint;
  blueprint.workload.micro_batch_tokens = 256;
  blueprint.workload.micro_batches = 2;
  blueprint.workload.world = 2;
  schedule::LaneTotals lanes;
  lanes.busy_seconds[static_cast<std::size_t>(Lane::compute)] = compute;
  lanes.busy_seconds[static_cast<std::size_t>(lane)] = busy;
  return advise(blueprint, lanes, 10.0);
}

bool says(const std::string& text, const std::string& words) {
  return text.find(words) != std::string::npos;
}

TEST(Advice, ARunBoundByComputeHasItsTransfersHidden) {
  const std::string text = advice(9.5, Lane::fetch, 6.0);
  EXPECT_TRUE(says(text, "At 1024 tokens per step")) << text;
  EXPECT_TRUE(says(text, "bound by compute (95% of the time)")) << text;
}

TEST(Advice, ASlowDiskIsNamedWithTheBudgetThatAvoidsIt) {
  const std::string text = advice(4.0, Lane::writeback, 8.0);
  EXPECT_TRUE(says(text, "compute waits 60% of the time")) << text;
  EXPECT_TRUE(says(text, "writeback (80% of the time)")) << text;
  EXPECT_TRUE(says(text, "ballast.host_bytes")) << text;
}

TEST(Advice, ASlowLinkIsNamedWithTheBudgetThatAvoidsIt) {
  EXPECT_TRUE(says(advice(4.0, Lane::upload, 7.0), "ballast.device_bytes"));
  EXPECT_TRUE(says(advice(4.0, Lane::update, 7.0), "ballast.update_threads"));
}

TEST(Advice, StepsTooShortForAnyLaneAreSaidToBeSo) {
  EXPECT_TRUE(says(advice(3.0, Lane::upload, 0.5), "too short"));
}

}  // namespace
}  // namespace ballast::planning
