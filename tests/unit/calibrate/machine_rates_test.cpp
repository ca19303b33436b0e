#include "ballast/calibrate/machine_rates.h"

#include <cmath>
#include <fstream>
#include <optional>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/calibrate/calibrate.h"
#include "ballast/core/machine.h"
#include "ballast/setup/setup.h"
#include "ballast/setup/translate.h"

#include "tests/support/captured_log.h"
#include "tests/support/temp_dir.h"
#include "tests/support/tiny_config.h"
#include "tests/support/variable.h"

namespace ballast::calibrate::machine_rates_test {
namespace {

class MachineRates : public testing::Test {
 protected:
  MachineRates()
      : cache_("XDG_CACHE_HOME", directory_.path().c_str()),
        config_(test::tiny_config(
            R"("vocab_size": 131, "hidden_size": 32, "num_layers": 2, "num_heads": 2)", true,
            directory_.path())),
        run_(setup::translate(config_)),
        key_(calibration_key(run_)) {}

  /// Measures for this test, since other tests may have disturbed the rates of this machine.
  plan::Rates rates(bool recalibrate = false) {
    const auto measure = [this](const auto&, auto, const CalibrationStart& start) {
      start_ = start;
      Calibration measured = {.rates = start.known};
      measured.rates.name = "this machine";
      measured.rates.other_work = other_work_;
      measured.other_work.fill(other_work_);
      measured.spread.fill(spread_);
      measured.rates.spread = spread_;
      ++measurements_;
      if (!has_part(start.known, CalibrationPart::compute))
        measured.rates.forward = {{37.0, speed()}};
      if (!has_part(start.known, CalibrationPart::update))
        measured.rates.update_per_second = speed();
      if (!has_part(start.known, CalibrationPart::link)) measured.rates.upload_per_second = speed();
      return measured;
    };
    return machine_rates(run_, recalibrate, nullptr,
                         {.measure = measure,
                          .others_cpus = [this] { return others_cpus_; },
                          .now = [this] { return now_; }});
  }
  [[nodiscard]] double speed() const { return 1e9 * measurements_; }
  /// Simulates other work that uses a part of the CPUs, now and while this machine is measured.
  void work_beside(double share) {
    others_cpus_ = share * usable_cpus();
    other_work_ = share;
  }
  [[nodiscard]] bool measured() const { return log_.text().find("measuring") != std::string::npos; }

