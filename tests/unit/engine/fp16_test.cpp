#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/core/error.h"
#include "ballast/setup/setup.h"

#include "tests/support/expect_error.h"
#include "tests/support/function_weights.h"
#include "tests/unit/engine/tiny_engine.h"

namespace ballast::engine::fp16_test {
namespace {

using test::kOptimizer;
using test::kWeights;

class Fp16Engine : public test::TinyEngine {
 protected:
  [[nodiscard]] Engine make(std::vector<std::string> overrides = {},
                            const std::string& model = test::kTinyModel) const {
    overrides.emplace_back("fp16.enabled=true");
    return setup::make_engine(test::tiny_config(model, false, directory.path(), overrides));
  }
  StepResult step(Engine& engine, int seed, double scale, double rate = 0.01) const {
    return engine.train_step({ids(engine, seed), ids(engine, seed + 1)}, rate, scale);
  }
};

constexpr double kGood = 0x1p12;
constexpr double kTooLarge = 0x1p40;

/// Nothing is clipped, so speculative updates of good steps are kept.
TEST_F(Fp16Engine, AnOverflowLeavesEveryStateAsItWas) {
  const std::string no_clipping = "gradient_clipping=0";
  Engine never = make({no_clipping});
  never.start();
  step(never, 1, kGood);
  const std::uint64_t before = never.snapshot().hash();
  const double loss = step(never, 2, kGood).loss;
  const std::uint64_t after = never.snapshot().hash();
  EXPECT_NE(after, before);
  const std::vector<std::vector<std::string>> placements = {
      {},
      {kOptimizer + "cpu", "ballast.speculative_updates=9"},
      {kWeights + "nvme", kOptimizer + "nvme", "ballast.speculative_updates=9"},
      {kWeights + "cpu", kOptimizer + "nvme", "ballast.speculative_updates=2"}};
  for (std::vector<std::string> placement : placements) {
    SCOPED_TRACE(placement.empty() ? "on the device" : placement.front());
    placement.push_back(no_clipping);
    Engine engine = make(placement);
    engine.start();
    step(engine, 1, kGood);
    const StepResult overflow = step(engine, 7, kTooLarge);
    EXPECT_TRUE(overflow.skipped);
    EXPECT_TRUE(std::isfinite(overflow.loss));
    EXPECT_EQ(engine.updates(), 1U);
    EXPECT_EQ(engine.snapshot().hash(), before);
    EXPECT_EQ(step(engine, 2, kGood).loss, loss);
    EXPECT_EQ(engine.updates(), 2U);
    EXPECT_EQ(engine.snapshot().hash(), after);
  }
}

/// Its routers have their own loss.
const std::string kExperts = R"("family": "qwen2_moe", "vocab_size": 131, "hidden_size": 64,
                                "num_layers": 1, "num_heads": 4, "intermediate_size": 96,
                                "num_experts": 4, "num_experts_per_tok": 2,
                                "moe_intermediate_size": 32,
                                "shared_expert_intermediate_size": 48,
                                "output_router_logits": true, "router_aux_loss_coef": 300.0)";

/// The norm equals that of fp32. Only denormal numbers round differently. Uses SGD, since AdamW's
/// updates do not depend on the size of gradients.
TEST_F(Fp16Engine, TheScaleChangesNeitherNormNorUpdate) {
  for (const std::string& model : {test::kTinyModel, kExperts}) {
    const std::vector<std::string> options = {R"(optimizer={"type": "SGD"})",
                                              "gradient_clipping=0.1"};
    Engine exact = setup::make_engine(test::tiny_config(model, false, directory.path(), options));
    exact.start();
    const double norm = step(exact, 1, 1.0, 1.0).grad_norm;
    EXPECT_GT(norm, 0.2) << "nothing was clipped";
    const double loss = step(exact, 1, 1.0, 1.0).loss;
    for (const double scale : {0x1p5, 0x1p8}) {
      Engine engine = make(options, model);
      engine.start();
      EXPECT_NEAR(step(engine, 1, scale, 1.0).grad_norm, norm, 3e-3 * norm) << scale;
      EXPECT_NEAR(step(engine, 1, scale, 1.0).loss, loss, 3e-3) << scale;
    }
  }
}

TEST_F(Fp16Engine, MastersHaveAllBitsOfASource) {
  Engine engine = make({kWeights + "nvme", kOptimizer + "cpu", "ballast.update_threads=3"});
  expect_all_of_a_source(engine);
}

TEST_F(Fp16Engine, AWeightThatFp16LacksIsRefusedByName) {
  Engine engine = make();
  test::expect_error(
      ErrorCategory::data,
      {"tensor 'model.norm.weight' has the value 70000, but fp16 ends at 65504; train in bf16 "
       "(bf16.enabled) or fp32"},
      [&] {
        test::start_from(engine, {[](const model::TensorSpec& tensor, Elems, std::span<float> out) {
                           const bool here = tensor.name == "model.norm.weight";
                           std::fill(out.begin(), out.end(), here ? 70000.0F : 65504.0F);
                         }});
      });
}

}  // namespace
}  // namespace ballast::engine::fp16_test
