#include <algorithm>
#include <chrono>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/engine/engine.h"
#include "ballast/engine/run_states.h"
#include "ballast/setup/setup.h"

#include "tests/support/temp_dir.h"
#include "tests/unit/engine/tiny_engine.h"

namespace ballast::engine::saved_states_test {
namespace {

using SavedStates = test::TinyEngine;
using test::kOptimizer;
using test::kWeights;

const std::string kSubGroups = "zero_optimization.sub_group_size=";

/// The bytes of every entry, by block and kind.
using Saved = std::map<std::pair<std::size_t, StateKind>, std::vector<std::byte>>;

Saved save(Engine& engine) {
  Saved saved;
  engine.snapshot().save([&](const StateRange& range, ConstHostBytes bytes) {
    auto& array = saved[{range.block, range.kind}];
    EXPECT_EQ(array.size(), range.first * range.width);  // one rank: without gaps
    array.insert(array.end(), bytes.begin(), bytes.end());
  });
  Bytes bytes = 0;
  for (const StateRange& range : saved_ranges(engine.blueprint())) bytes += range.bytes();
  for (const StateRange& range : whole_ranges(engine.blueprint())) {
    EXPECT_EQ((saved[{range.block, range.kind}].size()), range.bytes());
    bytes -= range.bytes();
  }
  EXPECT_EQ(bytes, 0U);
  return saved;
}

/// Some layers are trained in part, some not at all.
const std::string kSomeFrozen = R"(ballast.train=["model.layers.0.mlp.*", "model.layers.2.*"])";

TEST_F(SavedStates, ResumeInAnyPlacement) {
  using Choice = std::pair<std::string, std::string>;
  for (const auto& [format, train] :
       {Choice{"fp32", "ballast.train=all"}, Choice{"bf16_first", "ballast.train=all"},
        Choice{"8bit", "ballast.train=all"}, Choice{"fp32", kSomeFrozen},
        Choice{"8bit", kSomeFrozen}}) {
    const std::string states = "ballast.optimizer_states=" + format;
    Engine before =
        setup::make_engine(config({states, train, kOptimizer + "nvme", kSubGroups + "10000"}));
    before.start();
    for (int step = 0; step < 3; ++step) before.train_step({ids(before, 1), ids(before, 2)}, 0.1);
    const Saved saved = save(before);
    const std::uint64_t hash = before.snapshot().hash();
    const double loss = before.train_step({ids(before, 3), ids(before, 4)}, 0.1).loss;
    const std::uint64_t next_hash = before.snapshot().hash();
    for (const auto& [weights, optimizer, size] :
         {std::tuple{"none", "none", "4096"}, std::tuple{"nvme", "nvme", "auto"},
          std::tuple{"cpu", "cpu", "20000"}, std::tuple{"none", "nvme", "auto"}}) {
      Engine after = setup::make_engine(
          config({states, train, kWeights + weights, kOptimizer + optimizer, kSubGroups + size}));
      after.resume(
          [&](const StateRange& range, HostBytes bytes) {
            const auto& array = saved.at({range.block, range.kind});
            ASSERT_LE(range.first * range.width + bytes.size(), array.size());
            std::copy_n(array.begin() + static_cast<std::ptrdiff_t>(range.first * range.width),
                        bytes.size(), bytes.begin());
          },
          before.updates() - 1);
      EXPECT_EQ(after.snapshot().hash(), hash) << format << ", " << weights << ", " << optimizer;
      EXPECT_EQ(after.train_step({ids(after, 3), ids(after, 4)}, 0.1).loss, loss);
      EXPECT_EQ(after.snapshot().hash(), next_hash)
          << format << ", " << weights << ", " << optimizer;
    }
  }
}

TEST_F(SavedStates, InTheBackgroundAreThoseBeforeTheNextUpdates) {
  using Overrides = std::vector<std::string>;
  for (const Overrides& more :
       {Overrides{}, Overrides{"ballast.update=eager", "gradient_clipping=0"},
        Overrides{"ballast.speculative_updates=4", kSubGroups + "10000"}}) {
    Overrides overrides = {kWeights + "cpu", kOptimizer + "cpu"};
    overrides.insert(overrides.end(), more.begin(), more.end());
    Engine engine = setup::make_engine(config(overrides));
    engine.start();
    for (int step = 0; step < 2; ++step) engine.train_step({ids(engine, 1), ids(engine, 2)}, 0.1);
    const Saved expected = save(engine);
    Saved saved;
    std::vector<StateRange> ranges;
    const auto saving = engine.snapshot().save_in_background(
        [&](const StateRange& range, ConstHostBytes bytes) {
          // A step would take less time.
          if (ranges.empty()) std::this_thread::sleep_for(std::chrono::milliseconds(100));
          ranges.push_back(range);
          auto& array = saved[{range.block, range.kind}];
          array.resize(std::max<std::size_t>(array.size(), range.first * range.width));
          array.insert(array.end(), bytes.begin(), bytes.end());
        },
        [] {});
    for (int step = 0; step < 2; ++step) engine.train_step({ids(engine, 3), ids(engine, 4)}, 0.1);
    saving->finish();
    EXPECT_EQ(ranges, background_ranges(engine.blueprint()));
    EXPECT_TRUE(saved == expected) << more.size();
    EXPECT_FALSE(save(engine) == expected);
  }
}

TEST_F(SavedStates, ASaveInTheBackgroundEndsWithItsEngine) {
  std::shared_ptr<BackgroundSave> saving;
  {
    Engine engine = setup::make_engine(config({kOptimizer + "cpu"}));
    engine.start();
    saving = engine.snapshot().save_in_background(
        [](const StateRange&, ConstHostBytes) {
          std::this_thread::sleep_for(std::chrono::milliseconds(20));
        },
        [] {});
    engine.train_step({ids(engine, 1), ids(engine, 2)}, 0.1);
  }
  EXPECT_TRUE(saving->done());
}

/// Data on NVMe are not moved while training continues, and another engine continues from them.
class SavedStatesOnNvme : public SavedStates {
 protected:
  void go_on_from_nvme(const std::string& train);
};
TEST_F(SavedStatesOnNvme, ResumeWithoutMovingStates) {
  for (const std::string& train : {std::string("ballast.train=all"), kSomeFrozen}) {
    SCOPED_TRACE(train);
    go_on_from_nvme(train);
  }
}

void SavedStatesOnNvme::go_on_from_nvme(const std::string& train) {
  const auto engine_of = [&] {
    auto config = this->config({train, kOptimizer + "nvme", kWeights + "nvme", kSubGroups + "10000",
                                "ballast.checkpoint_every=1"});
    return setup::make_engine(config);
  };
  std::unique_ptr<Engine> first(new Engine(engine_of()));
  Engine& before = *first;
  before.start();
  before.train_step({ids(before, 1), ids(before, 2)}, 0.1);
  KeptStates kept = before.snapshot().keep(1);
  const std::uint64_t hash = before.snapshot().hash();
  const std::uint64_t updates = before.updates();
  const test::TempDir folder;
  kept.image.files = before.snapshot().link({folder.path(), "swap", "swap"});
  ASSERT_EQ(kept.image.files.size(), 1U);
  ASSERT_TRUE(saved_ranges(before.blueprint(), step::kHomesInMemory).empty());
  std::vector<double> losses;
  for (int step = 0; step < 3; ++step) {
    losses.push_back(before.train_step({ids(before, 3 + step), ids(before, 4)}, 0.1).loss);
  }
  const std::uint64_t last_hash = before.snapshot().hash();
  EXPECT_EQ(before.snapshot().kept(), std::vector<std::uint64_t>{1});

  std::vector<std::size_t> extents;
  for (const KeptHome& home : kept.homes) extents.push_back(home.content.extent);
  first.reset();  // frees the locks of the swap files
  // Starts twice from the same files: the first engine has not changed what the checkpoint keeps.
  for (int time = 0; time < 2; ++time) {
    Engine after = engine_of();
    const StateSource unused = [](const StateRange&, HostBytes) { FAIL() << "nothing is copied"; };
    EXPECT_TRUE(after.resume(unused, updates, kept, {{1, extents}}));
    EXPECT_EQ(after.snapshot().hash(), hash);
    for (int step = 0; step < 3; ++step) {
      EXPECT_EQ(after.train_step({ids(after, 3 + step), ids(after, 4)}, 0.1).loss,
                losses[static_cast<std::size_t>(step)]);
    }
    EXPECT_EQ(after.snapshot().hash(), last_hash);
  }
}

}  // namespace
}  // namespace ballast::engine::saved_states_test
