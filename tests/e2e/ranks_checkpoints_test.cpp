#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "ballast/checkpoint/checkpoints.h"
#include "ballast/comm/agreement.h"
#include "ballast/setup/setup.h"

#include "src/checkpoint/checkpoint.h"
#include "src/checkpoint/format.h"
#include "src/checkpoint/writer.h"
#include "tests/support/joined_ranks.h"
#include "tests/support/temp_dir.h"
#include "tests/support/tiny_config.h"
#include "tests/support/tiny_training.h"

// Run by all ranks of mpirun: the states of a checkpoint are equal for every number of ranks,
// stage, placement and split of the batch.

namespace ballast::train::ranks_checkpoints_test {
namespace {

namespace fs = std::filesystem;
using Overrides = std::vector<std::string>;

constexpr std::uint64_t kSteps = 3;
constexpr std::uint64_t kSequences = 12;  // of all ranks per step

/// A directory that all ranks see, removed with the first one's object.
class SharedDirectory {
 public:
  SharedDirectory() {
    comm::Ranks& ranks = test::joined_ranks();
    std::array<char, 4096> own{};
    if (ranks.rank() == 0) {
      directory_ = std::make_unique<test::TempDir>();
      const std::string path = directory_->path().string();
      std::memcpy(own.data(), path.data(), std::min(path.size(), own.size() - 1));
    }
    std::vector<char> all(own.size() * ranks.world());
    ranks.all_gather(std::as_bytes(std::span(own)), std::as_writable_bytes(std::span(all)));
    path_ = all.data();
  }
  [[nodiscard]] const fs::path& path() const { return path_; }

 private:
  std::unique_ptr<test::TempDir> directory_;
  fs::path path_;
};

/// One micro-batch on the device per step. Otherwise there is one per sequence.
const std::string kWholeBatch = "gradient_accumulation_steps=1";

const std::string kLlama =
    R"("family": "llama", "vocab_size": 131, "hidden_size": 24, "num_layers": 2, "num_heads": 3,
       "num_kv_heads": 1, "tie_embeddings": true, "vocabulary_tiles": 2, "layer_tiles": 2)";
/// Some of its experts have no tokens.
const std::string kExperts =
    R"("family": "qwen3_moe", "vocab_size": 131, "hidden_size": 24, "num_layers": 1,
       "num_heads": 3, "num_kv_heads": 1, "head_dim": 8, "num_experts": 12,
       "num_experts_per_tok": 1, "moe_intermediate_size": 16)";

/// The correction biases of its routers move.
const std::string kBiases =
    R"("family": "glm4_moe", "vocab_size": 131, "hidden_size": 24, "num_layers": 2,
       "num_heads": 3, "num_kv_heads": 1, "intermediate_size": 32, "n_routed_experts": 12,
       "num_experts_per_tok": 3, "moe_intermediate_size": 8, "router_bias_update_speed": 0.0625)";

struct TrainedModel {
  std::string model;
  Overrides common;  ///< overrides of all runs
};

config::Config config_of(const TrainedModel& trained, const fs::path& directory,
                         std::uint64_t world, Overrides overrides) {
  const std::uint64_t sequences = kSequences / world;
  const bool whole = std::find(overrides.begin(), overrides.end(), kWholeBatch) != overrides.end();
  overrides.insert(overrides.begin(),
                   {"ballast.checkpoint_every=1",
                    fmt::format("train_micro_batch_size_per_gpu={}", whole ? sequences : 1),
                    fmt::format("gradient_accumulation_steps={}", sequences)});
  overrides.insert(overrides.end(), trained.common.begin(), trained.common.end());
  // With three ranks, one of them has almost nothing of a block.
  return test::tiny_config(trained.model, false, directory, overrides);
}

double step(engine::Engine& engine, std::uint64_t number, comm::Ranks* ranks) {
  const std::size_t tokens = kSequences * engine.blueprint().shape.length;
  const test::Batch batch = test::part_of(test::chained_ids(tokens, number), ranks);
  return engine.train_step(batch.view(), 0.003).loss;
}

