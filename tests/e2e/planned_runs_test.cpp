// Random small runs that the planner accepts train within their budgets.

#include <cmath>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "ballast/core/error.h"
#include "ballast/core/random.h"
#include "ballast/engine/engine.h"
#include "ballast/setup/setup.h"
#include "ballast/setup/translate.h"

#include "tests/support/random_run.h"
#include "tests/support/temp_dir.h"

namespace ballast::planner::planned_runs_test {
namespace {

std::vector<std::int32_t> random_ids(std::size_t count, std::uint64_t vocabulary) {
  std::vector<std::int32_t> ids(count);
  for (std::size_t i = 0; i < count; ++i) {
    ids[i] = static_cast<std::int32_t>(random_u64(7, i) % vocabulary);
  }
  return ids;
}

/// Trains two steps of a run whose choices are all made.
void train_within(const config::Config& config, const engine::Blueprint& planned) {
  engine::Engine engine = setup::make_engine(config);
  engine.start();
  const std::size_t tokens = planned.tokens_per_step();
  const std::vector<std::int32_t> ids = random_ids(tokens + 1, config.model.vocab_size);
  for (int step = 0; step < 2; ++step) {
    const engine::StepResult result =
        engine.train_step({std::span(ids).first(tokens), std::span(ids).last(tokens)}, 1e-3);
    EXPECT_TRUE(std::isfinite(result.loss));
    EXPECT_FALSE(result.skipped);
  }
  engine.finish();
  const auto allocated = engine.totals().allocated;
  EXPECT_LE(allocated[static_cast<std::size_t>(Tier::device)], config.ballast.device_bytes);
  EXPECT_LE(allocated[static_cast<std::size_t>(Tier::host)], config.ballast.host_bytes);
  for (const Tier tier : kTiers) {
    EXPECT_EQ(allocated[static_cast<std::size_t>(tier)], planned.ledger.total(tier));
  }
}

/// The planner's decision for a random run whose budgets are a part of what it needs on the device
/// alone; empty if that does not fit.
std::optional<setup::Drawn> decide_random(std::uint64_t seed,
                                          const std::filesystem::path& directory) {
  test::Dice dice(seed);
  test::RandomRun run = test::draw_run(dice, false);
  run.overrides.push_back("ballast.out=" + directory.string());
  const config::Config config = run.config();
  PlanRequest request = setup::plan_request(config);
  request.rates = test::quick_machine();
  request.rates.shared_cores = request.rates.compute_threads = request.rates.update_threads = 1;
  request.budgets = {kGiB, kGiB};
  const memory::Ledger all = decide(request).blueprint.ledger;
  const Bytes needed = all.total(Tier::device) + all.total(Tier::host);
  request.budgets = {needed * (20 + dice.below(60)) / 100, needed * (20 + dice.below(60)) / 100};
  try {
    Decision decision = decide(request);
    config::Config settled = setup::settle(config, decision.blueprint);
    return setup::Drawn{std::move(settled), std::move(decision.blueprint)};
  } catch (const Error& error) {
    EXPECT_EQ(error.category(), ErrorCategory::memory) << error.what();
    return std::nullopt;
  }
}

TEST(PlannedRuns, TrainWithinTheirBudgets) {
  std::uint64_t trained = 0;
  std::uint64_t on_nvme = 0;
  for (std::uint64_t seed = 0; trained < 8; ++seed) {
    ASSERT_LT(seed, 100U);
    SCOPED_TRACE(fmt::format("seed {}", seed));
    const test::TempDir directory;
    const std::optional<setup::Drawn> decision = decide_random(seed, directory.path());
    if (!decision) continue;
    const config::Config settled =
        config::parse(config::print(decision->config), directory.path(), "settled", {});
    train_within(settled, decision->blueprint);
    ++trained;
    on_nvme += decision->blueprint.ledger.total(Tier::nvme) > 0 ? 1 : 0;
  }
  EXPECT_GT(on_nvme, 1U);
}

}  // namespace
}  // namespace ballast::planner::planned_runs_test
