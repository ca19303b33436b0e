#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "ballast/checkpoint/checkpoints.h"
#include "ballast/planner/make_engine.h"

#include "src/checkpoint/checkpoint.h"
#include "src/checkpoint/writer.h"
#include "tests/support/device_kind.h"
#include "tests/support/joined_ranks.h"
#include "tests/support/paired_ranks.h"
#include "tests/support/temp_dir.h"
#include "tests/support/tiny_config.h"
#include "tests/support/tiny_training.h"

// Run by all ranks of mpirun: ranks that share the tiles of each layer have the bits of one rank
// with the same tiles, in losses, norms, evaluations and states.

namespace ballast::engine::ranks_tensor_test {
namespace {

using Overrides = std::vector<std::string>;

/// Sequences per step, of all ranks together.
constexpr std::uint64_t kSequences = 8;

bool on_cuda() {
  return test::device_kind() == "cuda";
}

std::uint32_t world() {
  return test::joined_ranks().world();
}

/// Numbers of tiles that all ranks can share; with two ranks, each has several tiles.
std::uint64_t tiles() {
  return world() == 2 ? 4 : world();
}

/// A model with `extra` keys, cut into tiles of unequal sizes.
std::string model_in_tiles(const std::string& family, const std::string& extra) {
  return fmt::format(R"("family": "{}", "vocab_size": 131, "hidden_size": {}, "num_layers": 2,
                        "num_heads": {}, "vocabulary_tiles": {}, "layer_tiles": {}{})",
                     family, 16 * tiles(), 2 * tiles(), tiles(), tiles(), extra);
}
std::string llama(bool tied) {
  return model_in_tiles("llama", fmt::format(R"(, "num_kv_heads": {}, "intermediate_size": 112,
                                                "tie_embeddings": {})",
                                             tiles(), tied));
}
std::string gpt2(bool tied) {
  return model_in_tiles("gpt2", fmt::format(R"(, "tie_embeddings": {})", tied));
}

/// A config in which `tensor` of `ranks` ranks share each layer.
config::Config config_of(const std::string& model, bool bf16,
                         const std::filesystem::path& directory, std::uint64_t tensor,
                         std::uint64_t ranks, Overrides overrides) {
  const std::uint64_t data_places = ranks / tensor;
  overrides.insert(overrides.begin(),
                   {"train_micro_batch_size_per_gpu=2", "ballast.eval_batches=1",
                    fmt::format("gradient_accumulation_steps={}", kSequences / 2 / data_places),
                    fmt::format("tensor_parallel.autotp_size={}", tensor)});
  if (on_cuda()) overrides.emplace_back("data.sequence_length=9");
  return test::tiny_config(model, bf16, directory, overrides, ranks);
}

/// Trains a few steps, of which some exceed the clipping.
test::Outcome train(const std::string& model, bool bf16, std::uint64_t tensor, comm::Ranks* ranks,
                    const Overrides& overrides = {}) {
  const test::TempDir directory;
  const std::uint64_t count = ranks == nullptr ? 1 : ranks->world();
  constexpr std::uint64_t kSteps = 4;
  return test::train(config_of(model, bf16, directory.path(), tensor, count, overrides), kSteps,
                     test::chained_ids, ranks, kSteps / 2);
}

struct Choice {
  std::string name;
  Overrides overrides;
};

const std::vector<Choice>& choices() {
  static const std::string optimizer = "zero_optimization.offload_optimizer.device=";
  static const std::string weights = "zero_optimization.offload_param.device=";
  static const std::vector<Choice> all = {
      {"all on device, nothing kept", {"ballast.recompute=true"}},
      {"all on host, intermediates kept, delayed",
       {weights + "cpu", optimizer + "cpu", "ballast.recompute=false", "ballast.delay_seed=5"}},
      {"all on NVMe, states in sub-groups",
       {weights + "nvme", optimizer + "nvme", "ballast.gradients=nvme", "ballast.activations=host",
        "zero_optimization.sub_group_size=3000"}},
      {"optimizer on NVMe, micro-batch-major, speculative",
       {optimizer + "nvme", "ballast.order=micro_batch_major", "ballast.speculative_updates=9"}},
      {"few buffers",
       {weights + "cpu", optimizer + "cpu", "ballast.device_weight_buffers=1",
        "ballast.device_gradient_buffers=1"}},
  };
  static const std::vector<Choice> few = {all.front()};
  return on_cuda() ? few : all;
}

void expect_bits_of_one_rank(const std::string& model, bool bf16, const Overrides& common = {}) {
  const test::Outcome alone = train(model, bf16, 1, nullptr, common);
  EXPECT_NE(alone.losses.front(), alone.losses.back()) << "nothing was learnt";
  for (const Choice& choice : choices()) {
    Overrides overrides = common;
    overrides.insert(overrides.end(), choice.overrides.begin(), choice.overrides.end());
    test::expect_same(train(model, bf16, world(), &test::joined_ranks(), overrides), alone,
                      choice.name);
  }
}

TEST(RanksTensor, LlamaHasTheBitsOfOneRank) {
  expect_bits_of_one_rank(llama(false), true);
}

