#include <filesystem>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/calibrate/machine_rates.h"
#include "ballast/core/error.h"
#include "ballast/setup/forecast.h"
#include "ballast/setup/run_plan.h"
#include "ballast/text/files.h"
#include "ballast/text/json.h"

#include "tests/support/captured_log.h"
#include "tests/support/temp_dir.h"
#include "tests/support/tiny_config.h"

namespace ballast::setup::saved_plan_test {
namespace {

const char* const kModel =
    R"("vocab_size": 131, "hidden_size": 32, "num_layers": 2, "num_heads": 2)";

plan::Rates some_rates() {
  plan::Rates rates;
  rates.name = "some machine";
  rates.forward = rates.backward = rates.head = {{37.0, 1e10}};
  rates.device_memory_per_second = 1e10;
  rates.shared_cores = 4;  // the host device computes
  rates.compute_threads = rates.update_threads = 1;
  rates.update_per_second = 1e9;
  rates.upload_per_second = rates.offload_per_second = 1e9;
  rates.read_per_second = rates.write_per_second = rates.mixed_per_second = 1e8;
  return rates;
}

/// A saved plan of a config whose states fit only on NVMe.
class SavedPlan : public testing::Test {
 protected:
  SavedPlan() : file_(directory_.path() / "plan.json") {
    save_plan(file_, plan_rule(true), config(), forecast_);
  }

  static config::Config config(std::vector<std::string> more = {}) {
    for (const char* open :
         {"zero_optimization.offload_optimizer.device=auto",
          "zero_optimization.offload_param.device=auto", "ballast.activations=auto",
          "ballast.order=auto", "ballast.compute_threads=1", "ballast.device_bytes=1MiB",
          "ballast.host_bytes=1MiB"}) {
      more.insert(more.begin(), open);
    }
    return test::tiny_config(kModel, true, "/tmp", more);
  }

  /// The one line that refuses the plan for a run of `asked`.
  [[nodiscard]] std::string refusal(const config::Config& asked, std::uint32_t world = 1) const {
    try {
      read_plan(file_, asked, world);
    } catch (const Error& error) {
      EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos);
      return error.what();
    }
    return "";
  }

