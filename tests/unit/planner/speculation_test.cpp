// The planner's gain by speculative updates, and the cases in which it does not use them.

#include <algorithm>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "ballast/calibrate/machine_rates.h"
#include "ballast/core/error.h"
#include "ballast/setup/forecast.h"
#include "ballast/setup/setup.h"
#include "ballast/setup/translate.h"

#include "src/planner/search.h"
#include "tests/support/sanitizers.h"
#include "tests/support/tags.h"

namespace ballast::planner::speculation_test {
namespace {

/// A run whose layers keep their intermediates.
config::Config config_for(std::uint64_t sequences, const std::vector<std::string>& overrides) {
  const std::string text = fmt::format(R"({{
    "model": {{"family": "llama", "vocab_size": 512, "hidden_size": 1024, "num_layers": 40,
              "num_heads": 8, "intermediate_size": 4096}},
    "data": {{"tokens": "unused.bin", "sequence_length": 2048}},
    "train_batch_size": {}, "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {{"offload_param": {{"device": "auto"}}}},
    "ballast": {{"device": "host", "recompute": false, "compute_threads": 1}}}})",
                                       sequences);
  return config::parse(text, "/", "test", overrides);
}

PlanRequest request_for(const plan::Rates& rates, std::uint64_t sequences,
                        const std::vector<std::string>& overrides) {
  PlanRequest request = setup::plan_request(config_for(sequences, overrides));
  request.budgets = {512 * kGiB, 64 * kGiB};
  request.rates = rates;
  request.kernels = [blocks = request.run.model.blocks.size()](model::MicroBatchShape) {
    return model::KernelSizes{.workspace = 4096, .intermediates = std::vector<Bytes>(blocks, 4096)};
  };
  return request;
}

double seconds(const Decision& decision) {
  return decision.prediction.step_seconds;
}

std::size_t speculating(const Decision& decision) {
  const auto& blocks = decision.blueprint.placement.blocks;
  return static_cast<std::size_t>(std::count_if(
      blocks.begin(), blocks.end(), [](const auto& block) { return block.speculates; }));
}

/// H100 as in configs/rates, and with the device memory of an H200, 4.8 instead of 3.35 TB/s.
std::vector<plan::Rates> machines() {
  const plan::Rates h100 =
      calibrate::load_rates(std::string(BALLAST_CONFIGS) + "/rates/h100-node.json");
  plan::Rates h200 = h100;
  h200.name = "H200";
  h200.device_memory_per_second *= 4.8 / 3.35;
  return {h100, h200};
}

const std::string kStates = "zero_optimization.offload_optimizer.device=";
const std::string kOff = "ballast.speculative_updates=0";

/// T* of gated updates, in sequences.
double sequences_to_hide(const plan::Rates& rates, const std::string& states,
                         const std::string& what) {
  const Decision gated = decide(request_for(rates, 64, {kStates + states, kOff}));
  for (const setup::HidingPoint& point :
       setup::find_hiding_points(gated.blueprint, gated.prediction, rates)) {
    if (point.what == what) return point.tokens / 2048.0;
  }
  return 0.0;
}

TAG_TESTS("slow_sanitized", "PlannedSpeculation.*");
TEST(PlannedSpeculation, SavesAFifthOfAStepWithHalfTheTokensThatHideGatedUpdates) {
  for (const plan::Rates& rates : machines()) {
    if (test::kSanitized && rates.name == "H200") break;  // it differs in one number only
    for (const auto& [states, what] : {std::pair{"cpu", "update"}, std::pair{"nvme", "NVMe"}}) {
      if (test::kSanitized && states == std::string("nvme")) break;
      const double enough = sequences_to_hide(rates, states, what);
      ASSERT_GT(enough, 2.0);
      const auto half = static_cast<std::uint64_t>(enough / 2.0);
      const Decision gated = decide(request_for(rates, half, {kStates + states, kOff}));
      const Decision decision = decide(request_for(rates, half, {kStates + states}));
      EXPECT_LE(seconds(decision), 0.8 * seconds(gated)) << rates.name << ", " << states;
      EXPECT_GT(speculating(decision), 0U);
      EXPECT_EQ(speculating(gated), 0U);
    }
  }
}

