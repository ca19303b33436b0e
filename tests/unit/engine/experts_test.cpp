#include <cstddef>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/engine/engine.h"
#include "ballast/model/kernels.h"
#include "ballast/setup/setup.h"

#include "tests/support/tags.h"
#include "tests/support/temp_dir.h"
#include "tests/support/tiny_config.h"
#include "tests/support/tiny_training.h"

// Bytes that a step moves for experts.

namespace ballast::engine::experts_test {
namespace {

using plan::Lane;

const char* const kModel = R"("family": "mixtral", "vocab_size": 131, "hidden_size": 32,
                              "num_layers": 3, "num_heads": 2, "intermediate_size": 32,
                              "num_local_experts": 40, "num_experts_per_tok": 2)";

/// Rows of each block's expert.
using Rows = std::vector<std::uint64_t>;

Rows train(Engine& engine, const test::Batch& batch, double lr) {
  const StepResult result = engine.train_step(batch.view(), lr);
  Rows rows;
  for (const model::BlockSpec& block : engine.blueprint().model.blocks) {
    const bool expert = block.content == model::BlockContent::expert;
    rows.push_back(expert ? result.expert_rows[block.layer][block.expert] : 0);
  }
  return rows;
}

/// Bytes of the operations of a lane in a plan of one micro-batch or in layer-major order, without
/// those whose conditions do not hold. `before`: rows of the previous step.
Bytes needed(const plan::Plan& plan, Lane lane, const Rows& rows, const Rows& before = {}) {
  const auto holds = [&](const plan::Condition& condition, std::uint32_t block) {
    if (condition.always()) return true;
    if (condition.reads_routing()) return rows[block] > 0;
    return !before.empty() && before[block] > 0;
  };
  Bytes sum = 0;
  for (const plan::Operation& operation : plan.operations) {
    const bool wanted = holds(operation.condition, operation.block);
    const bool there = operation.unless && holds(*operation.unless, operation.block);
    if (operation.lane == lane && wanted && !there) sum += operation.bytes;
  }
  return sum;
}

Bytes moved(const Engine& engine, Lane lane) {
  return engine.totals().lanes.bytes[static_cast<std::size_t>(lane)];
}

test::Batch one_id(std::size_t tokens) {
  return {std::vector<std::int32_t>(tokens, 7), std::vector<std::int32_t>(tokens, 9)};
}

TAG_TESTS("one_thread", "Experts.*");
TEST(Experts, OnlyExpertsWithRowsAreMoved) {
  const test::TempDir directory;
  const config::Config config = test::tiny_config(
      kModel, true, directory.path(),
      {"zero_optimization.offload_param.device=cpu",
       "zero_optimization.offload_optimizer.device=cpu", "ballast.order=layer_major"});
  Engine engine = setup::make_engine(config);
  engine.start();
  const Blueprint& blueprint = engine.blueprint();
  const std::size_t tokens = blueprint.problem.tokens_per_step();
  for (const test::Batch& batch : {one_id(tokens), test::scattered_ids(tokens, 1)}) {
    const Bytes uploaded = moved(engine, Lane::upload);
    const Bytes offloaded = moved(engine, Lane::offload);
    const Rows rows = train(engine, batch, 1e-3);
    const plan::Plan& plan = blueprint.schedule.first;
    // The flush moves no weights to the device and nothing from it.
    engine.finish();
    ASSERT_EQ(std::accumulate(rows.begin(), rows.end(), std::uint64_t{0}), 3 * 2 * tokens);
    EXPECT_EQ(moved(engine, Lane::upload) - uploaded, needed(plan, Lane::upload, rows));
    EXPECT_EQ(moved(engine, Lane::offload) - offloaded, needed(plan, Lane::offload, rows));
  }
}

/// Similar tokens use few of the experts.
TEST(Experts, OfASmallBatchMoveLessThanHalfOfTheBytes) {
  const test::TempDir directory;
  const config::Config config =
      test::tiny_config(kModel, true, directory.path(),
                        {"zero_optimization.offload_param.device=cpu",
                         "zero_optimization.offload_optimizer.device=cpu"});
  Engine engine = setup::make_engine(config);
  engine.start();
  const test::Batch batch = one_id(engine.blueprint().problem.tokens_per_step());
  engine.train_step(batch.view(), 1e-3);
  engine.finish();
  EXPECT_LT(2 * moved(engine, Lane::upload),
            engine.blueprint().schedule.first.bytes_on(Lane::upload));
}

/// Experts of the previous step are on the device before the routers choose. The others follow.
TEST(Experts, OfThePreviousStepArePrefetched) {
  const test::TempDir directory;
  const config::Config config = test::tiny_config(
      kModel, true, directory.path(),
      {"zero_optimization.offload_param.device=cpu",
       "zero_optimization.offload_optimizer.device=cpu", "ballast.order=layer_major",
       "ballast.expert_prefetch=true", "ballast.device_weight_buffers=9"});
  Engine engine = setup::make_engine(config);
  engine.start();
  const Blueprint& blueprint = engine.blueprint();
  const std::size_t tokens = blueprint.problem.tokens_per_step();
  const plan::Plan& plan = blueprint.schedule.steady;
  Rows before = train(engine, one_id(tokens), 1e-3);
  for (std::uint64_t step = 1; step < 4; ++step) {
    const Bytes uploaded = moved(engine, Lane::upload);
    const test::Batch batch = step == 2 ? one_id(tokens) : test::scattered_ids(tokens, step);
    const Rows rows = train(engine, batch, 1e-3);
    // The next plan may have begun, but no uploads.
    EXPECT_EQ(moved(engine, Lane::upload) - uploaded, needed(plan, Lane::upload, rows, before));
    // Some prefetches were not needed.
    const Bytes least = needed(plan, Lane::upload, rows, rows);
    EXPECT_TRUE(step != 2 || needed(plan, Lane::upload, rows, before) > least);
    before = rows;
  }
}

struct Result {
  Rows rows;
  std::vector<std::vector<float>> weights;  ///< by block, at the end of the run
  Bytes written = 0;                        ///< bytes that the updates wrote to NVMe
};

/// Result without a step, or after one with similar tokens.
Result result_of(const std::string& updates, bool trains) {
  const test::TempDir directory;
  const config::Config config = test::tiny_config(
      kModel, true, directory.path(),
      {"zero_optimization.offload_param.device=nvme",
       "zero_optimization.offload_optimizer.device=nvme", "ballast.expert_updates=" + updates});
  Engine engine = setup::make_engine(config);
  engine.start();
  Result result;
  if (trains) {
    const test::Batch batch = one_id(engine.blueprint().problem.tokens_per_step());
    result.rows = train(engine, batch, 1e-2);
    const Bytes before = moved(engine, Lane::writeback);
    engine.finish();
    result.written = moved(engine, Lane::writeback) - before;
  }
  for (std::size_t b = 0; b < engine.blueprint().model.blocks.size(); ++b) {
    result.weights.push_back(engine.snapshot().read_block(b));
  }
  return result;
}

/// An expert with tokens is updated as with `all`. One without tokens keeps every bit, even of
/// weights that decay, and nothing of it is written.
TEST(Experts, WithoutTokensKeepTheirWeightsIfTouchedOnesAreUpdated) {
  const Result first = result_of("all", false);
  const Result all = result_of("all", true);
  const Result active = result_of("active", true);
  ASSERT_EQ(active.rows, all.rows);
  std::size_t idle = 0;
  for (std::size_t b = 0; b < active.rows.size(); ++b) {
    if (active.weights[b] == all.weights[b]) continue;
    EXPECT_EQ(active.rows[b], 0U) << b;
    EXPECT_EQ(active.weights[b], first.weights[b]) << b;
    ++idle;
  }
  EXPECT_GT(idle, 60U);
  EXPECT_LT(2 * active.written, all.written);
}

const char* const kBalanced = R"("family": "mixtral", "vocab_size": 131, "hidden_size": 32,
                                 "num_layers": 2, "num_heads": 2, "intermediate_size": 32,
                                 "num_local_experts": 5, "num_experts_per_tok": 2,
                                 "output_router_logits": true, "router_aux_loss_coef": 0.5)";