  test::TempDir directory_;
  plan::Rates rates_ = some_rates();
  std::filesystem::path file_;
  /// Made once, since it takes most of the tests' time.
  static inline const Forecast forecast_ = make_forecast(config({}), some_rates());
};

TEST_F(SavedPlan, IsThePlanOfTheRun) {
  const test::CapturedLog log;
  const RunPlan run = plan_run(config(), nullptr, nullptr, {.rates = {}, .plan = file_});
  EXPECT_EQ(run.decision.blueprint.placement.blocks, forecast_.decision.blueprint.placement.blocks);
  EXPECT_EQ(config::print(run.config), config::print(forecast_.config));
  EXPECT_EQ(run.given_rates, rates_);
  EXPECT_EQ(log.text().find("measuring"), std::string::npos);
}

TEST_F(SavedPlan, OfAnEarlierVersionIsReadFromItsKeys) {
  text::Json file = text::parse_json(text::read_settings(file_, "plan"), "test");
  ASSERT_TRUE(file.erase("choices"));
  directory_.write("plan.json", file.pretty(2));
  const RunPlan run = plan_run(config(), nullptr, nullptr, {.rates = {}, .plan = file_});
  EXPECT_EQ(run.decision.blueprint.placement.blocks, forecast_.decision.blueprint.placement.blocks);
  EXPECT_EQ(run.decision.blueprint.options, forecast_.decision.blueprint.options);
  EXPECT_EQ(config::print(run.config), config::print(forecast_.config));
}

TEST_F(SavedPlan, IsRefusedIfItsChoicesAreDamaged) {
  text::Json file = text::parse_json(text::read_settings(file_, "plan"), "test");
  (*file.find("choices"))["order"] = "sideways";
  directory_.write("plan.json", file.pretty(2));
  EXPECT_NE(refusal(config()).find("\"order\""), std::string::npos) << refusal(config());
}

TEST_F(SavedPlan, IsThatOfARunWithTheSameRates) {
  const std::filesystem::path rates = directory_.path() / "rates.json";
  calibrate::save_rates(rates, rates_);
  const test::CapturedLog log;
  const RunPlan run = plan_run(config(), nullptr, nullptr, {.rates = rates, .plan = {}});
  EXPECT_EQ(run.decision.blueprint.placement.blocks, forecast_.decision.blueprint.placement.blocks);
  EXPECT_EQ(run.decision.prediction.step_seconds, forecast_.decision.prediction.step_seconds);
  EXPECT_EQ(log.text().find("measuring"), std::string::npos);
}

TEST_F(SavedPlan, FitsARunWithOtherDataStepsAndRates) {
  EXPECT_EQ(refusal(config({"ballast.steps=77", "optimizer.params.lr=0.5", "ballast.out=/elsewhere",
                            "data.tokens=[\"other.bin\"]", "ballast.seed=5"})),
            "");
}

TEST_F(SavedPlan, IsRefusedForAnotherConfigOrNumberOfRanks) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"model.hidden_size=64", "model.hidden_size was 32 for it and is 64 now"},
      {"data.sequence_length=36", "data.sequence_length was 37 for it and is 36 now"},
      {"ballast.device_bytes=2MiB", "ballast.device_bytes"},
      {"ballast.activations=host", "ballast.activations was \"auto\""},
      {"optimizer.type=Lion", "optimizer.type"}};
  for (const auto& [change, words] : cases) {
    const std::string line = refusal(config({change}));
    EXPECT_NE(line.find(words), std::string::npos) << change << ": " << line;
    EXPECT_NE(line.find("ballast plan CONFIG --save"), std::string::npos) << line;
  }
  EXPECT_NE(refusal(config(), 2).find("it is for 1 rank, but this run has 2"), std::string::npos);
}

TEST_F(SavedPlan, FitsEachKindOfDataWithOtherFiles) {
  text::Json file = text::parse_json(text::read_settings(file_, "plan"), "test");
  text::Json& data = *file.find("config")->find("data");
  data["pairs"] = text::Json::array({"first.safetensors"});
  directory_.write("plan.json", file.pretty(2));
  EXPECT_NE(refusal(config()).find("for preference pairs"), std::string::npos) << refusal(config());
  data["pairs"] = text::Json::array();
  data["as_is"] = true;
  directory_.write("plan.json", file.pretty(2));
  EXPECT_EQ(refusal(config()), "");
}

TEST_F(SavedPlan, IsRefusedForAnotherDevice) {
  Forecast gpu = forecast_;
  gpu.rates.shared_cores = 0;
  save_plan(file_, plan_rule(true), config(), gpu);
  EXPECT_NE(refusal(config()).find("device cuda, but this run computes on host"),
            std::string::npos);
}

TEST_F(SavedPlan, IsRefusedIfTheMachineLacksTheMemory) {
  Forecast large = forecast_;
  large.decision.blueprint.ledger.add(Tier::host, "more", Bytes{1} << 50U);
  save_plan(file_, plan_rule(true), config(), large);
  EXPECT_NE(refusal(config()).find("TiB of memory"), std::string::npos) << refusal(config());
}

TEST_F(SavedPlan, IsNotAnotherKindOfFile) {
  EXPECT_NO_THROW(text::check_output(file_, plan_rule(false)));
  EXPECT_NO_THROW(text::check_output(directory_.path() / "new.json", plan_rule(false)));
  for (const char* text :
       {"{}", "[1]", "{\"ballast_plan\": 2}", "{\"ballast_plan\": 1}", "{\"nam"}) {
    directory_.write("plan.json", text);
    EXPECT_NE(refusal(config()), "") << text;
  }
  directory_.write("plan.json", "{\"model\": {}}");
  EXPECT_THROW(text::check_output(file_, plan_rule(false)), Error);
}

}  // namespace
}  // namespace ballast::setup::saved_plan_test
