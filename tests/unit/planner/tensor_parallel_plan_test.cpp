#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/config/config.h"
#include "ballast/engine/blueprint.h"
#include "ballast/model/compute.h"
#include "ballast/plan/simulator.h"
#include "ballast/setup/translate.h"

#include "tests/support/random_run.h"

namespace ballast::planner::tensor_parallel_plan_test {
namespace {

constexpr std::uint64_t kMicroBatches = 2;
constexpr std::uint64_t kTokens = 2 * 1024;  ///< tokens of a micro-batch
constexpr std::uint64_t kHidden = 256;
constexpr std::uint64_t kVocabulary = 4096;
constexpr std::uint64_t kTiles = 4;

/// A run in which `places` ranks share each layer, with everything on the device.
engine::Blueprint draw(std::uint32_t places, std::uint64_t layers, step::Kept kept) {
  const std::string text = R"({
    "model": {"family": "llama", "vocab_size": 4096, "hidden_size": 256, "num_layers": 3,
              "num_heads": 8, "num_kv_heads": 4, "intermediate_size": 512, "layer_tiles": 4,
              "vocabulary_tiles": 4},
    "data": {"text": "unused.txt", "sequence_length": 1024},
    "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2,
    "ballast": {"device": "host"}})";
  const std::vector<std::string> overrides = {
      "tensor_parallel.autotp_size=" + std::to_string(places),
      "model.num_layers=" + std::to_string(layers)};
  const config::Config config = config::parse(text, "/base", "test", overrides, places);
  const engine::RunInputs run = setup::translate(config);
  const model::KernelSizes kernels =
      model::kernel_memory(run.model, run.type, run.batch.shape, "host", 1);
  engine::Blueprint blueprint = engine::outline(run, {Bytes{1} << 40U, Bytes{1} << 40U}, kernels,
                                                setup::mesh_of(config, places));
  const step::BlockPlacement on_device = {.weights = Tier::device,
                                          .optimizer = Tier::device,
                                          .activations = Tier::device,
                                          .kept = kept};
  engine::place(blueprint, {std::vector(run.model.blocks.size(), on_device)});
  return blueprint;
}

/// Bytes that a step receives from the ranks that share its layers.
Bytes received(const engine::Blueprint& blueprint) {
  Bytes bytes = 0;
  for (const plan::Operation& operation : blueprint.schedule.steady.operations) {
    if (operation.group == plan::RankGroup::tensor) bytes += operation.bytes;
  }
  return bytes;
}

Bytes line_of(const engine::Blueprint& blueprint, plan::Kind kind) {
  Bytes bytes = 0;
  for (const memory::LedgerLine& line : blueprint.ledger.lines()) {
    if (line.tier == Tier::device && line.kind == to_string(kind)) bytes += line.bytes;
  }
  return bytes;
}

/// Each half of a layer has a sum in the forward and in the backward pass. If a layer keeps only
/// its input, the sum of attention is repeated for the input of the MLP.
TEST(TensorParallelPlan, ALayerAddsTheTermsOfItsTilesOncePerPass) {
  for (const std::uint64_t places : {2U, 4U}) {
    const auto of_layers = [&](step::Kept kept) {
      const auto ranks = static_cast<std::uint32_t>(places);
      return (received(draw(ranks, 3, kept)) - received(draw(ranks, 1, kept))) / 2;
    };
    const Bytes terms = kTiles / places * 4;
    const Bytes sum = kMicroBatches * kTokens * kHidden * (terms + 2) * (places - 1) / places;
    EXPECT_EQ(of_layers(step::Kept::all), 4 * sum);
    EXPECT_EQ(of_layers(step::Kept::nothing), 5 * sum);
  }
  EXPECT_EQ(received(draw(1, 3, step::Kept::nothing)), 0U);
}

TEST(TensorParallelPlan, DividesTheMemoryAndWorkOfTiles) {
  const engine::Blueprint alone = draw(1, 3, step::Kept::all);
  const engine::Blueprint shared = draw(4, 3, step::Kept::all);
  EXPECT_EQ(shared.problem.tokens_per_step(), alone.problem.tokens_per_step());
  // The softmax needs the sums of all ranks, so the head computes its logits a second time.
  const double logits = 2.0 * static_cast<double>(kMicroBatches * kTokens * kHidden * kVocabulary);
  const double all = alone.flops_per_step() + logits;
  EXPECT_NEAR(shared.flops_per_step(), all / 4, 1e-9 * all);
  for (const plan::Kind kind : {plan::Kind::weights, plan::Kind::states}) {
    const Bytes whole = line_of(alone, kind);
    // Norms are on all ranks; a block takes whole pages.
    EXPECT_GE(line_of(shared, kind), whole / 4);
    EXPECT_LE(line_of(shared, kind), whole / 4 + whole / 40);
  }
}

TEST(TensorParallelPlan, SlowsWithTheFabricOfANode) {
  const engine::Blueprint shared = draw(4, 3, step::Kept::all);
  plan::Rates rates = test::quick_machine();
  rates.ranks_per_node = 4;
  rates.fabric_per_second = 1e7;
  const double fast = plan::simulate(shared.schedule, rates).step_seconds;
  rates.fabric_per_second = 5e6;
  const double slow = plan::simulate(shared.schedule, rates).step_seconds;
  const double bytes = static_cast<double>(received(shared));
  EXPECT_NEAR(slow - fast, bytes * (1 / 5e6 - 1 / 1e7), 0.1 * bytes / 1e7);
}

}  // namespace
}  // namespace ballast::planner::tensor_parallel_plan_test
