#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "ballast/setup/forecast.h"
#include "ballast/setup/setup.h"

#include "tests/support/random_run.h"

namespace ballast::setup::hiding_points_test {
namespace {

using planner::Decision;
using planner::PlanRequest;

/// One micro-batch of `sequences` sequences of 64 tokens, optimizer states on the host.
Decision decide_for(std::uint64_t sequences, const std::vector<std::string>& overrides,
                    const plan::Rates& rates) {
  const std::string text = fmt::format(R"({{
    "model": {{"family": "gpt2", "vocab_size": 512, "hidden_size": 128, "num_layers": 16,
              "num_heads": 4}},
    "data": {{"tokens": "unused.bin", "sequence_length": 64}},
    "train_batch_size": {}, "gradient_clipping": 0,
    "zero_optimization": {{"offload_optimizer": {{"device": "cpu"}}}},
    "ballast": {{"device": "host", "recompute": true, "compute_threads": 1}}}})",
                                       sequences);
  PlanRequest request = plan_request(config::parse(text, "/", "test", overrides));
  request.budgets = {kGiB, kGiB};
  request.rates = rates;
  request.kernels = [](model::MicroBatchShape) { return model::KernelSizes{.workspace = 4096}; };
  return planner::decide(request);
}

plan::Rates slow_updates() {
  plan::Rates rates = test::quick_machine();
  rates.forward = rates.backward = rates.head = {{64.0, 1e12}};
  rates.device_memory_per_second = 1e13;
  rates.launch_seconds = 0.0;
  rates.upload_per_second = rates.offload_per_second = 1e12;
  return rates;
}

double tokens_to_hide_updates(const Decision& decision, const plan::Rates& rates) {
  const auto points = find_hiding_points(decision.blueprint, decision.prediction, rates);
  const auto found = std::find_if(points.begin(), points.end(),
                                  [](const HidingPoint& point) { return point.what == "update"; });
  return found == points.end() ? 0.0 : found->tokens;
}

/// The time of a step over that of its computation.
double stretch(const Decision& decision) {
  return decision.prediction.step_seconds /
         decision.prediction.busy_seconds[static_cast<std::size_t>(plan::Lane::compute)];
}

TEST(HidingPoints, UpdatesAreHiddenFromTheirTokensOnAndNotBefore) {
  const plan::Rates rates = slow_updates();
  std::vector<double> found;
  for (const std::vector<std::string>& overrides :
       std::vector<std::vector<std::string>>{{"ballast.speculative_updates=0"},
                                             {"ballast.speculative_updates=13"},  // of 18 blocks
                                             {"ballast.update=eager"}}) {
    const double tokens = tokens_to_hide_updates(decide_for(8, overrides, rates), rates);
    ASSERT_GT(tokens, 0.0);
    found.push_back(tokens);
    const auto sequences = [&](double factor) {
      return static_cast<std::uint64_t>(std::ceil(factor * tokens / 64.0));
    };
    EXPECT_LT(stretch(decide_for(sequences(1.5), overrides, rates)), 1.1) << overrides.front();
    EXPECT_GT(stretch(decide_for(sequences(0.5), overrides, rates)), 1.2) << overrides.front();
  }
  // A forward pass is a quarter of a step that recomputes, the backward pass the rest.
  EXPECT_NEAR(found[0] / found[2], 3.0, 0.5);
  // With speculation the whole step hides updates, which then also copy the old values.
  EXPECT_GT(found[0] / found[1], 1.5);
}

}  // namespace
}  // namespace ballast::setup::hiding_points_test