/// One document of 20 tokens in each sequence of `length`, followed by padding with `id`.
test::Batch a_document_each(std::size_t tokens, std::size_t length, std::int32_t id) {
  constexpr std::size_t kDocument = 20;
  test::Batch batch;
  for (std::size_t i = 0; i < tokens; ++i) {
    const std::size_t at = i % length;
    const bool real = at < kDocument;
    const std::size_t number = i / length * kDocument + at;
    batch.tokens.push_back(real ? static_cast<std::int32_t>(number * 37 % 131) : id);
    batch.targets.push_back(at + 1 < kDocument ? static_cast<std::int32_t>(number * 41 % 131)
                            : real             ? model::kIgnoredTarget
                                               : model::kPaddingTarget);
    batch.positions.push_back(static_cast<std::int32_t>(real ? at : at - kDocument));
  }
  return batch;
}

StepResult step_with_documents(std::size_t length, std::int32_t padding) {
  const test::TempDir directory;
  const std::string packed = R"(data={"documents": ["unused.safetensors"], "sequence_length": )" +
                             std::to_string(length) + "}";
  Engine engine = setup::make_engine(
      test::tiny_config(kBalanced, false, directory.path(), {packed, "gradient_clipping=0"}));
  engine.start();
  const std::size_t tokens = engine.blueprint().problem.tokens_per_step();
  return engine.train_step(a_document_each(tokens, length, padding).view(), 1e-3);
}

/// Padding is in no document, so a router neither dispatches nor counts it.
TEST(Experts, IgnorePadding) {
  const StepResult without = step_with_documents(20, 0);
  const StepResult with = step_with_documents(37, 0);
  EXPECT_EQ(with.targets, without.targets);
  EXPECT_EQ(with.expert_rows, without.expert_rows);
  EXPECT_NEAR(with.loss, without.loss, 1e-6);
  EXPECT_NEAR(with.balance_loss, without.balance_loss, 1e-6);
  EXPECT_NEAR(with.router_z_loss, without.router_z_loss, 1e-6);
  EXPECT_NEAR(with.grad_norm, without.grad_norm, 1e-5);
  const StepResult other = step_with_documents(37, 77);
  EXPECT_EQ(other.loss, with.loss);
  EXPECT_EQ(other.expert_rows, with.expert_rows);
  EXPECT_EQ(other.balance_loss, with.balance_loss);
  EXPECT_EQ(other.grad_norm, with.grad_norm);
}

}  // namespace
}  // namespace ballast::engine::experts_test
