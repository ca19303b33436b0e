// Plans of a rank with several devices.

#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/setup/forecast.h"
#include "ballast/setup/setup.h"
#include "ballast/setup/translate.h"
#include "ballast/text/json.h"

#include "tests/unit/planner/asked.h"

namespace ballast::planner::rank_devices_plan_test {
namespace {

using test::Asked;

/// Everything is on the device, so its size follows from the number of devices alone.
const std::vector<std::string> kOnDevice = {"zero_optimization.offload_optimizer.device=none",
                                            "zero_optimization.offload_param.device=none",
                                            "ballast.activations=device",
                                            "train_micro_batch_size_per_gpu=2",
                                            "gradient_accumulation_steps=8",
                                            "model.vocabulary_tiles=4"};

/// On a machine whose rank has 4 devices.
PlanRequest request_with(const std::string& setting, memory::Budgets budgets,
                         std::vector<std::string> settings = kOnDevice) {
  settings.push_back(setting);
  PlanRequest request = Asked(settings, budgets).request();
  request.devices = 4;
  // A head in tiles also needs rows.
  request.kernels = [model = request.run.model](model::MicroBatchShape shape) {
    model::KernelSizes sizes = test::kernels(model, shape);
    sizes.rows = shape.tokens() * 128;
    return sizes;
  };
  return request;
}

std::string refusal_of(const PlanRequest& request) {
  try {
    require_fit(request);
  } catch (const Error& error) {
    EXPECT_EQ(error.category(), ErrorCategory::memory);
    return error.what();
  }
  return "";
}

Bytes device_bytes(const std::string& setting) {
  return decide(request_with(setting, test::kRoomy)).blueprint.ledger.needed(Tier::device);
}

TEST(RankDevicesPlan, AutoFindsTheDevicesThatARunNeeds) {
  const Bytes one = device_bytes("pipeline.stages=1");
  const Bytes two = device_bytes("pipeline.stages=2");
  ASSERT_LT(two, one / 4 * 3) << "blocks are dealt to both";
  PlanRequest request = request_with("pipeline.stages=auto", {two, test::kRoomy.host});
  request.devices = 2;
  EXPECT_NO_THROW(require_fit(request));
  const Decision decision = decide(request);
  EXPECT_EQ(decision.blueprint.problem.devices, 2U);
  EXPECT_TRUE(decision.blueprint.ledger.fits(request.budgets));
  request.devices = 1;
  EXPECT_THROW(decide(request), Error);
  EXPECT_THROW(require_fit(request), Error);
}

TEST(RankDevicesPlan, AutoTakesTheFastestNumber) {
  const Decision chosen = decide(request_with("pipeline.stages=auto", test::kRoomy));
  std::uint32_t fastest = 0;
  double least = std::numeric_limits<double>::max();
  for (const std::uint32_t devices : {1U, 2U, 4U}) {
    const std::string setting = "pipeline.stages=" + std::to_string(devices);
    const double seconds = decide(request_with(setting, test::kRoomy)).prediction.step_seconds;
    if (seconds < least) fastest = devices;
    least = std::min(least, seconds);
  }
  EXPECT_EQ(chosen.blueprint.problem.devices, fastest);
  EXPECT_EQ(chosen.prediction.step_seconds, least);
  EXPECT_GT(fastest, 1U);
}

TEST(RankDevicesPlan, ARefusalNamesTheDeviceAndUnusedOnes) {
  const Bytes two = device_bytes("pipeline.stages=2");
  const Bytes four = device_bytes("pipeline.stages=4");
  const std::string text = refusal_of(request_with("pipeline.stages=2", {four, kGiB}));
  EXPECT_NE(text.find(" too small for device 0 (one of 2): the smallest plan needs "),
            std::string::npos)
      << text;
  EXPECT_NE(text.find("it would fit with --set pipeline.stages=4, or "), std::string::npos) << text;
  const std::string single = refusal_of(request_with("pipeline.stages=1", {two, kGiB}));
  EXPECT_EQ(single.find(" for device "), std::string::npos) << single;
  EXPECT_NE(single.find("it would fit with --set pipeline.stages=2, "), std::string::npos)
      << single;
}

TEST(RankDevicesPlan, ChoicesAndTheDecidedConfigGiveTheSamePlan) {
  std::vector<std::string> settings = {"model.vocabulary_tiles=4"};
  const PlanRequest request = request_with("pipeline.stages=3", {8 * kMiB, 12 * kMiB}, settings);
  const Decision decision = decide(request);
  const setup::PlanChoices received = setup::read_choices(
      text::parse_json(setup::choices_json(setup::choices_of(decision.blueprint)).compact(), "it"));
  EXPECT_EQ(received.devices, 3U);
  settings.emplace_back("pipeline.stages=3");
  const std::string printed = config::print(Asked(settings).settled(decision));
  const config::Config settled = config::parse(printed, "/", "settled", {});
  EXPECT_EQ(settled.pipeline.stages, 3U);
  const engine::Blueprint drawn =
      draw_blueprint(setup::translate(settled), request.budgets,
                     request.kernels({settled.batch.micro_batch, settled.data.sequence_length}));
  EXPECT_EQ(drawn.placement.blocks, decision.blueprint.placement.blocks);
  for (std::uint8_t device = 0; device < 3; ++device) {
    EXPECT_EQ(drawn.ledger.device_total(device), decision.blueprint.ledger.device_total(device));
  }
}

TEST(RankDevicesPlan, OnlyLayerMajorOrderIsTried) {
  std::vector<std::string> settings = {"model.vocabulary_tiles=4"};
  const Decision decision =
      decide(request_with("pipeline.stages=2", test::kRoomy, std::move(settings)));
  EXPECT_EQ(decision.blueprint.options.order, step::Order::layer_major);
}

TEST(RankDevicesPlan, TooFewMicroBatchesCauseAWarning) {
  step::Problem problem;
  problem.micro_batches = 2;
  problem.devices = 2;
  EXPECT_EQ(describe_idle_devices(problem), "");
  problem.devices = 4;
  EXPECT_EQ(describe_idle_devices(problem),
            "2 micro-batches per step cannot keep 4 devices busy at once; give at least 4 "
            "(gradient_accumulation_steps)");
}

TEST(RankDevicesPlan, ListedDevicesAreCutToTheChosenNumber) {
  const auto devices_of = [](const config::Config& config, const plan::Rates& rates) {
    return setup::request_for(config, rates, 1, nullptr).devices;
  };
  const config::Config config =
      test::make_config({"ballast.devices=[3, 1, 1, 0]", "pipeline.stages=auto"});
  EXPECT_EQ(devices_of(config, {}), 4U);
  const config::Config two = setup::with_sizes(config, {.micro_batch = 1, .devices = 2}, 1);
  EXPECT_EQ(two.ballast.devices, (std::vector<std::uint32_t>{3, 1}));
  EXPECT_EQ(two.pipeline.stages, 2U);
  plan::Rates rates;
  rates.devices = 6;
  EXPECT_EQ(devices_of(test::make_config({}), rates), 6U);
  EXPECT_EQ(devices_of(test::make_config({}), {}), 1U) << "there is one host device";
}

}  // namespace
}  // namespace ballast::planner::rank_devices_plan_test
