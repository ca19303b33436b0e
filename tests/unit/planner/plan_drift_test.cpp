// The planned and the allocated buffers are the same list.

#include <string>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/engine/engine.h"
#include "ballast/setup/setup.h"

#include "tests/support/temp_dir.h"
#include "tests/support/tiny_config.h"

namespace ballast::setup::plan_drift_test {
namespace {

using Line = std::tuple<Tier, std::string, Bytes>;

std::vector<Line> lines(const memory::Ledger& ledger) {
  std::vector<Line> out;
  out.reserve(ledger.lines().size());
  for (const auto& line : ledger.lines()) out.emplace_back(line.tier, line.kind, line.bytes);
  return out;
}

/// Arbitrary rates.
plan::Rates some_rates() {
  plan::Rates rates;
  rates.name = "some machine";
  rates.forward = rates.backward = rates.head = {{64.0, 1e9}};
  rates.device_memory_per_second = 4e9;
  rates.launch_seconds = 1e-5;
  rates.update_per_second = 3e9;
  rates.upload_per_second = rates.offload_per_second = 2e9;
  rates.read_per_second = rates.write_per_second = rates.mixed_per_second = 1e9;
  rates.io_latency_seconds = 1e-4;
  rates.shared_cores = rates.compute_threads = rates.update_threads = 2;
  rates.link_cores = rates.io_cores = 0.5;
  return rates;
}

/// Plans a model, makes its engine, and compares what they say about memory.
void expect_no_drift(const std::string& model, const std::vector<std::string>& overrides) {
  const test::TempDir directory;
  const config::Config config = test::tiny_config(model, true, directory.path(), overrides);
  planner::PlanRequest request = plan_request(config);
  request.budgets = request.run.budgets;
  request.rates = some_rates();
  const planner::Decision decision = planner::decide(request);
  const config::Config settled = settle(config, decision.blueprint);
  engine::Engine engine(decision.blueprint, engine_options(settled));
  // The blueprint that the ranks of a run draw from the decided config.
  const engine::Blueprint drawn = draw_blueprint(settled);
  EXPECT_EQ(lines(drawn.ledger), lines(decision.blueprint.ledger));
  EXPECT_EQ(drawn.placement.blocks, decision.blueprint.placement.blocks);
  EXPECT_EQ(drawn.options, decision.blueprint.options);
  engine.start();
  for (const Tier tier : kTiers) {
    EXPECT_EQ(engine.totals().allocated.at(static_cast<std::size_t>(tier)),
              decision.blueprint.ledger.total(tier))
        << to_string(tier);
  }
}

class PlanDrift : public ::testing::TestWithParam<std::vector<std::string>> {};

TEST_P(PlanDrift, TheEngineAllocatesWhatWasPlanned) {
  expect_no_drift(
      R"("family": "gpt2", "vocab_size": 131, "hidden_size": 48, "num_layers": 4, "num_heads": 3)",
      GetParam());
}

/// Sequences of 17 chunks, so that a layer keeps three states per head, or none if it is
/// recomputed.
TEST(PlanDrift, HoldsForStatesOfRecurrences) {
  for (const char* recompute : {"false", "true"}) {
    expect_no_drift(
        R"("family": "qwen3_5", "vocab_size": 131, "hidden_size": 32, "num_layers": 2,
           "num_heads": 2, "head_dim": 16, "full_attention_interval": 2, "max_sequence": 1050,
           "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 16,
           "linear_value_head_dim": 8)",
        {"data.sequence_length=1050", std::string("ballast.recompute=") + recompute});
  }
}

const std::vector<std::string> kNamed = {};
const std::vector<std::string> kBelow = {"zero_optimization.offload_optimizer.device=nvme",
                                         "zero_optimization.offload_param.device=cpu",
                                         "ballast.activations=host"};
const std::vector<std::string> kOpen = {"zero_optimization.offload_optimizer.device=auto",
                                        "zero_optimization.offload_param.device=auto",
                                        "ballast.activations=auto",
                                        "train_batch_size=12",
                                        "train_micro_batch_size_per_gpu=auto",
                                        "gradient_accumulation_steps=auto"};

std::vector<std::string> open_and(const std::vector<std::string>& more) {
  std::vector<std::string> all = kOpen;
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

INSTANTIATE_TEST_SUITE_P(
    All, PlanDrift,
    ::testing::Values(kNamed, kBelow, kOpen,
                      open_and({"ballast.device_bytes=1400KiB", "ballast.host_bytes=1500KiB"}),
                      open_and({"ballast.device_bytes=1400KiB", "ballast.host_bytes=1500KiB",
                                "ballast.order=micro_batch_major"}),
                      open_and({"ballast.device_bytes=1400KiB", "ballast.host_bytes=900KiB",
                                "ballast.gradients=auto"}),
                      open_and({"ballast.device_bytes=3MiB", "gradient_clipping=0",
                                "ballast.update=eager"})));

}  // namespace
}  // namespace ballast::setup::plan_drift_test
