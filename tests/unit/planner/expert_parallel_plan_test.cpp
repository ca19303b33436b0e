#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/config/config.h"
#include "ballast/core/error.h"
#include "ballast/setup/setup.h"

#include "tests/support/random_run.h"

namespace ballast::planner::expert_parallel_plan_test {
namespace {

/// Four ranks with experts that do not fit on their devices.
PlanRequest request_with(const std::string& expert_parallel) {
  const std::string text = R"({
    "model": {"family": "qwen3_moe", "vocab_size": 512, "hidden_size": 128, "num_layers": 4,
              "num_heads": 4, "num_experts": 16, "num_experts_per_tok": 2,
              "moe_intermediate_size": 512},
    "data": {"text": "unused.txt", "sequence_length": 64},
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": "auto",
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "auto"},
                          "offload_param": {"device": "auto"}},
    "ballast": {"device": "host", "activations": "auto"}})";
  const std::vector<std::string> overrides = {"ballast.expert_parallel=" + expert_parallel};
  PlanRequest request = setup::plan_request(config::parse(text, "/base", "test", overrides));
  request.budgets = {42 * kMiB, 512 * kMiB};
  request.rates = test::quick_machine();
  request.rates.fabric_per_second = 1e9;
  request.rates.ranks_per_node = 4;
  request.mesh.data = 4;
  return request;
}

double speed(const Decision& decision) {
  return static_cast<double>(decision.blueprint.problem.tokens_per_step()) /
         decision.prediction.step_seconds;
}

TEST(ExpertParallelPlan, LetsTokensTravelToExpertsIfThatIsFasterThanWeights) {
  const Decision chosen = decide(request_with("\"auto\""));
  EXPECT_EQ(chosen.blueprint.model.split.experts, 4U);
  const Decision whole = decide(request_with("1"));
  EXPECT_EQ(whole.blueprint.model.split.experts, 1U);
  EXPECT_GT(speed(chosen), speed(whole));
}

TEST(ExpertParallelPlan, RefusesAnotherNumberOfRanks) {
  try {
    static_cast<void>(decide(request_with("2")));
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.category(), ErrorCategory::config);
    EXPECT_NE(std::string(error.what()).find("2, but the run has 4 ranks; give 4 or 1"),
              std::string::npos)
        << error.what();
  }
}

}  // namespace
}  // namespace ballast::planner::expert_parallel_plan_test
