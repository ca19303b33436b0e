#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/engine/engine.h"
#include "ballast/engine/side_states.h"
#include "ballast/model/architecture.h"
#include "ballast/model/family.h"
#include "ballast/setup/setup.h"

#include "tests/support/temp_dir.h"
#include "tests/support/tiny_config.h"
#include "tests/support/tiny_training.h"

namespace ballast::engine::correction_biases_test {
namespace {

using Biases = std::vector<std::vector<float>>;

SideValues of_routers(Biases biases) {
  return {{std::string(kCorrectionBiases.name), std::move(biases)}};
}

/// The first layer is dense.
const std::string kModel =
    R"("family": "glm4_moe", "vocab_size": 131, "hidden_size": 32, "num_layers": 2, "num_heads": 2,
       "intermediate_size": 40, "n_routed_experts": 6, "num_experts_per_tok": 2,
       "moe_intermediate_size": 16)";
constexpr std::size_t kChosen = 2;

std::string speed(const std::string& value) {
  return "model.router_bias_update_speed=" + value;
}

StepResult step(Engine& engine, std::uint64_t number, double loss_scale = 1.0) {
  const std::size_t tokens = engine.blueprint().problem.tokens_per_step();
  return engine.train_step(test::scattered_ids(tokens, number).view(), 0.003, loss_scale);
}

std::size_t router_of(const Engine& engine) {
  const auto& blocks = engine.blueprint().model.blocks;
  std::size_t b = 0;
  while (model::correction_biases(blocks[b]) == nullptr) ++b;
  return b;
}

/// The tensor of a block as files have it.
std::vector<float> in_weights(Engine& engine, std::size_t block) {
  const model::TensorSpec& tensor =
      *model::correction_biases(engine.blueprint().model.blocks[block]);
  return model::sum_of_addends(tensor, engine.snapshot().read_weights(block, tensor));
}

TEST(CorrectionBiases, MoveBySignOfMeanLessLoad) {
  const test::TempDir directory;
  const Engine engine =
      setup::make_engine(test::tiny_config(kModel, true, directory.path(), {speed("0.5")}));
  SideStates biases(engine.blueprint().own());
  biases.balance({{}, {0, 0, 0, 0, 0, 9}}, 0.5);
  EXPECT_FALSE(biases.has(kCorrectionBiases));
  biases.set(of_routers({{0.25F, -0.25F, 0.0F, 1.0F, 8.0F, 8.0F}}));
  biases.balance({{}, {2, 1, 3, 0, 2, 4}}, 0.5);  // a mean of 2
  EXPECT_EQ(biases.values(), of_routers(Biases{{0.25F, 0.25F, -0.5F, 1.5F, 8.0F, 7.5F}}));
  biases.balance({{}, {2, 2, 2, 2, 2, 3}}, 0.25);  // a mean between 2 and 3
  EXPECT_EQ(biases.values(), of_routers(Biases{{0.5F, 0.5F, -0.25F, 1.75F, 8.25F, 7.25F}}));
  biases.balance({{}, {0, 0, 0, 0, 0, 0}}, 0.25);
  EXPECT_EQ(biases.values(), of_routers(Biases{{0.5F, 0.5F, -0.25F, 1.75F, 8.25F, 7.25F}}));
}

/// Biases that are larger than all scores decide alone.
TEST(CorrectionBiases, OfAStepChooseTheExpertsOfTheNext) {
  const test::TempDir directory;
  for (const bool bf16 : {true, false}) {
    Engine engine =
        setup::make_engine(test::tiny_config(kModel, bf16, directory.path(), {speed("3")}));
    engine.start();
    const std::size_t router = router_of(engine);
    EXPECT_EQ(in_weights(engine, router), std::vector<float>(6));
    std::vector<std::uint64_t> rows = step(engine, 1).expert_rows.back();
    const std::size_t all = kChosen * engine.blueprint().problem.tokens_per_step();
    EXPECT_EQ(std::accumulate(rows.begin(), rows.end(), std::size_t{0}), all);
    std::vector<float> expected;
    for (const std::uint64_t load : rows) {
      const double less = static_cast<double>(all) / 6.0 - static_cast<double>(load);
      expected.push_back(less > 0.0 ? 3.0F : less < 0.0 ? -3.0F : 0.0F);
    }
    EXPECT_EQ(engine.side_states(), of_routers({expected}));
    EXPECT_EQ(in_weights(engine, router), expected);
    const model::TensorSpec& tensor =
        *model::correction_biases(engine.blueprint().model.blocks[router]);
    const std::vector<float> block = engine.snapshot().read_block(router);
    EXPECT_EQ(model::sum_of_addends(tensor, std::span(block).subspan(tensor.offset, tensor.size)),
              expected);
    ASSERT_GE(std::ranges::count(expected, 3.0F), static_cast<std::ptrdiff_t>(kChosen));
    rows = step(engine, 1).expert_rows.back();
    for (std::size_t e = 0; e < rows.size(); ++e) {
      EXPECT_TRUE(expected[e] >= 0.0F || rows[e] == 0) << "expert " << e;
    }
  }
}

TEST(CorrectionBiases, DoNotMoveInSkippedStepsAndEvaluations) {
  const test::TempDir directory;
  std::vector<std::string> options = test::kFp16;
  options.push_back(speed("0.1"));
  Engine engine = setup::make_engine(test::tiny_config(kModel, false, directory.path(), options));
  engine.start();
  ASSERT_FALSE(step(engine, 1, 0x1p12).skipped);
  const SideValues before = engine.side_states();
  ASSERT_TRUE(step(engine, 2, 0x1p40).skipped);
  const std::size_t tokens = engine.evaluation_micro_batches() * engine.blueprint().shape.tokens();
  engine.evaluate(test::scattered_ids(tokens, 3).view());
  EXPECT_EQ(engine.side_states(), before);
  ASSERT_FALSE(step(engine, 2, 0x1p12).skipped);
  EXPECT_NE(engine.side_states(), before);
}

}  // namespace
}  // namespace ballast::engine::correction_biases_test
