// Predictions for an 8B model with 4 x 8192 tokens on an H100, and what the planner keeps for its
// backward pass.

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/calibrate/machine_rates.h"
#include "ballast/config/config.h"
#include "ballast/setup/setup.h"

namespace ballast::planner::long_sequences_test {
namespace {

/// The H100 of configs/rates with estimated kernels: products at 650 TFLOP/s, attention at 550
/// forward and 140 backward.
plan::Rates h100() {
  plan::Rates rates = calibrate::load_rates(std::string(BALLAST_CONFIGS) + "/rates/h100-node.json");
  rates.forward = rates.backward = rates.head = {{32768.0, 650e12}};
  rates.of(AttentionClass::heads_128) = {.forward = 550e12, .backward = 140e12};
  return rates;
}

config::Config config_for(const std::vector<std::string>& overrides) {
  const std::string text = R"({
    "model": {"family": "llama", "vocab_size": 128256, "hidden_size": 4096, "num_layers": 32,
              "num_heads": 32, "num_kv_heads": 8, "intermediate_size": 14336,
              "max_sequence": 8192, "tie_embeddings": false},
    "data": {"tokens": "unused.bin", "sequence_length": 8192},
    "train_batch_size": 4, "train_micro_batch_size_per_gpu": 4,
    "zero_optimization": {"offload_optimizer": {"device": "auto", "nvme_path": "/swap"},
                          "offload_param": {"device": "auto"}}})";
  return config::parse(text, "/", "test", overrides);
}

PlanRequest request_for(plan::Rates rates, const std::vector<std::string>& overrides) {
  PlanRequest request = setup::plan_request(config_for(overrides));
  request.budgets = {78 * kGiB, 240 * kGiB};
  request.rates = std::move(rates);
  // Sizes on a GPU, for a micro-batch.
  request.kernels = [blocks = request.run.model.blocks.size()](model::MicroBatchShape) {
    return model::KernelSizes{.workspace = 1800 * kMiB,
                              .intermediates = std::vector<Bytes>(blocks, 4300 * kMiB),
                              .attention = std::vector<Bytes>(blocks, 516 * kMiB),
                              .rows = 260 * kMiB,
                              .cleared = std::vector<Bytes>(blocks, 0)};
  };
  return request;
}

double seconds(const Decision& decision) {
  return decision.prediction.step_seconds;
}

TEST(LongSequences, TakeTheTimeOfAttention) {
  // The arithmetic: products 2.9 s, attention's backward pass 1.3, forward pass 0.26, updates.
  const Decision again = decide(request_for(h100(), {"ballast.recompute=true"}));
  EXPECT_GT(seconds(again), 4.4);
  EXPECT_LT(seconds(again), 4.9);
  // Without its rates, attention would be as fast as products.
  plan::Rates flat = h100();
  flat.of(AttentionClass::heads_128) = {};
  EXPECT_LT(seconds(decide(request_for(flat, {"ballast.recompute=true"}))), 0.85 * seconds(again));
}

TEST(LongSequences, ResultsOfAttentionAreKeptWhereThatIsFaster) {
  const Decision again = decide(request_for(h100(), {"ballast.recompute=true"}));
  const Decision open = decide(request_for(h100(), {}));
  EXPECT_LT(1.03 * seconds(open), seconds(again));
  const auto& blocks = open.blueprint.placement.blocks;
  const auto kept = std::count_if(blocks.begin(), blocks.end(), [](const auto& block) {
    return block.kept == step::Kept::attention;
  });
  EXPECT_GT(kept, 16);
  // The printed config draws the same placement.
  const config::Config settled = setup::settle(config_for({}), open.blueprint);
  const config::Config printed = config::parse(config::print(settled), "/", "printed", {});
  EXPECT_EQ(printed.ballast.kept, settled.ballast.kept);
  EXPECT_EQ(printed.ballast.placement.size(), settled.ballast.placement.size());
}

}  // namespace
}  // namespace ballast::planner::long_sequences_test
