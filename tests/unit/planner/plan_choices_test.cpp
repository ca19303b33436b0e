
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/calibrate/machine_rates.h"
#include "ballast/config/config.h"
#include "ballast/core/error.h"
#include "ballast/setup/run_plan.h"
#include "ballast/setup/setup.h"
#include "ballast/setup/translate.h"
#include "ballast/text/json.h"

#include "tests/support/random_run.h"
#include "tests/support/temp_dir.h"
#include "tests/support/thread_ranks.h"
#include "tests/support/tiny_config.h"

namespace ballast::setup::plan_choices_test {
namespace {

/// Mixed tiers, so that exchanged members of the message would be noticed.
PlanChoices some_choices() {
  PlanChoices choices = {.micro_batch = 3,
                         .expert_ranks = 4,
                         .sub_group_size = 4096,
                         .budgets = {5, 6},
                         .order = step::Order::micro_batch_major,
                         .prefetches_experts = true,
                         .buffers = {1, 2, 3, 4, 5, 6}};
  step::BlockPlacement mixed = {Tier::host,      Tier::nvme, Tier::device,
                                step::Kept::all, true,       Tier::nvme};
  choices.placement.blocks = {{}, mixed, mixed, {}};
  mixed.kept = step::Kept::attention;
  choices.placement.blocks.push_back(mixed);
  return choices;
}

TEST(PlanChoices, SurviveTheirJson) {
  const PlanChoices sent = some_choices();
  const std::string text = choices_json(sent).compact();
  const PlanChoices received = read_choices(text::parse_json(text, "test"));
  EXPECT_EQ(received.micro_batch, sent.micro_batch);
  EXPECT_EQ(received.expert_ranks, sent.expert_ranks);
  EXPECT_EQ(received.sub_group_size, sent.sub_group_size);
  EXPECT_EQ(received.budgets.device, sent.budgets.device);
  EXPECT_EQ(received.budgets.host, sent.budgets.host);
  EXPECT_EQ(received.order, sent.order);
  EXPECT_EQ(received.prefetches_experts, sent.prefetches_experts);
  EXPECT_EQ(received.buffers, sent.buffers);
  EXPECT_EQ(received.placement.blocks, sent.placement.blocks);
}

TEST(PlanChoices, AreRefusedWithTheNameOfTheWrongMember) {
  const text::Json whole = choices_json(some_choices());
  const auto refusal = [](const text::Json& json) -> std::string {
    try {
      static_cast<void>(read_choices(json));
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  for (const auto& [key, value, at] : whole.members()) {
    text::Json without = whole;
    without.erase(key);
    EXPECT_NE(refusal(without).find("\"" + key + "\""), std::string::npos) << key;
    text::Json wrong = whole;
    wrong[key] = "x";
    EXPECT_NE(refusal(wrong), "") << key;
  }
}

/// One rank draws its blueprint from the decision of another.
TEST(PlanChoices, DrawTheBlueprintOfTheDecision) {
  const test::TempDir directory;
  const std::filesystem::path rates = directory.path() / "rates.json";
  calibrate::save_rates(rates, test::quick_machine());
  config::Config asked = test::tiny_config(
      R"("vocab_size": 131, "hidden_size": 32, "num_layers": 2, "num_heads": 2)", true, "/run",
      {"zero_optimization.offload_optimizer.device=auto",
       "zero_optimization.offload_param.device=auto", "ballast.activations=auto",
       "ballast.device_bytes=1MiB", "ballast.host_bytes=1MiB", "ballast.compute_threads=1"});
  asked.batch.train_batch *= 2;
  std::vector<RunPlan> plans(2);
  test::as_ranks(2, [&](comm::Ranks& ranks) {
    plans[ranks.rank()] = plan_run(asked, &ranks, nullptr, {.rates = rates, .plan = {}});
  });
  const RunPlan& decided = plans[0];
  const engine::Blueprint& blueprint = decided.decision.blueprint;
  const engine::Blueprint& drawn = plans[1].decision.blueprint;
  EXPECT_TRUE(plans[0].request.has_value());
  EXPECT_FALSE(plans[1].request.has_value());
  EXPECT_FALSE(leaves_choices(decided.config));
  EXPECT_EQ(config::print(plans[1].config), config::print(decided.config));
  EXPECT_EQ(drawn.mesh.rank, 1U);
  EXPECT_EQ(drawn.options, blueprint.options);
  EXPECT_EQ(drawn.placement.blocks, blueprint.placement.blocks);
  EXPECT_EQ(drawn.schedule.steady.operations.size(), blueprint.schedule.steady.operations.size());
  for (const Tier tier : kTiers) {
    EXPECT_EQ(drawn.ledger.total(tier), blueprint.ledger.total(tier));
  }
  // The config alone reproduces both.
  const engine::Blueprint again = planner::draw_blueprint(
      translate(decided.config), blueprint.budgets,
      model::kernel_memory(blueprint.model, decided.config.type, blueprint.shape, "host", 1),
      {.data = 2, .rank = 1});
  EXPECT_EQ(again.options, drawn.options);
  EXPECT_EQ(again.placement.blocks, drawn.placement.blocks);
}

}  // namespace
}  // namespace ballast::setup::plan_choices_test
