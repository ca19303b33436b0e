#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "tests/support/covering.h"
#include "tests/support/device_kind.h"
#include "tests/support/joined_ranks.h"
#include "tests/support/tags.h"
#include "tests/support/temp_dir.h"
#include "tests/support/tiny_config.h"
#include "tests/support/tiny_training.h"

// Run by all ranks of mpirun: router losses of the whole step do not depend on how ranks share
// sequences, states and experts.

namespace ballast::engine::ranks_router_losses_test {
namespace {

using test::Overrides;

/// Sequences per step, of all ranks together. 1, 2, 3 and 4 ranks can share them.
constexpr std::uint64_t kSequences = 12;

std::uint32_t world() {
  return test::joined_ranks().world();
}

/// A model whose heads and experts all ranks can share. Its losses weigh as much as cross-entropy.
std::string model() {
  return fmt::format(R"("family": "qwen2_moe", "vocab_size": 131, "hidden_size": 32,
      "num_layers": 2, "num_heads": {0}, "num_kv_heads": {0}, "head_dim": 8,
      "intermediate_size": 32, "num_experts": 12, "num_experts_per_tok": 2,
      "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24,
      "output_router_logits": true, "router_aux_loss_coef": 1.0, "router_z_loss_coef": 0.1)",
                     world());
}

/// Trains on one rank, or on all with `slices` ranks for each sequence.
test::Outcome train(comm::Ranks* ranks, std::uint64_t slices, Overrides overrides) {
  const test::TempDir directory;
  const std::uint64_t places = ranks == nullptr ? 1 : world() / slices;
  for (const std::string& common :
       {std::string("train_micro_batch_size_per_gpu=1"), std::string("data.sequence_length=36"),
        std::string("ballast.eval_batches=1"), fmt::format("sequence_parallel_size={}", slices),
        fmt::format("gradient_accumulation_steps={}", kSequences / places)}) {
    overrides.push_back(common);
  }
  const auto config = test::tiny_config(model(), false, directory.path(), overrides,
                                        ranks == nullptr ? 1 : world());
  return test::train(config, 4, test::chained_ids, ranks);
}

void expect_close(const test::Outcome& found, const test::Outcome& expected) {
  ASSERT_EQ(found.losses.size(), expected.losses.size());
  for (std::size_t i = 0; i < found.losses.size(); ++i) {
    EXPECT_NEAR(found.losses[i], expected.losses[i], 1e-5 * expected.losses[i]) << "step " << i;
    EXPECT_NEAR(found.norms[i], expected.norms[i], 1e-4 * expected.norms[i]) << "step " << i;
  }
}

TAG_TESTS("2_ranks,3_ranks,4_ranks", "RanksRouterLosses.*");
TEST(RanksRouterLosses, OfTheStepAreThoseOfOneRank) {
  if (test::device_kind() == "cuda") GTEST_SKIP() << "many steps";
  comm::Ranks& all = test::joined_ranks();
  const test::Outcome alone = train(nullptr, 1, {});
  expect_close(train(&all, 1, {}), alone);
  expect_close(train(&all, 1, {"zero_optimization.stage=3", "pipeline.stages=2"}), alone);
  expect_close(train(&all, 1, {fmt::format("ballast.expert_parallel={}", world())}), alone);
  expect_close(train(&all, world(), {}), alone);
  const test::Outcome parts = train(&all, 1, {"ballast.router_losses=micro_batch"});
  EXPECT_GT(std::abs(parts.norms.front() / alone.norms.front() - 1.0), 1e-3);
}

}  // namespace
}  // namespace ballast::engine::ranks_router_losses_test