TEST(PlannedSpeculation, ItsConfigDrawsItsBlueprint) {
  const plan::Rates rates = machines().front();
  const PlanRequest request = request_for(rates, 20, {kStates + "cpu"});
  const Decision decision = decide(request);
  ASSERT_GT(speculating(decision), 0U);
  const config::Config settled =
      setup::settle(config_for(20, {kStates + "cpu"}), decision.blueprint);
  EXPECT_EQ(settled.ballast.speculative_updates, speculating(decision));
  const config::Config again = config::parse(config::print(settled), "/elsewhere", "printed", {});
  const engine::Blueprint drawn = draw_blueprint(setup::translate(again), request.budgets,
                                                 request.kernels({1, again.data.sequence_length}));
  EXPECT_EQ(drawn.placement.blocks, decision.blueprint.placement.blocks);
}

TEST(PlannedSpeculation, IsLeftOutWhereUpdatesAreHiddenAnyway) {
  plan::Rates rates = machines().front();
  rates.update_per_second = 1e14;
  const Decision decision = decide(request_for(rates, 20, {kStates + "cpu"}));
  EXPECT_EQ(speculating(decision), 0U);
}

TEST(PlannedSpeculation, TakesOnlyMemoryThatThePlacementLeaves) {
  const plan::Rates rates = machines().front();
  const auto with_host = [&](Bytes host, const std::vector<std::string>& more) {
    std::vector<std::string> overrides = {kStates + "cpu"};
    overrides.insert(overrides.end(), more.begin(), more.end());
    PlanRequest request = request_for(rates, 20, overrides);
    request.budgets.host = host;
    return decide(request);
  };
  const Decision roomy = with_host(64 * kGiB, {});
  const Bytes most = roomy.blueprint.ledger.total(Tier::host);
  const Bytes least = with_host(64 * kGiB, {kOff}).blueprint.ledger.total(Tier::host);
  ASSERT_GT(most, least);
  EXPECT_EQ(speculating(with_host(least, {})), 0U);
  const Decision between = with_host(least + (most - least) / 2, {});
  EXPECT_GT(speculating(between), 0U);
  EXPECT_LT(speculating(between), speculating(roomy));
  EXPECT_LT(seconds(between), seconds(with_host(least, {})));
}

TEST(PlannedSpeculation, OfANamedNumberOfBlocksIsEvenlySpreadOverThoseBelowTheDevice) {
  step::Placement placement = {std::vector<step::BlockPlacement>(8)};
  for (const std::size_t b : {1U, 2U, 3U, 5U, 6U, 7U}) {
    placement.blocks[b].optimizer = b < 4 ? Tier::host : Tier::nvme;
  }
  const auto marks = [&](std::size_t count) {
    std::vector<std::size_t> found;
    const step::Placement marked = with_speculation(placement, count);
    for (std::size_t b = 0; b < 8; ++b) {
      if (marked.blocks[b].speculates) found.push_back(b);
    }
    return found;
  };
  EXPECT_EQ(marks(0), std::vector<std::size_t>{});
  EXPECT_EQ(marks(2), (std::vector<std::size_t>{3, 7}));
  EXPECT_EQ(marks(3), (std::vector<std::size_t>{2, 5, 7}));
  EXPECT_EQ(marks(6), (std::vector<std::size_t>{1, 2, 3, 5, 6, 7}));
  EXPECT_EQ(marks(100), marks(6));
}

TEST(PlannedSpeculation, ThatDoesNotFitIsRefusedWithItsNumber) {
  const plan::Rates rates = machines().front();
  PlanRequest request = request_for(rates, 20, {kStates + "cpu", "ballast.speculative_updates=42"});
  request.budgets.host =
      decide(request_for(rates, 20, {kStates + "cpu", kOff})).blueprint.ledger.total(Tier::host);
  try {
    static_cast<void>(decide(request));
    FAIL();
  } catch (const Error& error) {
    const std::string message = error.what();
    EXPECT_NE(message.find("--set ballast.speculative_updates=0"), std::string::npos) << message;
  }
}

}  // namespace
}  // namespace ballast::planner::speculation_test
