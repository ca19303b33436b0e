// Steps of half a million tokens on a GPU of 24 GB, where the activations that pass from layer to
// layer, for all micro-batches, exceed the device.

#include <cstddef>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/calibrate/machine_rates.h"
#include "ballast/config/config.h"
#include "ballast/engine/blueprint.h"
#include "ballast/setup/setup.h"

#include "tests/support/expect_error.h"

namespace ballast::planner::large_steps_test {
namespace {

/// Qwen2.5 14B with 512 x 1024 tokens on an RTX 4090, with 240 GiB of host memory.
PlanRequest request_for(const std::vector<std::string>& overrides = {}) {
  const std::string configs = BALLAST_CONFIGS;
  PlanRequest request =
      setup::plan_request(config::load(configs + "/workstation-14b.json", overrides));
  request.budgets = {23 * kGiB, 240 * kGiB};
  request.rates = calibrate::load_rates(configs + "/rates/rtx4090-1nvme.json");
  // Sizes on a GPU, per sequence of a micro-batch.
  request.kernels = [blocks = request.run.model.blocks.size()](model::MicroBatchShape shape) {
    const Bytes tokens = shape.tokens();
    return model::KernelSizes{.workspace = tokens * 160 * kKiB + 600 * kMiB,
                              .intermediates = std::vector<Bytes>(blocks, tokens * 150 * kKiB),
                              .attention = std::vector<Bytes>(blocks, tokens * 21 * kKiB),
                              .rows = tokens * 11 * kKiB,
                              .cleared = std::vector<Bytes>(blocks, 0)};
  };
  return request;
}

TEST(LargeSteps, FitWithGradientSumsInHostMemory) {
  const Decision decision = decide(request_for());
  EXPECT_EQ(decision.blueprint.options.order, step::Order::micro_batch_major_offload);
  EXPECT_EQ(engine::describe_placement(decision.blueprint).back(),
            "gradient sums     on host between two micro-batches");
  const memory::Ledger& ledger = decision.blueprint.ledger;
  EXPECT_LE(ledger.total(Tier::device), 23 * kGiB);
  EXPECT_LE(ledger.total(Tier::host), 240 * kGiB);
  // Products alone: 8 FLOPs per parameter and token at 134 TFLOP/s take 464 s.
  EXPECT_LT(decision.prediction.step_seconds, 1.2 * 464);
}

TEST(LargeSteps, DoNotFitWithTheOtherOrders) {
  for (const std::string order : {"layer_major", "micro_batch_major"}) {
    const PlanRequest request = request_for({"ballast.order=" + order});
    test::expect_error(ErrorCategory::memory, {"ballast.order=auto"}, [&] { decide(request); });
  }
}

}  // namespace
}  // namespace ballast::planner::large_steps_test
