#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "ballast/checkpoint/checkpoints.h"
#include "ballast/setup/setup.h"

#include "src/checkpoint/checkpoint.h"
#include "src/checkpoint/writer.h"
#include "tests/support/device_kind.h"
#include "tests/support/joined_ranks.h"
#include "tests/support/paired_ranks.h"
#include "tests/support/tags.h"
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

/// The run directory of the ranks of a run, nullptr: of this rank alone. Removed when all ranks
/// have left.
class RunDirectory {
 public:
  explicit RunDirectory(comm::Ranks* ranks) : path_(own_.path()) {
    if (ranks == nullptr) return;
    comm::Ranks& all = test::joined_ranks();
    path_ = std::filesystem::path(all.broadcast(path_.string())) /
            std::to_string(all.rank() / ranks->world());
    std::filesystem::create_directories(path_);
    shared_ = true;
  }
  ~RunDirectory() {
    if (shared_) test::joined_ranks().barrier();
  }
  RunDirectory(const RunDirectory&) = delete;
  RunDirectory& operator=(const RunDirectory&) = delete;

  [[nodiscard]] const std::filesystem::path& path() const { return path_; }

 private:
  test::TempDir own_;
  std::filesystem::path path_;
  bool shared_ = false;
};

/// A config in which `tensor` of `ranks` ranks share each layer.
config::Config config_of(const std::string& model, bool bf16,
                         const std::filesystem::path& directory, std::uint64_t tensor,
                         std::uint64_t ranks, Overrides overrides) {
  const std::uint64_t data_places = ranks / tensor;
  overrides.insert(
      overrides.begin(),
      {"train_micro_batch_size_per_gpu=2", "ballast.eval_batches=1", "ballast.checkpoint_every=1",
       fmt::format("data.sequence_length={}", on_cuda() ? 9 : 20),
       fmt::format("gradient_accumulation_steps={}", kSequences / 2 / data_places),
       fmt::format("tensor_parallel.autotp_size={}", tensor)});
  return test::tiny_config(model, bf16, directory, overrides, ranks);
}

std::filesystem::path write(Engine& engine, const std::filesystem::path& run, std::uint64_t steps,
                            comm::Ranks* ranks) {
  const checkpoint::CheckpointFacts facts = {.step = steps, .updates = engine.updates()};
  return checkpoint::CheckpointWriter(engine, run, facts, 2, ranks).publish();
}

/// The hash of a checkpoint, which does not depend on the number of ranks.
std::uint64_t hash_of(const std::filesystem::path& folder) {
  const auto ignore = [](Bytes, Bytes) {};
  return checkpoint::examine_checkpoint(folder, {.whole = true, .hash = true}, ignore)
      .hash.value_or(0);
}

/// Trains a few steps, of which some exceed the clipping.
test::Outcome train(const std::string& model, bool bf16, std::uint64_t tensor, comm::Ranks* ranks,
                    const Overrides& overrides = {}) {
  const RunDirectory run(ranks);
  const std::uint64_t count = ranks == nullptr ? 1 : ranks->world();
  constexpr std::uint64_t kSteps = 4;
  return test::train(config_of(model, bf16, run.path(), tensor, count, overrides), kSteps,
                     test::chained_ids, ranks, kSteps / 2, [&](Engine& engine) {
                       return hash_of(write(engine, run.path(), kSteps, ranks));
                     });
}

struct Choice {
  std::string name;
  Overrides overrides;
};

