// Tables stay below the device. Only the rows that tokens select move there.

#include <algorithm>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/core/error.h"
#include "ballast/engine/engine.h"
#include "ballast/setup/setup.h"

#include "tests/support/temp_dir.h"
#include "tests/support/tiny_config.h"
#include "tests/support/tiny_training.h"

namespace ballast::engine::table_rows_test {
namespace {

/// Two layers of Gemma 4 E2B, each with a table of `rows` rows of 16 values.
std::string model_with_tables(std::uint64_t rows) {
  return fmt::format(R"("family": "gemma4", "vocab_size": 131, "hidden_size": 32, "num_layers": 2,
                        "num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "global_head_dim": 16,
                        "intermediate_size": 32, "sliding_window": 9,
                        "layer_types": ["sliding_attention", "full_attention"],
                        "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": {})",
                     rows);
}

const std::vector<std::string> kAdapters = {
    "ballast.train=adapters", R"(ballast.adapters={"targets": "all-linear", "rank": 2})"};
const std::vector<std::string> kOnHost = {"zero_optimization.offload_optimizer.device=cpu",
                                          "zero_optimization.offload_param.device=cpu"};

/// Checks where the tables are and what a step moves of them. `overrides`: keys that the config
/// names in addition.
void expect_only_rows_move(const std::vector<std::string>& overrides) {
  const test::TempDir directory;
  const Blueprint blueprint = setup::draw_blueprint(
      test::tiny_config(model_with_tables(16384), true, directory.path(), overrides));
  const step::Problem& problem = blueprint.problem;
  const plan::Schedule& schedule = blueprint.schedule;
  Bytes table = 0;
  for (std::uint32_t b = 0; b < problem.blocks.size(); ++b) {
    if (blueprint.model.blocks[b].content != model::BlockContent::layer_embedding) continue;
    table = problem.blocks[b].weight_bytes;
    EXPECT_EQ(schedule.buffers[schedule.weight_home[b]].tier, Tier::host);
    Bytes uploaded = 0;
    Bytes offloaded = 0;
    for (const plan::Operation& operation : schedule.steady.operations) {
      if (operation.block != b) continue;
      uploaded += operation.action == plan::Action::upload ? operation.bytes : 0;
      offloaded += operation.action == plan::Action::offload ? operation.bytes : 0;
    }
    const std::uint64_t values = problem.micro_batches * blueprint.shape.tokens() * 16;
    EXPECT_EQ(uploaded, 2 * values * sizeof(Bf16)) << "in the forward and backward pass";
    EXPECT_EQ(offloaded, problem.blocks[b].is_frozen() ? 0 : values * sizeof(float));
  }
  EXPECT_GT(table, 10 * blueprint.shape.tokens() * 16 * sizeof(Bf16));
  for (const plan::Buffer& buffer : schedule.buffers) {
    if (buffer.tier != Tier::device) continue;
    EXPECT_LT(buffer.bytes, table) << buffer.name;
  }
}

TEST(TableRows, AreAllThatMovesOfTables) {
  for (const std::vector<std::string>& tiers : {std::vector<std::string>(), kOnHost}) {
    expect_only_rows_move(tiers);
    std::vector<std::string> frozen = kAdapters;
    frozen.insert(frozen.end(), tiers.begin(), tiers.end());
    expect_only_rows_move(frozen);
  }
}

/// The device would wait for rows of the first layer if the lane first packed the last layer's
/// gradient.
TEST(TableRows, AreSelectedBeforeTheGradientOfTheLayerAboveIsPacked) {
  const test::TempDir directory;
  const Blueprint blueprint = setup::draw_blueprint(
      test::tiny_config(model_with_tables(131), true, directory.path(), kOnHost));
  const std::vector<plan::Operation>& all = blueprint.schedule.steady.operations;
  const auto is_of = [](plan::Action action) {
    return [action](const plan::Operation& one) { return one.action == action; };
  };
  const auto last_select = std::find_if(all.rbegin(), all.rend(), is_of(plan::Action::select));
  const auto first_scatter = std::ranges::find_if(all, is_of(plan::Action::scatter));
  ASSERT_NE(last_select, all.rend());
  ASSERT_NE(first_scatter, all.end());
  EXPECT_LT(last_select->block, first_scatter->block);
  EXPECT_LT(&*last_select, &*first_scatter);
}

TEST(TableRows, OfATokenThatTheTableLacksAreRefused) {
  const test::TempDir directory;
  Engine engine =
      setup::make_engine(test::tiny_config(model_with_tables(100), true, directory.path()));
  engine.start();
  const auto ids = test::scattered_ids(engine.blueprint().problem.tokens_per_step(), 0);
  const auto all = ids.view().tokens;
  const auto first = std::ranges::find_if(all, [](std::int32_t token) { return token >= 100; });
  ASSERT_NE(first, all.end());
  try {
    engine.train_step(ids.view(), 0.003);
    FAIL() << "the step was not refused";
  } catch (const Error& error) {
    EXPECT_EQ(error.category(), ErrorCategory::data);
    const std::string expected = fmt::format(
        "token {} has no row in the embeddings of the layers: "
        "model.vocab_size_per_layer_input is 100",
        *first);
    EXPECT_NE(std::string(error.what()).find(expected), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace ballast::engine::table_rows_test