TEST(RanksTensor, TiedLlamaHasTheBitsOfOneRank) {
  expect_bits_of_one_rank(llama(true), false);
}

TEST(RanksTensor, PackedDocumentsHaveTheBitsOfOneRank) {
  expect_bits_of_one_rank(llama(true), true, {test::kPacked});
}

TEST(RanksTensor, Gpt2HasTheBitsOfOneRank) {
  expect_bits_of_one_rank(gpt2(true), true);
}

TEST(RanksTensor, UntiedGpt2HasTheBitsOfOneRank) {
  expect_bits_of_one_rank(gpt2(false), false, {"ballast.optimizer_states=8bit"});
}

TEST(RanksTensor, SkippedStepsInFp16HaveTheBitsOfOneRank) {
  const test::Outcome alone = train(llama(false), false, 1, nullptr, test::kFp16);
  EXPECT_GT(test::skipped_steps(alone), 0);
  EXPECT_GT(alone.norms.back(), 0.0) << "every step is skipped";
  test::expect_same(train(llama(false), false, world(), &test::joined_ranks(), test::kFp16), alone,
                    "together");
}

TEST(RanksTensor, TwoByTwoHaveTheBitsOfTwoDataPlacesInEveryStage) {
  if (world() != 4) GTEST_SKIP() << "two data places and two tensor places";
  test::PairedRanks pair(test::joined_ranks());
  for (const std::string& model : {llama(false), gpt2(true)}) {
    const test::Outcome expected = train(model, true, 1, &pair);
    for (int stage = 0; stage <= 3; ++stage) {
      Overrides overrides = choices()[static_cast<std::size_t>(stage) % choices().size()].overrides;
      overrides.push_back(fmt::format("zero_optimization.stage={}", stage));
      test::expect_same(train(model, true, 2, &test::joined_ranks(), overrides), expected,
                        fmt::format("stage {}", stage));
    }
  }
}

double step(Engine& engine, std::uint64_t number) {
  const std::size_t tokens = engine.blueprint().problem.tokens_per_step();
  const test::Batch batch = test::part_of(test::chained_ids(tokens, number), engine.blueprint());
  return engine.train_step(batch.view(), 0.003).loss;
}

void resume(Engine& engine, const std::filesystem::path& folder, comm::Ranks* ranks) {
  const checkpoint::Checkpoint checkpoint =
      checkpoint::Checkpoint::open(folder, engine.blueprint(), ranks);
  engine.resume([&](const StateRange& range, HostBytes bytes) { checkpoint.read(range, bytes); },
                checkpoint.facts().updates);
}

/// A directory that all ranks see, removed with the first one's object.
std::filesystem::path shared_directory(const test::TempDir& own) {
  return test::joined_ranks().broadcast(own.path().string());
}

TEST(RanksTensor, AResumeMayHaveOtherRanksPerLayer) {
  comm::Ranks& all = test::joined_ranks();
  const test::TempDir directory;
  const std::filesystem::path run = shared_directory(directory);
  const auto engine_of = [&](const std::string& folder, std::uint64_t tensor, comm::Ranks* ranks) {
    const std::uint64_t count = ranks == nullptr ? 1 : ranks->world();
    // Each group of ranks of a run has a folder.
    const std::filesystem::path own = run / fmt::format("{}-{}", folder, all.rank() / count);
    std::filesystem::create_directories(own);
    return planner::make_engine(
        config_of(llama(true), false, own, tensor, count, {"ballast.checkpoint_every=1"}), nullptr,
        ranks);
  };
  const auto write = [](Engine& engine, const std::filesystem::path& to, std::uint64_t steps,
                        comm::Ranks* ranks) {
    const checkpoint::CheckpointFacts facts = {.step = steps, .updates = engine.updates()};
    return checkpoint::CheckpointWriter(engine, to, facts, 2, ranks).publish();
  };
  Engine together = engine_of("together", world(), &all);
  together.start();
  step(together, 1);
  const std::filesystem::path first = write(together, run / "together-0", 1, &all);
  const std::uint64_t states = together.snapshot().hash();
  const double second_loss = step(together, 2);
  const std::uint64_t second_states = together.snapshot().hash();
  const double third_loss = step(together, 3);

  Engine alone = engine_of("alone", 1, nullptr);
  resume(alone, first, nullptr);
  EXPECT_EQ(alone.snapshot().hash(), states);
  EXPECT_EQ(step(alone, 2), second_loss);
  EXPECT_EQ(alone.snapshot().hash(), second_states);
  write(alone, run / fmt::format("alone-{}", all.rank()), 2, nullptr);
  all.barrier();
  if (world() % 2 != 0) return;

  test::PairedRanks pair(all);
  Engine two = engine_of("two", 2, &pair);
  resume(two, train::checkpoint_folder(run / "alone-0", 2), &pair);
  EXPECT_EQ(two.snapshot().hash(), second_states);
  EXPECT_EQ(step(two, 3), third_loss);
  all.barrier();
}

}  // namespace
}  // namespace ballast::engine::ranks_tensor_test