const std::vector<Choice>& choices() {
  static const std::string optimizer = "zero_optimization.offload_optimizer.device=";
  static const std::string weights = "zero_optimization.offload_param.device=";
  static const std::string partition = "activation_checkpointing.partition_activations=true";
  static const std::vector<Choice> all = {
      {"all on device, nothing kept", {"ballast.recompute=true"}},
      {"all on host, intermediates kept, delayed",
       {weights + "cpu", optimizer + "cpu", "ballast.recompute=false", "ballast.delay_seed=5",
        partition}},
      {"all on NVMe, states in sub-groups",
       {weights + "nvme", optimizer + "nvme", "ballast.gradients=nvme", "ballast.activations=host",
        partition, "zero_optimization.sub_group_size=3000"}},
      {"optimizer on NVMe, micro-batch-major, speculative",
       {optimizer + "nvme", "ballast.order=micro_batch_major", "ballast.speculative_updates=9"}},
      {"all on host, sums too",
       {weights + "cpu", optimizer + "cpu", "ballast.order=micro_batch_major_offload", partition}},
      {"few buffers, inputs in parts on the device",
       {weights + "cpu", optimizer + "cpu", "ballast.device_weight_buffers=1",
        "ballast.device_gradient_buffers=1", "ballast.activations=device", partition}},
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

TAG_TESTS("2_ranks,2_ranks_emulated", "RanksTensor.LlamaHasTheBitsOfOneRank");
TEST(RanksTensor, LlamaHasTheBitsOfOneRank) {
  expect_bits_of_one_rank(llama(false), true);
}

TAG_TESTS("3_ranks", "RanksTensor.TiedLlamaHasTheBitsOfOneRank");
TEST(RanksTensor, TiedLlamaHasTheBitsOfOneRank) {
  expect_bits_of_one_rank(llama(true), false);
}

TAG_TESTS("3_ranks", "RanksTensor.PackedDocumentsHaveTheBitsOfOneRank");
TEST(RanksTensor, PackedDocumentsHaveTheBitsOfOneRank) {
  expect_bits_of_one_rank(llama(true), true, {test::kPacked});
}

TAG_TESTS("4_ranks", "RanksTensor.Gpt2HasTheBitsOfOneRank");
TEST(RanksTensor, Gpt2HasTheBitsOfOneRank) {
  expect_bits_of_one_rank(gpt2(true), true);
}

TAG_TESTS("2_ranks", "RanksTensor.UntiedGpt2HasTheBitsOfOneRank");
TEST(RanksTensor, UntiedGpt2HasTheBitsOfOneRank) {
  expect_bits_of_one_rank(gpt2(false), false, {"ballast.optimizer_states=8bit"});
}

TAG_TESTS("2_ranks", "RanksTensor.SkippedStepsInFp16HaveTheBitsOfOneRank");
TEST(RanksTensor, SkippedStepsInFp16HaveTheBitsOfOneRank) {
  Overrides overrides = test::kFp16;
  overrides.emplace_back("fp16.initial_scale_power=22");
  const test::Outcome alone = train(llama(false), false, 1, nullptr, overrides);
  EXPECT_GT(test::skipped_steps(alone), 0);
  EXPECT_GT(alone.norms.back(), 0.0) << "every step is skipped";
  test::expect_same(train(llama(false), false, world(), &test::joined_ranks(), overrides), alone,
                    "together");
}

TAG_TESTS("4_ranks", "RanksTensor.TwoByTwoHaveTheBitsOfTwoDataPlacesInEveryStage");
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

TAG_TESTS("2_ranks,4_ranks", "RanksTensor.AResumeMayHaveOtherRanksPerLayer");
TEST(RanksTensor, AResumeMayHaveOtherRanksPerLayer) {
  comm::Ranks& all = test::joined_ranks();
  const RunDirectory of_all(&all);
  const RunDirectory of_one(nullptr);
  const auto engine_of = [](const RunDirectory& run, std::uint64_t tensor, comm::Ranks* ranks) {
    const std::uint64_t count = ranks == nullptr ? 1 : ranks->world();
    return setup::make_engine(config_of(llama(true), false, run.path(), tensor, count, {}), nullptr,
                              ranks);
  };
  Engine together = engine_of(of_all, world(), &all);
  together.start();
  step(together, 1);
  const std::filesystem::path first = write(together, of_all.path(), 1, &all);
  const double second_loss = step(together, 2);
  const std::uint64_t second_states = hash_of(write(together, of_all.path(), 2, &all));
  const double third_loss = step(together, 3);

  Engine alone = engine_of(of_one, 1, nullptr);
  resume(alone, first, nullptr);
  EXPECT_EQ(step(alone, 2), second_loss);
  const std::filesystem::path second = write(alone, of_one.path(), 2, nullptr);
  EXPECT_EQ(hash_of(second), second_states);
  const std::string of_first = all.broadcast(second.string());
  if (world() % 2 == 0) {
    test::PairedRanks pair(all);
    const RunDirectory of_pair(&pair);
    Engine two = engine_of(of_pair, 2, &pair);
    resume(two, of_first, &pair);
    EXPECT_EQ(step(two, 3), third_loss);
  }
  all.barrier();
}

}  // namespace
}  // namespace ballast::engine::ranks_tensor_test
