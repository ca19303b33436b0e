// The options of ZeRO's stage 3, from the config to the blueprint, before anything is allocated.

#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/core/error.h"
#include "ballast/engine/blueprint.h"
#include "ballast/planner/planner.h"
#include "ballast/setup/translate.h"
#include "ballast/step/problem.h"

#include "tests/support/tiny_config.h"

namespace ballast::planner::stage3_options_test {
namespace {

const std::string kModel = R"("family": "gpt2", "vocab_size": 131, "hidden_size": 32,
                              "num_layers": 2, "num_heads": 4)";

engine::Blueprint drawn(std::uint32_t world, const std::vector<std::string>& options,
                        std::uint32_t rank = 0) {
  std::vector<std::string> overrides = {"zero_optimization.stage=3"};
  for (const std::string& option : options) overrides.push_back("zero_optimization." + option);
  const config::Config config = test::tiny_config(kModel, true, "/unused", overrides);
  return draw_blueprint(setup::translate(config), {64 * kMiB, 64 * kMiB}, {.workspace = kPage},
                        {.data = world, .rank = rank});
}

TEST(StageThreeOptions, BlocksWithFewParametersKeepTheirWeightsWhole) {
  const auto whole = [](const std::string& threshold) {
    const engine::Blueprint blueprint =
        drawn(4, {"stage3_param_persistence_threshold=" + threshold});
    std::vector<bool> found;
    for (const auto& block : blueprint.problem.blocks) found.push_back(block.replicated);
    return found;
  };
  // Embedding 5376, layers 12704, head 64.
  EXPECT_EQ(whole("0"), (std::vector<bool>{false, false, false, false}));
  EXPECT_EQ(whole("5375"), (std::vector<bool>{false, false, false, true}));
  EXPECT_EQ(whole("5376"), (std::vector<bool>{true, false, false, true}));
  EXPECT_EQ(whole("1e5"), (std::vector<bool>{true, true, true, true}));
}

/// The description of the gathers of weights.
std::string gathers_line(std::uint32_t world, const std::vector<std::string>& options) {
  std::string found;
  for (const auto& text : engine::describe_placement(drawn(world, options))) {
    if (text.starts_with("weights gathered ")) found += text;
  }
  return found;
}

TEST(StageThreeOptions, QuantisedGathersAreReportedInOneLine) {
  EXPECT_EQ(gathers_line(2, {"zero_quantized_weights=true"}),
            "weights gathered  in 8 bits; results differ from those with gathers in bf16");
  EXPECT_EQ(gathers_line(2, {"zero_quantized_weights=false"}), "");
  EXPECT_EQ(gathers_line(1, {"zero_quantized_weights=true"}), "");
}

TEST(StageThreeOptions, GatherGroupsAreReportedInThatLine) {
  const std::string groups = "zero_hpz_partition_size=4";
  EXPECT_EQ(gathers_line(8, {groups}), "weights gathered  among 4 of 8 ranks");
  EXPECT_EQ(gathers_line(8, {groups, "zero_quantized_weights=true"}),
            "weights gathered  among 4 of 8 ranks, in 8 bits; results differ from those with "
            "gathers in bf16");
  EXPECT_EQ(gathers_line(4, {groups}), "");
  EXPECT_EQ(gathers_line(8, {"zero_hpz_partition_size=1"}), "");
  EXPECT_EQ(gathers_line(1, {groups}), "");
}

TEST(StageThreeOptions, GroupsMustDivideTheRanks) {
  EXPECT_EQ(drawn(8, {"zero_hpz_partition_size=4"}).problem.hpz_partition_size, 4U);
  EXPECT_EQ(drawn(8, {"zero_hpz_partition_size=1"}).problem.hpz_partition_size, 0U);
  EXPECT_EQ(drawn(1, {"zero_hpz_partition_size=4"}).problem.hpz_partition_size, 0U);
  for (const std::uint32_t world : {2U, 6U}) {
    try {
      drawn(world, {"zero_hpz_partition_size=4"});
      ADD_FAILURE() << "no error";
    } catch (const Error& error) {
      EXPECT_EQ(error.category(), ErrorCategory::config);
      EXPECT_NE(std::string(error.what())
                    .find("zero_optimization.zero_hpz_partition_size: 4 does not divide the " +
                          std::to_string(world) + " ranks"),
                std::string::npos)
          << error.what();
    }
  }
}

TEST(StageThreeOptions, RanksOfAllGroupsTogetherUpdateEveryElementOnce) {
  constexpr std::uint32_t kWorld = 6;
  std::vector<int> updated(drawn(1, {}).model.blocks[1].elements, 0);
  for (std::uint32_t rank = 0; rank < kWorld; ++rank) {
    const engine::ShardRange shard =
        engine::rank_shard(drawn(kWorld, {"zero_hpz_partition_size=2"}, rank), 1);
    for (Elems i = 0; i < shard.elements; ++i) ++updated[shard.first + i];
  }
  EXPECT_EQ(updated, std::vector<int>(updated.size(), 1));
}

}  // namespace
}  // namespace ballast::planner::stage3_options_test
