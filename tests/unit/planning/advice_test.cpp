#include <gtest/gtest.h>

#include "ballast/planning/run_plan.h"

namespace ballast::planning {
namespace {

using schedule::Lane;

/// The advice for a run of 10 seconds with these lane times, if the simulator finds `variants`.
std::string advice(double compute, Lane lane, double busy, const std::vector<Variant>& variants) {
  engine::Blueprint blueprint;
  blueprint.workload.micro_batch_tokens = 256;
  blueprint.workload.micro_batches = 2;
  blueprint.workload.world = 2;
  schedule::LaneTotals lanes;
  lanes.busy_seconds[static_cast<std::size_t>(Lane::compute)] = compute;
  lanes.busy_seconds[static_cast<std::size_t>(lane)] = busy;
  return advise(blueprint, lanes, 10.0, [&] { return variants; });
}

bool says(const std::string& text, const std::string& words) {
  return text.find(words) != std::string::npos;
}

const std::vector<Variant> kVariants = {{"25% more host memory", 20.0, 2.0}, {"others", 15.0, 1.5}};

TEST(Advice, ARunBoundByComputeHasItsTransfersHidden) {
  const std::string text = advice(9.5, Lane::fetch, 6.0, kVariants);
  EXPECT_TRUE(says(text, "At 1024 tokens per step")) << text;
  EXPECT_TRUE(says(text, "bound by compute (95% of the time)")) << text;
  EXPECT_FALSE(says(text, "host memory")) << text;
}

TEST(Advice, ASlowLaneIsNamedWithTheBestChangeThatWasSimulated) {
  const std::string text = advice(4.0, Lane::writeback, 8.0, kVariants);
  EXPECT_TRUE(says(text, "compute waits 60% of the time")) << text;
  EXPECT_TRUE(says(text, "writeback (80% of the time)")) << text;
  EXPECT_TRUE(says(text, "Simulated: 25% more host memory would be 2.00x as fast.")) << text;
  EXPECT_FALSE(says(text, "others")) << text;
}

TEST(Advice, NothingIsAdvisedThatWasNotSimulated) {
  const std::string text = advice(4.0, Lane::upload, 7.0, {});
  EXPECT_TRUE(says(text, "No simulated change makes it faster.")) << text;
  schedule::LaneTotals lanes;
  EXPECT_TRUE(says(advise({}, lanes, 10.0), "`ballast plan` simulates changes."));
}

TEST(Advice, StepsTooShortForAnyLaneAreSaidToBeSo) {
  EXPECT_TRUE(says(advice(3.0, Lane::upload, 0.5, kVariants), "too short"));
}

}  // namespace
}  // namespace ballast::planning
