// Run by all ranks of mpirun on fake GPUs: what the host does for collectives in a step.
#include <algorithm>
#include <cstdint>
#include <map>
#include <string>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "ballast/engine/engine.h"
#include "ballast/setup/setup.h"

#include "tests/support/fake_cuda.h"
#include "tests/support/joined_ranks.h"
#include "tests/support/tags.h"
#include "tests/support/temp_dir.h"
#include "tests/support/tiny_config.h"
#include "tests/support/tiny_training.h"

namespace ballast::engine::ranks_host_waits_test {
namespace {

using test::FakeCuda;

TAG_TESTS("2_ranks_emulated", "RanksHostWaits.*");
TEST(RanksHostWaits, TheHostWaitsForNoSumOverTiles) {
  comm::Ranks& ranks = test::joined_ranks();
  const test::TempDir directory;
  const std::string model =
      fmt::format(R"("family": "llama", "vocab_size": 131, "hidden_size": 32, "num_layers": 2,
                     "num_heads": 4, "vocabulary_tiles": {0}, "layer_tiles": {0})",
                  ranks.world());
  Engine engine = setup::make_engine(
      test::tiny_config(
          model, true, directory.path(),
          {"train_micro_batch_size_per_gpu=1", "gradient_accumulation_steps=2",
           "data.sequence_length=9", fmt::format("tensor_parallel.autotp_size={}", ranks.world())},
          ranks.world()),
      nullptr, &ranks);
  engine.start();
  const auto step = [&](std::uint64_t number) {
    const test::Batch batch =
        test::part_of(test::chained_ids(engine.blueprint().problem.tokens_per_step(), number),
                      engine.blueprint());
    engine.train_step(batch.view(), 1e-3);
  };
  step(1);
  engine.drain();
  std::map<std::string, int> calls;
  {
    const FakeCuda::Refusal counting;
    step(2);
    engine.drain();
    calls = counting.calls();
  }
  const auto& operations = engine.blueprint().schedule.steady.operations;
  const auto sums = std::count_if(
      operations.begin(), operations.end(),
      [](const plan::Operation& operation) { return operation.action == plan::Action::exchange; });
  // Two layers with two sums in each direction, in two micro-batches.
  EXPECT_GE(sums, 16);
  // How often streams wait for each other depends on what has already finished.
  EXPECT_EQ(calls["cudaStreamQuery"], 0);
  EXPECT_EQ(calls["cudaStreamSynchronize"], 0);
}

}  // namespace
}  // namespace ballast::engine::ranks_host_waits_test