fs::path write(engine::Engine& engine, const fs::path& run, comm::Ranks* ranks) {
  const checkpoint::CheckpointFacts facts = {.step = kSteps, .updates = engine.updates()};
  return checkpoint::CheckpointWriter(engine, run, facts, 2, ranks).publish();
}

void resume(engine::Engine& engine, const fs::path& folder, comm::Ranks* ranks) {
  const checkpoint::Checkpoint checkpoint =
      checkpoint::Checkpoint::open(folder, engine.blueprint(), ranks);
  engine.resume(
      [&](const engine::StateRange& range, HostBytes bytes) { checkpoint.read(range, bytes); },
      checkpoint.facts().updates, {}, {}, checkpoint.facts().side_states);
}

std::uint64_t hash_of(const fs::path& folder) {
  const auto ignore = [](Bytes, Bytes) {};
  return checkpoint::examine_checkpoint(folder, {.whole = true, .hash = true}, ignore)
      .hash.value_or(0);
}

/// The weights that one rank has learned, and those that it learns next.
struct Alone {
  fs::path folder;
  std::uint64_t hash = 0;
  double next_loss = 0.0;
};

Alone train_alone(const TrainedModel& trained, const fs::path& directory) {
  engine::Engine engine = setup::make_engine(config_of(trained, directory, 1, {}));
  engine.start();
  for (std::uint64_t number = 1; number <= kSteps; ++number) step(engine, number, nullptr);
  const fs::path folder = write(engine, directory, nullptr);
  const std::uint64_t hash = engine.snapshot().hash();
  EXPECT_EQ(hash_of(folder), hash);
  return {folder, hash, step(engine, kSteps + 1, nullptr)};
}

/// Goes from one rank to all of them and back.
void expect_same_states(const TrainedModel& trained, const Alone& alone, const fs::path& directory,
                        const Overrides& overrides) {
  comm::Ranks& ranks = test::joined_ranks();
  comm::collective_try(&ranks, [&] {
    if (ranks.rank() == 0) fs::create_directories(directory);
  });
  engine::Engine together =
      setup::make_engine(config_of(trained, directory, ranks.world(), overrides), nullptr, &ranks);
  resume(together, alone.folder, &ranks);
  const fs::path folder = write(together, directory, &ranks);
  const double loss = step(together, kSteps + 1, &ranks);
  comm::collective_try(&ranks, [&] {
    if (ranks.rank() != 0) return;
    const std::string name = directory.filename().string();
    EXPECT_NEAR(loss, alone.next_loss, 1e-5 * std::abs(alone.next_loss)) << name;
    EXPECT_EQ(hash_of(folder), alone.hash) << name;
    engine::Engine again = setup::make_engine(config_of(trained, directory / "again", 1, {}));
    resume(again, folder, nullptr);
    EXPECT_EQ(again.snapshot().hash(), alone.hash) << name;
    EXPECT_EQ(step(again, kSteps + 1, nullptr), alone.next_loss) << name;
  });
}

/// Trains on the first rank. The others know the folder.
Alone train_alone_on_first(const TrainedModel& trained, const fs::path& directory) {
  comm::Ranks& ranks = test::joined_ranks();
  Alone alone = {.folder = checkpoint::checkpoint_folder(directory, kSteps)};
  comm::collective_try(&ranks, [&] {
    if (ranks.rank() == 0) alone = train_alone(trained, directory);
  });
  return alone;
}

