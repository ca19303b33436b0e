// Blueprints of configs with and without "auto", without rates.

#include <algorithm>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/core/error.h"
#include "ballast/setup/setup.h"
#include "ballast/setup/translate.h"

#include "tests/support/temp_dir.h"
#include "tests/support/tiny_config.h"

namespace ballast::setup::draw_blueprint_test {
namespace {

const std::string kModel = R"("family": "llama", "vocab_size": 131, "hidden_size": 64,
                              "num_layers": 3, "num_heads": 4)";
const std::string kWeights = "zero_optimization.offload_param.device=";
const std::string kOptimizer = "zero_optimization.offload_optimizer.device=";

class DrawBlueprint : public testing::Test {
 protected:
  [[nodiscard]] config::Config config(const std::vector<std::string>& overrides = {}) const {
    return test::tiny_config(kModel, true, directory.path(), overrides);
  }

  test::TempDir directory;
};

TEST_F(DrawBlueprint, TheConfigNamesOptimizerAndStateFormat) {
  using cpu_adam::Moments;
  const auto states = [&](const std::string& optimizer, const std::string& format) {
    return draw_blueprint(config({"optimizer=" + optimizer, "ballast.optimizer_states=" + format}))
        .states;
  };
  for (const cpu_adam::OptimizerRow& row : cpu_adam::kOptimizers) {
    const char* mode = row.type == cpu_adam::Optimizer::adam ? R"("adam_w_mode": false)" : "";
    const std::string section =
        fmt::format(R"({{"type": "{}", "params": {{{}}}}})", row.title, mode);
    EXPECT_EQ(states(section, "fp32").optimizer, row.type) << section;
  }
  EXPECT_EQ(states(R"({"type": "Adam"})", "fp32").optimizer, cpu_adam::Optimizer::adamw);
  EXPECT_EQ(states("{}", "fp32").moments, Moments::Format::f32);
  EXPECT_EQ(states("{}", "bf16_first").moments, Moments::Format::bf16_first);
  EXPECT_EQ(states("{}", "8bit").moments, Moments::Format::blockwise8);
}

TEST_F(DrawBlueprint, AutomaticPlacementFillsTheFastestTierThatFits) {
  const engine::Blueprint roomy = draw_blueprint(config({kWeights + "auto", kOptimizer + "auto"}));
  for (const auto& block : roomy.placement.blocks) {
    EXPECT_EQ(block.weights, Tier::device);
    EXPECT_EQ(block.optimizer, Tier::device);
  }
  const engine::Blueprint base =
      draw_blueprint(config({kWeights + "cpu", kOptimizer + "nvme", "ballast.recompute=true"}));
  const memory::Ledger& ledger = base.ledger;
  const auto& work = base.problem.blocks;
  ASSERT_GT(work[1].state_bytes(), work[0].state_bytes());
  // The host has room for the states of the embedding but not of a layer; the device has none.
  const engine::Blueprint tight = draw_blueprint(config(
      {kWeights + "cpu", kOptimizer + "auto",
       fmt::format("ballast.device_bytes={}", ledger.total(Tier::device)),
       fmt::format("ballast.host_bytes={}", ledger.total(Tier::host) + work[0].state_bytes())}));
  const auto& blocks = tight.placement.blocks;
  EXPECT_EQ(blocks.front().optimizer, Tier::host);
  EXPECT_EQ(blocks[1].optimizer, Tier::nvme);
  EXPECT_TRUE(tight.ledger.fits(tight.budgets));
}

TEST_F(DrawBlueprint, ASubGroupTakesASmallPartOfTheHostBudget) {
  const auto size = [&](Bytes host, const std::string& named) {
    const config::Config config = this->config({"zero_optimization.sub_group_size=" + named});
    return engine::outline(translate(config), {.host = host}, {}, {}).sub_group_size;
  };
  constexpr Elems kMi = Elems{1} << 20U;
  EXPECT_EQ(size(kMiB, "auto"), 4 * kMi);
  EXPECT_EQ(size(64 * kGiB, "auto"), 256 * kMi);  // 2.5 of 4 GiB
  EXPECT_EQ(size(64 * kGiB, "0"), 256 * kMi);
  EXPECT_EQ(size(64 * kGiB, "1e9"), 256 * kMi);
  EXPECT_EQ(size(64 * kGiB, "5000000"), 5'000'000U);
  EXPECT_EQ(size(64 * kGiB, "1"), 1U);
}

TEST_F(DrawBlueprint, AnEvaluationHasMemoryForWeightsButNotForTraining) {
  // Keys that only concern training are ignored.
  const std::vector<std::string> training = {
      kOptimizer + "nvme", "ballast.activations=host", "ballast.recompute=false",
      "ballast.speculative_updates=2", "ballast.order=layer_major"};
  auto overrides = training;
  overrides.push_back(kWeights + "auto");
  const engine::Blueprint roomy = draw_evaluation(config(overrides));
  EXPECT_EQ(roomy.options.purpose, step::Purpose::evaluation);
  Bytes weights = 0;
  for (const auto& block : roomy.problem.blocks) weights += round_up(block.weight_bytes, kPage);
  std::vector<std::string> kinds;
  for (const memory::LedgerLine& line : roomy.ledger.lines()) {
    if (line.tier == Tier::device) kinds.push_back(line.kind);
    EXPECT_NE(line.tier, Tier::nvme);
    if (line.kind == "weights") {
      EXPECT_EQ(line.bytes, weights);
    }
  }
  std::sort(kinds.begin(), kinds.end());
  EXPECT_EQ(kinds, (std::vector<std::string>{"activations", "batch", "weights", "workspace"}));
  // A page less, and weights move to the host.
  overrides.push_back(
      fmt::format("ballast.device_bytes={}", roomy.ledger.total(Tier::device) - kPage));
  const engine::Blueprint tight = draw_evaluation(config(overrides));
  EXPECT_TRUE(tight.ledger.fits(tight.budgets));
  EXPECT_EQ(tight.placement.blocks.front().weights, Tier::device);
  EXPECT_EQ(tight.placement.blocks.back().weights, Tier::host);
  overrides.push_back(kWeights + "none");
  EXPECT_THROW(draw_evaluation(config(overrides)), Error);
}

TEST_F(DrawBlueprint, AnEvaluationTakesTheLargestMicroBatchThatFits) {
  const auto draw = [this](Bytes bytes) {
    return draw_evaluation(config({"train_batch_size=8", "train_micro_batch_size_per_gpu=auto",
                                   "gradient_accumulation_steps=auto", kWeights + "none",
                                   fmt::format("ballast.device_bytes={}", bytes)}));
  };
  const engine::Blueprint whole = draw(64 * kMiB);
  EXPECT_EQ(whole.shape.sequences, 8U);
  const engine::Blueprint parts = draw(whole.ledger.total(Tier::device) - kPage);
  EXPECT_EQ(parts.shape.sequences, 4U);
  EXPECT_EQ(parts.micro_batches, 2U);
}

TEST_F(DrawBlueprint, LayersKeepTheirIntermediatesWhereThereIsRoomAndTheLastOnesFirst) {
  const auto kept = [this](std::vector<std::string> overrides) {
    overrides.emplace_back("ballast.order=layer_major");
    const engine::Blueprint engine = draw_blueprint(config(overrides));
    std::vector<bool> keeps;
    for (const auto& block : engine.placement.blocks) {
      keeps.push_back(block.kept == step::Kept::all);
    }
    return keeps;
  };
  using Kept = std::vector<bool>;
  EXPECT_EQ(kept({}), (Kept{false, true, true, true, false}));
  EXPECT_EQ(kept({"ballast.recompute=true"}), (Kept{false, false, false, false, false}));
  const engine::Blueprint none = draw_blueprint(config({"ballast.recompute=true"}));
  const model::StepProgram& program = none.problem.program();
  const model::ValueId kept_by_layer = none.problem.index->values().kept.front();
  const Bytes before = none.ledger.total(Tier::device);
  const Bytes layer = none.micro_batches * program.bytes_of(program.values[kept_by_layer]);
  ASSERT_GT(layer, 0U);
  const auto with_bytes = [&](Bytes bytes) {
    return kept({fmt::format("ballast.device_bytes={}", bytes)});
  };
  EXPECT_EQ(with_bytes(before + layer - 1), (Kept{false, false, false, false, false}));
  EXPECT_EQ(with_bytes(before + layer), (Kept{false, false, false, true, false}));
  EXPECT_EQ(with_bytes(before + 2 * layer), (Kept{false, false, true, true, false}));
  const std::string first_again = R"(ballast.placement=[{"blocks": "0-1", "recompute": true}])";
  EXPECT_EQ(kept({first_again}), (Kept{false, false, true, true, false}));
  EXPECT_EQ(kept({"ballast.recompute=false", first_again}),
            (Kept{false, false, true, true, false}));
  const std::string too_little = fmt::format("ballast.device_bytes={}", before);
  EXPECT_THROW(draw_blueprint(config({"ballast.recompute=false", too_little})), Error);
}

TEST_F(DrawBlueprint, ABudgetTooSmallIsFoundBeforeAnythingIsAllocated) {
  try {
    const engine::Blueprint engine = draw_blueprint(config({"ballast.device_bytes=256KiB"}));
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.category(), ErrorCategory::memory);
    EXPECT_NE(std::string(error.what()).find("device budget of 256 KiB"), std::string::npos)
        << error.what();
  }
}

TEST_F(DrawBlueprint, CompressedMomentsAreReportedInOneLine) {
  const auto moments = [&](const std::string& states) {
    const engine::Blueprint engine = draw_blueprint(config({"ballast.optimizer_states=" + states}));
    std::string found;
    for (const auto& line : engine::describe_placement(engine)) {
      if (line.starts_with("moments ")) found += line;
    }
    return found;
  };
  EXPECT_EQ(moments("fp32"), "");
  EXPECT_NE(moments("8bit").find("in 8 bits; results differ from those with fp32 states"),
            std::string::npos);
  EXPECT_NE(moments("bf16_first").find("first in bf16; results differ"), std::string::npos);
}

}  // namespace
}  // namespace ballast::setup::draw_blueprint_test