  test::TempDir directory_;
  test::Variable cache_;
  config::Config config_;
  engine::RunInputs run_;
  std::string key_;
  CalibrationStart start_;  ///< start of the latest measurement
  double others_cpus_ = 0.0;
  double other_work_ = 0.0;
  double spread_ = 0.0;
  double now_ = 1e9;
  int measurements_ = 0;
  test::CapturedLog log_;
};

TEST_F(MachineRates, AreMeasuredOnce) {
  const plan::Rates first = rates();
  EXPECT_TRUE(measured());
  EXPECT_EQ(first.name, "this machine");
  EXPECT_FALSE(first.forward.empty());
  const auto file = rates_cache_file(key_);
  EXPECT_EQ(file.parent_path(), directory_.path() / "ballast");
  EXPECT_EQ(rates(), first);
  const std::string log = log_.text();
  EXPECT_EQ(log.find("measuring"), log.rfind("measuring")) << log;
}

TEST_F(MachineRates, OfABusyMachineAreKeptUntilItIsQuiet) {
  work_beside(0.9);
  const plan::Rates busy = rates();
  EXPECT_TRUE(start_.busy);
  EXPECT_EQ(rates(), busy);
  EXPECT_EQ(measurements_, 1);
  work_beside(0.0);
  const plan::Rates quiet = rates();
  EXPECT_FALSE(start_.busy);
  EXPECT_FALSE(has_part(start_.known, CalibrationPart::compute));
  EXPECT_EQ(measurements_, 2);
  EXPECT_EQ(rates(), quiet);
  work_beside(0.9);
  EXPECT_EQ(rates(), quiet);
  EXPECT_EQ(measurements_, 2);
}

TEST_F(MachineRates, OfABusyMachineAreTheCachedOnesWithTheirAgeAndTheCost) {
  const plan::Rates quiet = rates();
  EXPECT_EQ(log_.text().find("other work"), std::string::npos) << log_.text();
  now_ += 3.5 * 3600.0;
  work_beside(1.0);
  EXPECT_EQ(rates(), quiet);
  const std::string log = log_.text();
  for (const std::string& words :
       {std::string("measured 3 hours ago"), std::string("about 2 times as long"),
        rates_cache_file(key_).string()}) {
    EXPECT_NE(log.find(words), std::string::npos) << log;
  }
}

TEST_F(MachineRates, SayHowMuchTheirRepetitionsDiffered) {
  spread_ = 0.121;
  EXPECT_EQ(rates().spread, spread_);
  spread_ = 0.05;
  run_.batch.shape.sequences = 7;  // the other parts keep their spread
  EXPECT_EQ(rates().spread, 0.121);
  work_beside(1.0);
  rates();
  const std::string words = "; repetitions of a measurement differed by up to 13%)";
  EXPECT_NE(log_.text().find(words), std::string::npos) << log_.text();
}

TEST_F(MachineRates, AreNeverReplacedByMoreDisturbedOnes) {
  const plan::Rates quiet = rates();
  work_beside(0.5);
  const plan::Rates asked = rates(true);
  EXPECT_FALSE(asked == quiet);
  EXPECT_NE(log_.text().find("which less other work disturbed"), std::string::npos);
  EXPECT_EQ(rates(), quiet);
  // Another config uses other parts.
  run_.batch.shape.sequences = 7;
  EXPECT_EQ(rates().update_per_second, quiet.update_per_second);
}

TEST_F(MachineRates, OnlyMissingPartsAreMeasured) {
  const plan::Rates first = rates();
  run_.batch.shape.sequences = 7;  // changes the kernels alone
  const plan::Rates second = rates();
  EXPECT_EQ(second.update_per_second, first.update_per_second);
  EXPECT_EQ(second.upload_per_second, first.upload_per_second);
  EXPECT_FALSE(second.forward == first.forward);
  EXPECT_NE(log_.text().find("(compute; the rest is known)"), std::string::npos) << log_.text();
}

TEST(KeptRates, AreReplacedUnlessLessOtherWorkDisturbedThem) {
  const auto with = [](double other_work) {
    plan::Rates rates;
    rates.other_work = other_work;
    return rates;
  };
  const plan::Rates quiet = with(0.02);
  const plan::Rates busy = with(0.6);
  EXPECT_TRUE(replaces(busy, nullptr));
  EXPECT_TRUE(replaces(quiet, &busy));
  EXPECT_TRUE(replaces(with(0.08), &quiet));  // both count as quiet, and this one is newer
  EXPECT_TRUE(replaces(with(0.5), &busy));
  EXPECT_FALSE(replaces(busy, &quiet));
  EXPECT_FALSE(replaces(with(0.7), &busy));
}

TEST(KeptRates, HaveAnAge) {
  EXPECT_EQ(describe_age(12.3), "12 s");
  EXPECT_EQ(describe_age(61.0), "1 minute");
  EXPECT_EQ(describe_age(2.0 * 3600.0), "2 hours");
  EXPECT_EQ(describe_age(9.9 * 86400.0), "9 days");
  EXPECT_EQ(describe_age(-5.0), "0 s");  // the clock was set back
}

TEST_F(MachineRates, AreTakenFromTheFile) {
  plan::Rates known;
  known.name = key_;
  known.forward = {{1.0, 2.0}};
  known.update_per_second = 5e9;
  known.upload_per_second = 6e9;
  std::filesystem::create_directories(directory_.path() / "ballast");
  save_rates(rates_cache_file(key_), known);
  known.name = "this machine";
  EXPECT_EQ(rates(), known);
  EXPECT_FALSE(measured());
  EXPECT_FALSE(rates(true) == known);
  EXPECT_TRUE(measured());
}

TEST_F(MachineRates, AreMeasuredAgainIfTheFileIsUnusable) {
  const auto file = rates_cache_file(key_);
  directory_.write("ballast/" + file.filename().string(), "{\"nam");
  const plan::Rates measured_now = rates();
  EXPECT_TRUE(measured());
  EXPECT_EQ(rates(), measured_now);  // replaced by a new measurement
}

TEST_F(MachineRates, AreMeasuredAnewForAnotherKey) {
  plan::Rates other;
  other.name = "another machine";
  other.forward = {{1.0, 2.0}};
  std::filesystem::create_directories(directory_.path() / "ballast");
  save_rates(rates_cache_file(key_), other);
  EXPECT_NE(rates().forward, other.forward);
  EXPECT_TRUE(measured());
}

TEST_F(MachineRates, DoWithoutACache) {
  directory_.write("file", "");
  const test::Variable nowhere("XDG_CACHE_HOME", (directory_.path() / "file").c_str());
  EXPECT_FALSE(rates().forward.empty());
  EXPECT_NE(log_.text().find("cannot cache"), std::string::npos) << log_.text();
}

std::vector<MeasuredStep> steps_of(std::size_t count, double seconds, double compute) {
  MeasuredStep step = {.seconds = seconds};
  step.busy_seconds[static_cast<std::size_t>(plan::Lane::compute)] = compute;
  return std::vector<MeasuredStep>(count, step);
}

TEST(TypicalStep, IsTheMedianOfEnoughSteps) {
  EXPECT_FALSE(typical_step({}));
  EXPECT_FALSE(typical_step(steps_of(kEnoughSteps - 1, 1.0, 0.5)));
  auto steps = steps_of(kEnoughSteps, 1.0, 0.5);
  steps.front().seconds = 9.0;
  const auto typical = typical_step(steps);
  ASSERT_TRUE(typical);
  EXPECT_EQ(typical->seconds, 1.0);
  EXPECT_EQ(typical->busy_seconds[static_cast<std::size_t>(plan::Lane::compute)], 0.5);
  EXPECT_EQ(typical->busy_seconds[static_cast<std::size_t>(plan::Lane::fetch)], 0.0);
}

TEST(TypicalStep, IsNotThatOfADisturbedRun) {
  auto steps = steps_of(kEnoughSteps, 1.0, 0.5);
  for (std::size_t i = 0; i < steps.size() / 2; ++i) steps[i].seconds = 1.3;
  EXPECT_FALSE(typical_step(steps));
}

TEST(CorrectedRates, AreDividedByMeasuredOverPredictedTime) {
  using plan::Lane;
  const auto at = [](auto& lanes, Lane lane) -> double& {
    return lanes.at(static_cast<std::size_t>(lane));
  };
  plan::Rates rates;
  rates.forward = {{64.0, 100e9}, {128.0, 200e9}};
  rates.head = {{64.0, 300e9}};
  rates.device_memory_per_second = 10e9;
  rates.update_per_second = 5e9;
  rates.upload_per_second = 4e9;
  rates.read_per_second = 3e9;
  rates.write_per_second = 2e9;
  rates.mixed_per_second = 4e9;
  plan::Prediction predicted;
  predicted.step_seconds = 1.0;
  MeasuredStep measured = {.seconds = 1.25};
  const auto lane = [&](Lane name, double expected, double seen) {
    at(predicted.busy_seconds, name) = expected;
    at(measured.busy_seconds, name) = seen;
  };
  lane(Lane::compute, 0.8, 1.0);
  lane(Lane::update, 0.2, 0.1);
  lane(Lane::upload, 0.005, 0.006);  // negligible
  lane(Lane::fetch, 0.1, 0.16);
  lane(Lane::writeback, 0.1, 1.7);  // too large a difference
  const plan::Rates better = corrected(rates, predicted, measured);
  const plan::Curve forward = {{64.0, 80e9}, {128.0, 160e9}};
  EXPECT_EQ(better.forward, forward);
  EXPECT_TRUE(better.backward.empty());
  EXPECT_DOUBLE_EQ(better.head.front().flops_per_second, 240e9);
  EXPECT_DOUBLE_EQ(better.device_memory_per_second, 8e9);
  EXPECT_DOUBLE_EQ(better.update_per_second, 10e9);
  EXPECT_EQ(better.upload_per_second, 4e9);
  EXPECT_DOUBLE_EQ(better.read_per_second, 3e9 / 1.6);
  EXPECT_EQ(better.write_per_second, 2e9);
  EXPECT_DOUBLE_EQ(better.mixed_per_second, 4e9 / std::sqrt(1.6));
}

/// A run of the fixture's config, and cached rates for it.
class RunPredictions : public MachineRates {
 protected:
  RunPredictions()
      : blueprint_(planner::draw_blueprint(
            run_, {64 * kMiB, 64 * kMiB},
            {.workspace = kMiB,
             .intermediates = std::vector<Bytes>(run_.model.blocks.size(), kMiB)})) {
    known_.name = key_;
    known_.forward = {{1.0, 1e9}};
    known_.backward = known_.forward;
    known_.head = known_.forward;
    known_.device_memory_per_second = 1e9;
    known_.update_per_second = 1e9;
    known_.upload_per_second = 1e9;
    known_.offload_per_second = 1e9;
    std::filesystem::create_directories(directory_.path() / "ballast");
  }

