#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/setup/setup.h"

#include "tests/unit/planner/asked.h"

namespace ballast::planner::by_rule_test {
namespace {

using test::Asked;
using test::kernels;
using test::kRoomy;

TEST(ByRule, DefaultsPlaceWhatAutoPlaces) {
  // Each run is refused if the keys that it leaves out have the values named here.
  const std::string size = "train_micro_batch_size_per_gpu=4";
  const std::string large = "train_batch_size=256";
  const std::string order = "ballast.order=layer_major";
  const std::string states = "zero_optimization.offload_optimizer.device=none";
  const std::string weights = "zero_optimization.offload_param.device=none";
  struct Case {
    std::vector<std::string> run;
    memory::Budgets budgets;
    std::string fixed;
  };
  const std::vector<Case> cases = {
      {{size}, {14 * kMiB, 4 * kMiB}, "ballast.gradients=host"},
      {{size, large, order}, {14 * kMiB, 24 * kMiB}, "ballast.activations=device"},
      {{size, large, order, states, weights}, {64 * kMiB, 64 * kMiB}, "ballast.activations=device"},
      {{size, large, states, weights, "ballast.activations=device"}, {64 * kMiB, 8 * kMiB}, order}};
  for (const Case& one : cases) {
    SCOPED_TRACE(one.fixed);
    std::vector<std::string> named = one.run;
    named.push_back(one.fixed);
    EXPECT_NE(Asked(named, one.budgets).refusal(), "");
    const Asked open(one.run, one.budgets);
    EXPECT_EQ(open.refusal(), "");
    if (leaves_choices(open.request().run)) continue;
    // A run that names its tiers has the plan that was predicted, without rates.
    const Decision decision = open.decide();
    const engine::Blueprint drawn = draw_blueprint(
        open.request().run, one.budgets, kernels(open.model, {open.config.batch.micro_batch, 64}));
    EXPECT_EQ(drawn.placement.blocks, decision.blueprint.placement.blocks);
    EXPECT_EQ(drawn.options, decision.blueprint.options);
  }
}

TEST(ByRule, ActivationsWithoutRatesFillTheDeviceFirst) {
  const std::vector<std::string> run = {"train_micro_batch_size_per_gpu=4",
                                        "gradient_accumulation_steps=4",
                                        "ballast.recompute=true",
                                        "ballast.order=layer_major",
                                        "zero_optimization.offload_optimizer.device=cpu",
                                        "zero_optimization.offload_param.device=cpu"};
  const auto tiers = [&](memory::Budgets budgets) {
    std::vector<Tier> found;
    for (const auto& block : Asked(run, budgets).decide().blueprint.placement.blocks) {
      found.push_back(block.activations);
    }
    return found;
  };
  const Decision roomy = Asked(run, kRoomy).decide();
  const std::vector<Tier> all(12, Tier::device);
  EXPECT_EQ(tiers(kRoomy), all);
  EXPECT_FALSE(Asked(run, kRoomy).request().run.constraints.may_swap());
  // With a page less on the device, the first layer's activation goes to the host.
  const Bytes device = roomy.blueprint.ledger.total(Tier::device);
  std::vector<Tier> first_on_host = all;
  first_on_host[1] = Tier::host;
  EXPECT_EQ(tiers({device - kPage, kRoomy.host}), first_on_host);
}

TEST(ByRule, MeasuresDrivesOnlyForRunsThatMayNeedThem) {
  const std::vector<std::string> on_host = {"zero_optimization.offload_optimizer.device=cpu",
                                            "zero_optimization.offload_param.device=cpu"};
  EXPECT_FALSE(measured_run(Asked(on_host, kRoomy).request()).constraints.may_swap());
  EXPECT_TRUE(measured_run(Asked({}, kRoomy).request()).constraints.may_swap());
  // Weights and states fit on the host, gradients do not.
  const Asked full(on_host, kRoomy);
  const Bytes needed = full.decide().blueprint.ledger.total(Tier::host);
  const Asked tight(on_host, {kRoomy.device, needed - needed / 16});
  EXPECT_EQ(tight.refusal(), "");
  EXPECT_TRUE(measured_run(tight.request()).constraints.must_swap());
}

}  // namespace
}  // namespace ballast::planner::by_rule_test