TEST(CheckpointsOfRanks, ContainTheSameStatesForEveryStagePlacementAndSplit) {
  const SharedDirectory directory;
  const TrainedModel trained = {kLlama, {}};
  const Alone alone = train_alone_on_first(trained, directory.path() / "alone");
  const std::string optimizer = "zero_optimization.offload_optimizer.device=";
  const std::string weights = "zero_optimization.offload_param.device=";
  const std::vector<Overrides> placements = {
      {},
      {weights + "cpu", optimizer + "cpu", kWholeBatch},
      {weights + "nvme", optimizer + "nvme", "zero_optimization.sub_group_size=2048"},
      {weights + "nvme", optimizer + "cpu", "ballast.speculative_updates=9",
       "zero_optimization.sub_group_size=3000",
       R"(ballast.placement=[{"blocks": 1, "weights": "device", "optimizer": "nvme"},
                             {"blocks": 2, "weights": "host", "optimizer": "device"}])"}};
  for (int stage = 0; stage <= 3; ++stage) {
    for (std::size_t p = 0; p < placements.size(); ++p) {
      Overrides overrides = placements[p];
      overrides.push_back(fmt::format("zero_optimization.stage={}", stage));
      expect_same_states(trained, alone,
                         directory.path() / fmt::format("stage-{}-placement-{}", stage, p),
                         overrides);
    }
  }
}

TEST(CheckpointsOfRanks, ContainTheSameStatesWithAndWithoutExpertParallelism) {
  const SharedDirectory directory;
  const std::string shared =
      fmt::format("ballast.expert_parallel={}", test::joined_ranks().world());
  const TrainedModel trained = {kExperts, {"ballast.optimizer_states=8bit"}};
  const Alone alone = train_alone_on_first(trained, directory.path() / "alone");
  expect_same_states(trained, alone, directory.path() / "on-device", {shared});
  expect_same_states(
      trained, alone, directory.path() / "on-nvme",
      {shared, "zero_optimization.stage=2", "zero_optimization.offload_param.device=nvme",
       "zero_optimization.offload_optimizer.device=nvme"});
}

TEST(CheckpointsOfRanks, ContainTheMovedBiasesOfRouters) {
  const SharedDirectory directory;
  const TrainedModel trained = {kBiases, {}};
  const Alone alone = train_alone_on_first(trained, directory.path() / "alone");
  expect_same_states(trained, alone, directory.path() / "of-router-on-nvme",
                     {"zero_optimization.stage=3", "zero_optimization.offload_param.device=nvme",
                      "zero_optimization.offload_optimizer.device=nvme"});
}

/// The first step's choices do not depend on the number of ranks.
TEST(RoutersOfRanks, MoveBiasesByTheRowsOfAllRanksAndMicroBatches) {
  const SharedDirectory directory;
  comm::Ranks& ranks = test::joined_ranks();
  const TrainedModel trained = {kBiases, {}};
  engine::Engine alone = setup::make_engine(config_of(trained, directory.path(), 1, {}));
  alone.start();
  const test::Batch batch = test::chained_ids(kSequences * alone.blueprint().shape.length, 1);
  const auto rows = alone.train_step(batch.view(), 0.003).expert_rows;
  std::vector<float> expected;
  for (const std::uint64_t load : rows.back()) {
    // 12 experts have 3 choices per token: a mean of a quarter.
    const std::uint64_t mean = batch.tokens.size() / 4;
    expected.push_back(load < mean ? 0.0625F : load > mean ? -0.0625F : 0.0F);
  }
  EXPECT_EQ(alone.side_states().at("correction_biases"),
            (std::vector<std::vector<float>>{expected}));
  for (const std::uint64_t shared : {std::uint64_t{1}, std::uint64_t{ranks.world()}}) {
    engine::Engine together =
        setup::make_engine(config_of(trained, directory.path(), ranks.world(),
                                     {fmt::format("ballast.expert_parallel={}", shared)}),
                           nullptr, &ranks);
    together.start();
    const test::Batch own = test::part_of(batch, &ranks);
    EXPECT_EQ(together.train_step(own.view(), 0.003).expert_rows, rows);
    EXPECT_EQ(together.side_states().at("correction_biases"),
              (std::vector<std::vector<float>>{expected}));
  }
}

}  // namespace
}  // namespace ballast::train::ranks_checkpoints_test