  void keep() { save_rates(rates_cache_file(key_), known_); }
  [[nodiscard]] std::optional<RunPrediction> prediction() const {
    return RunPrediction::find(setup::translate(config_), blueprint_);
  }
  /// A step in which every lane takes `factor` times as long as predicted.
  [[nodiscard]] MeasuredStep slower(double factor) const {
    const auto simulated = plan::simulate(blueprint_.schedule, known_);
    MeasuredStep step = {.seconds = factor * simulated.step_seconds};
    for (std::size_t lane = 0; lane < plan::kLaneCount; ++lane) {
      step.busy_seconds[lane] = factor * simulated.busy_seconds[lane];
    }
    return step;
  }

  engine::Blueprint blueprint_;
  plan::Rates known_;
};

TEST_F(RunPredictions, UseOnlyCachedRates) {
  EXPECT_FALSE(prediction());
  keep();
  ASSERT_TRUE(prediction());
  EXPECT_GT(prediction()->step_seconds(), 0.0);
  known_.head.clear();
  keep();
  EXPECT_FALSE(prediction());
  EXPECT_FALSE(measured());
}

TEST_F(RunPredictions, AreNotMadeOfRunsThatAreSlowedDown) {
  keep();
  config_.ballast.serial = true;
  EXPECT_FALSE(prediction());
  config_.ballast.serial = false;
  config_.ballast.delay_seed = 1;
  EXPECT_FALSE(prediction());
}

TEST_F(RunPredictions, CorrectTheRatesSoThatTheNextOneIsRight) {
  keep();
  const MeasuredStep step = slower(1.3);
  EXPECT_TRUE(prediction()->correct(step, 0.0));
  EXPECT_EQ(load_rates(rates_cache_file(key_)).corrections, 1U);
  EXPECT_EQ(rates().corrections, 1U);
  EXPECT_NEAR(prediction()->step_seconds(), step.seconds, 0.01 * step.seconds);
  EXPECT_FALSE(prediction()->correct(step, 0.0));
}

TEST_F(RunPredictions, KeepRatesThatAreCloseEnough) {
  keep();
  EXPECT_FALSE(prediction()->correct(slower(1.04), 0.0));
  EXPECT_EQ(load_rates(rates_cache_file(key_)).corrections, 0U);
}

TEST_F(RunPredictions, IgnoreStepsDuringOtherWork) {
  keep();
  EXPECT_FALSE(prediction()->correct(slower(1.3), 0.3));
  EXPECT_EQ(load_rates(rates_cache_file(key_)).corrections, 0U);
}

TEST(RatesCacheFile, FollowsTheEnvironment) {
  const test::Variable no_cache("XDG_CACHE_HOME", nullptr);
  {
    const test::Variable home("HOME", "/someone");
    EXPECT_EQ(rates_cache_file("a").parent_path(), "/someone/.cache/ballast");
    EXPECT_NE(rates_cache_file("a"), rates_cache_file("b"));
  }
  const test::Variable no_home("HOME", nullptr);
  EXPECT_TRUE(rates_cache_file("a").empty());
}

}  // namespace
}  // namespace ballast::calibrate::machine_rates_test
