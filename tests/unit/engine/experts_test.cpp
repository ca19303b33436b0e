#include <numeric>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/engine/engine.h"
#include "ballast/planning/engine_inputs.h"

#include "tests/support/temp_dir.h"
#include "tests/support/tiny_config.h"
#include "tests/support/tiny_training.h"

// What a step moves for experts.

namespace ballast::engine::experts_test {
namespace {

using schedule::Lane;

const char* const kModel = R"("family": "mixtral", "vocab_size": 131, "hidden_size": 32,
                              "num_layers": 3, "num_heads": 2, "intermediate_size": 32,
                              "num_local_experts": 40, "num_experts_per_tok": 2)";

/// Bytes of the operations of a lane, without those on experts that got no rows.
Bytes needed(const schedule::Plan& plan, Lane lane, const std::vector<std::uint64_t>& rows) {
  Bytes sum = 0;
  for (const schedule::Operation& operation : plan.operations) {
    const bool idle =
        operation.condition != schedule::Condition::none && rows[operation.block] == 0;
    if (operation.lane == lane && !idle) sum += operation.bytes;
  }
  return sum;
}

Bytes moved(const Engine& engine, Lane lane) {
  return engine.totals().lanes.bytes[static_cast<std::size_t>(lane)];
}

test::Batch one_id(std::size_t tokens) {
  return {std::vector<std::int32_t>(tokens, 7), std::vector<std::int32_t>(tokens, 9)};
}

TEST(Experts, OnlyWhatHasRowsIsMoved) {
  const test::TempDir directory;
  const config::Config config = test::tiny_config(
      kModel, true, directory.path(),
      {"zero_optimization.offload_param.device=cpu",
       "zero_optimization.offload_optimizer.device=cpu", "ballast.order=layer_major"});
  Engine engine = planning::make_engine(config);
  engine.start();
  const Blueprint& blueprint = engine.blueprint();
  const std::size_t tokens = blueprint.workload.tokens_per_step();
  for (const test::Batch& batch : {one_id(tokens), test::scattered_ids(tokens, 1)}) {
    const Bytes uploaded = moved(engine, Lane::upload);
    const Bytes offloaded = moved(engine, Lane::offload);
    const StepResult result = engine.train_step(batch.view(), 1e-3);
    const schedule::Plan& plan = blueprint.schedule.first;
    // The flush moves no weights to the device and nothing from it.
    engine.finish();
    const auto& rows = result.expert_rows;
    ASSERT_EQ(std::accumulate(rows.begin(), rows.end(), std::uint64_t{0}), 3 * 2 * tokens);
    EXPECT_EQ(moved(engine, Lane::upload) - uploaded, needed(plan, Lane::upload, rows));
    EXPECT_EQ(moved(engine, Lane::offload) - offloaded, needed(plan, Lane::offload, rows));
  }
}

/// Tokens that are alike use few of the experts.
TEST(Experts, OfASmallBatchMoveLessThanHalf) {
  const test::TempDir directory;
  const config::Config config =
      test::tiny_config(kModel, true, directory.path(),
                        {"zero_optimization.offload_param.device=cpu",
                         "zero_optimization.offload_optimizer.device=cpu"});
  Engine engine = planning::make_engine(config);
  engine.start();
  const test::Batch batch = one_id(engine.blueprint().workload.tokens_per_step());
  engine.train_step(batch.view(), 1e-3);
  engine.finish();
  EXPECT_LT(2 * moved(engine, Lane::upload),
            engine.blueprint().schedule.first.bytes_on(Lane::upload));
}

}  // namespace
}  // namespace ballast::engine::experts_test
