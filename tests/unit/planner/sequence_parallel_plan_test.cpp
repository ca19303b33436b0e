#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/config/config.h"
#include "ballast/engine/blueprint.h"
#include "ballast/model/compute.h"
#include "ballast/plan/simulator.h"
#include "ballast/setup/translate.h"

#include "tests/support/random_run.h"

namespace ballast::planner::sequence_parallel_plan_test {
namespace {

constexpr std::uint64_t kLayers = 3;
constexpr std::uint64_t kMicroBatches = 2;
constexpr std::uint64_t kSequences = 2;
constexpr std::uint64_t kLength = 4096;
constexpr Bytes kColumns = 8 * 16 + 2 * 4 * 16;  ///< queries, keys and values
constexpr Bytes kResults = 8 * 16;               ///< results of attention
constexpr Bytes kWidth = 2;                      ///< bytes of a value

/// Everything on the device of each of `parts` ranks, which share the sequences.
engine::Blueprint draw(std::uint32_t parts, step::Kept kept) {
  const std::string text = R"({
    "model": {"family": "llama", "vocab_size": 512, "hidden_size": 128, "num_layers": 3,
              "num_heads": 8, "num_kv_heads": 4, "head_dim": 16},
    "data": {"text": "unused.txt", "sequence_length": 4096},
    "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2,
    "ballast": {"device": "host"}})";
  const std::vector<std::string> overrides = {"sequence_parallel_size=" + std::to_string(parts)};
  const config::Config config = config::parse(text, "/base", "test", overrides, parts);
  const engine::RunInputs run = setup::translate(config);
  const model::KernelSizes kernels =
      model::kernel_memory(run.model, run.type, run.batch.shape, "host", 1);
  engine::Blueprint blueprint = engine::outline(run, {Bytes{1} << 40U, Bytes{1} << 40U}, kernels,
                                                setup::mesh_of(config, parts));
  const step::BlockPlacement on_device = {.weights = Tier::device,
                                          .optimizer = Tier::device,
                                          .activations = Tier::device,
                                          .kept = kept};
  engine::place(blueprint, {std::vector(run.model.blocks.size(), on_device)});
  return blueprint;
}

/// Bytes that the passes of a step receive from other ranks.
Bytes received(const engine::Blueprint& blueprint) {
  Bytes bytes = 0;
  for (const plan::Operation& operation : blueprint.schedule.steady.operations) {
    if (operation.action == plan::Action::compute) bytes += operation.bytes;
  }
  return bytes;
}

Bytes line_of(const engine::Blueprint& blueprint, plan::Kind kind) {
  for (const memory::LedgerLine& line : blueprint.ledger.lines()) {
    if (line.tier == Tier::device && line.kind == to_string(kind)) return line.bytes;
  }
  return 0;
}

/// In the forward pass, its recomputation and the backward pass, a rank receives all but its own
/// part of its columns.
TEST(SequenceParallelPlan, ExchangesRowsForHeadsOncePerPass) {
  for (const std::uint64_t parts : {2U, 4U}) {
    const Bytes tokens = kMicroBatches * kSequences * kLength / parts;
    const Bytes per_column = kLayers * tokens * kWidth / parts * (parts - 1);
    const auto ranks = static_cast<std::uint32_t>(parts);
    EXPECT_EQ(received(draw(ranks, step::Kept::nothing)), per_column * 3 * (kColumns + kResults));
    EXPECT_EQ(received(draw(ranks, step::Kept::all)), per_column * 2 * (kColumns + kResults));
    EXPECT_EQ(received(draw(ranks, step::Kept::attention)),
              per_column * (3 * kColumns + 2 * kResults));
  }
  EXPECT_EQ(received(draw(1, step::Kept::nothing)), 0U);
}

TEST(SequenceParallelPlan, DividesTheMemoryOfRows) {
  const engine::Blueprint alone = draw(1, step::Kept::all);
  const engine::Blueprint shared = draw(4, step::Kept::all);
  const Bytes rows = kSequences * kLength;
  const auto expect_near = [](Bytes found, Bytes expected, Bytes pages) {
    EXPECT_LE(found, expected + pages * kPage);
    EXPECT_GE(found + pages * kPage, expected);
  };
  const auto line = [](const engine::Blueprint& blueprint, plan::Kind kind) {
    return line_of(blueprint, kind);
  };
  expect_near(line(shared, plan::Kind::activations), line(alone, plan::Kind::activations) / 4, 16);
  // The results of attention are kept by rows and by heads.
  const Bytes more = kMicroBatches * kLayers * rows * kResults * kWidth;
  expect_near(line(shared, plan::Kind::intermediates),
              (line(alone, plan::Kind::intermediates) + more) / 4, 16);
  // Tokens, targets and positions instead of tokens and targets.
  expect_near(line(shared, plan::Kind::batch),
              line(alone, plan::Kind::batch) / 4 + kMicroBatches * rows * 4 / 4, 16);
}

TEST(SequenceParallelPlan, SharesTheWorkAndSlowsWithTheFabric) {
  const engine::Blueprint alone = draw(1, step::Kept::nothing);
  const engine::Blueprint shared = draw(4, step::Kept::nothing);
  EXPECT_NEAR(shared.flops_per_step(), alone.flops_per_step() / 4, 1e-9 * alone.flops_per_step());
  plan::Rates rates = test::quick_machine();
  rates.ranks_per_node = 4;
  rates.fabric_per_second = 1e9;
  const double fast = plan::simulate(shared.schedule, rates).step_seconds;
  rates.fabric_per_second = 5e8;
  const double slow = plan::simulate(shared.schedule, rates).step_seconds;
  EXPECT_GE(slow - fast, static_cast<double>(received(shared)) * (1 / 5e8 - 1 / 1e9) * 0.999);
}

}  // namespace
}  // namespace ballast::planner::sequence_parallel_plan_test
