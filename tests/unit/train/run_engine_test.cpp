#include "src/train/run_engine.h"

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/setup/setup.h"

#include "tests/support/thread_channels.h"
#include "tests/support/thread_ranks.h"
#include "tests/unit/engine/tiny_engine.h"

namespace ballast::train::run_engine_test {
namespace {

using namespace std::chrono_literals;

constexpr std::uint32_t kWorld = 2;
constexpr double kGood = 0x1p12;
constexpr double kTooLarge = 0x1p40;

/// Two ranks in threads, whose updated weights are gathered over the first channel.
class TwoRanks : public test::TinyEngine {
 protected:
  [[nodiscard]] RestartableEngine make(comm::Ranks& ranks) const {
    const config::Config config = test::tiny_config(
        test::kTinyModel, false, directory.path() / std::to_string(ranks.rank()),
        {"fp16.enabled=true", "gradient_clipping=0", "zero_optimization.stage=1",
         test::kOptimizer + "cpu", test::kWeights + "cpu", "ballast.speculative_updates=9"});
    return {setup::draw_blueprint(config, &ranks), setup::engine_options(config, ranks.launch()),
            nullptr, &ranks};
  }
  /// The second step overflows, so its speculative updates are undone after it.
  void run_two_steps(RestartableEngine& engine) const {
    engine->start();
    EXPECT_FALSE(step(engine, kGood).skipped);
    EXPECT_TRUE(step(engine, kTooLarge).rolled_back);
  }
  engine::StepResult step(RestartableEngine& engine, double scale) const {
    return engine->train_step({ids(*engine, 1), ids(*engine, 2)}, 0.01, scale);
  }
};

TEST_F(TwoRanks, RunWhatWasSubmittedBeforeTheirEnginesAreReplaced) {
  std::atomic<std::size_t> gathers = 0;
  test::ThreadChannels counted(kWorld, [&](std::uint32_t rank, std::size_t channel, std::size_t) {
    if (rank == 0 && channel == 0) ++gathers;
  });
  const auto in = [](test::ThreadChannels& channels) {
    return [&channels](std::uint32_t rank, auto) { return channels.make(rank); };
  };
  test::as_ranks(
      kWorld,
      [&](comm::Ranks& ranks) {
        RestartableEngine engine = make(ranks);
        run_two_steps(engine);
        engine->drain();
      },
      in(counted));
  ASSERT_GE(gathers, 3U);

  // Rank 1 leaves during the last gather but one. Rank 0 then begins the last one.
  const std::size_t held = gathers - 2;
  std::atomic<bool> holding = false;
  std::atomic<bool> replacing = false;
  std::atomic<bool> ahead = false;
  test::ThreadChannels delayed(kWorld,
                               [&](std::uint32_t rank, std::size_t channel, std::size_t call) {
                                 if (channel != 0) return;
                                 if (rank == 1 && call == held) {
                                   holding = true;
                                   while (!replacing) std::this_thread::sleep_for(1ms);
                                   std::this_thread::sleep_for(50ms);
                                 }
                                 if (rank == 0 && call == held + 1) ahead = true;
                               });
  test::as_ranks(
      kWorld,
      [&](comm::Ranks& ranks) {
        RestartableEngine engine = make(ranks);
        run_two_steps(engine);
        const std::atomic<bool>& ready = ranks.rank() == 0 ? ahead : holding;
        while (!ready && delayed.broken() == 0) std::this_thread::sleep_for(1ms);
        if (ranks.rank() == 1) replacing = true;
        engine.replace();
        engine->start();
        EXPECT_FALSE(step(engine, kGood).skipped);
        engine->finish();
      },
      in(delayed));
  EXPECT_EQ(delayed.broken(), 0U);
}

}  // namespace
}  // namespace ballast::train::run_engine_test
