#include "ballast/train/trainer.h"

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "src/checkpoint/checkpoint.h"
#include "src/data/training_data.h"
#include "src/train/run_measures.h"
#include "tests/support/captured_log.h"
#include "tests/support/expect_error.h"
#include "tests/support/temp_dir.h"
#include "tests/support/tiny_config.h"
#include "tests/support/tiny_training.h"
#include "tests/support/variable.h"

namespace ballast::train::trainer_test {
namespace {

/// Keeps the reports of a run on its matrix products.
struct Reports : Observer {
  void planned(const engine::Blueprint& /*blueprint*/, const std::string& /*device*/) override {}
  void started(const RunStart& start) override { peak = start.gemm_peak_flops; }
  void stepped(const StepReport& report) override {
    flops.push_back(report.gemm_share * peak * report.metrics.step_seconds);
    evaluations += report.metrics.eval_loss ? 1 : 0;
    rows.push_back(report.metrics);
  }
  void finished(const RunSummary& /*summary*/) override {}

  double peak = 0.0;
  std::vector<double> flops;  ///< FLOPs of a step, from its share, its time and the peak at the
                              ///< start
  int evaluations = 0;
  std::vector<StepMetrics> rows;
};

/// A small run on a text, with the run directory `run` in `directory`.
config::Config text_config(const test::TempDir& directory, const std::string& run,
                           std::vector<std::string> overrides) {
  overrides.emplace_back("data.held_out=0.3");
  config::Config config =
      test::tiny_config(R"("vocab_size": 256, "hidden_size": 32, "num_layers": 1, "num_heads": 2)",
                        false, directory.path() / run, overrides);
  config.data.tokens.clear();
  std::string text;
  for (int i = 0; i < 3000; ++i) text += static_cast<char>('a' + i * i % 23);
  config.data.text = {directory.write("text.txt", text)};
  return config;
}

TEST(GemmShare, IsRelativeToThePeakMeasuredAtTheStart) {
  const test::TempDir directory;
  // Evaluates after each step. The peak is not measured again.
  const config::Config config =
      text_config(directory, "run", {"ballast.steps=4", "ballast.eval_every=1"});
  Reports reports;
  train(config, reports, nullptr);
  EXPECT_GT(reports.peak, 0.0);
  EXPECT_EQ(reports.evaluations, 4);
  ASSERT_EQ(reports.flops.size(), 4U);
  EXPECT_GT(reports.flops.front(), 0.0);
  for (const double flops : reports.flops) {
    EXPECT_NEAR(flops, reports.flops.front(), 1e-9 * reports.flops.front());
  }
}

TEST(StopAtLoss, EndsTheRunAsAfterItsLastStep) {
  const test::TempDir directory;
  const auto run = [&](double loss) {
    Reports reports;
    const std::string name = fmt::format("run-{}", loss);
    const Ending ending =
        train(text_config(directory, name,
                          {"ballast.steps=6", "ballast.eval_every=2", "ballast.checkpoint_every=50",
                           fmt::format("ballast.stop_at_loss={}", loss)}),
              reports, nullptr);
    EXPECT_EQ(ending, Ending::done);
    const std::size_t steps = reports.rows.size();
    EXPECT_TRUE(std::filesystem::exists(directory.path() / name / "weights"));
    EXPECT_TRUE(std::filesystem::exists(directory.path() / name / "checkpoints" /
                                        fmt::format("step-{}", steps)));
    return steps;
  };
  EXPECT_EQ(run(0.0), 6U);
  EXPECT_EQ(run(0.01), 6U);
  EXPECT_EQ(run(100.0), 2U);
}

/// Expects that no lane was busy or waiting for longer than its step took.
void expect_shares(const Reports& reports, const std::string& run) {
  for (const StepMetrics& row : reports.rows) {
    double busy = 0.0;
    for (const auto& [lane, seconds] : row.busy_seconds) {
      const double all = seconds + row.stalled_seconds.at(lane);
      EXPECT_GE(seconds, 0.0) << run << ", step " << row.step << ", " << lane;
      EXPECT_LE(all, row.step_seconds * (1 + 1e-9)) << run << ", step " << row.step << ", " << lane;
      busy += seconds;
    }
    EXPECT_GT(busy, 0.0) << run << ", step " << row.step;
  }
}

TEST(LaneShares, AreOfTheStepAloneWithEvaluationsCheckpointsAndAfterAResume) {
  const test::TempDir directory;
  for (const std::string tier : {"cpu", "nvme"}) {
    std::vector<std::string> overrides = {
        "ballast.steps=8",           "ballast.eval_every=2",
        "ballast.eval_batches=50",   "ballast.checkpoint_every=3",
        "ballast.checkpoint_keep=9", "zero_optimization.offload_optimizer.device=" + tier};
    Reports whole;
    train(text_config(directory, tier, overrides), whole, nullptr);
    EXPECT_EQ(whole.evaluations, 4);
    ASSERT_EQ(whole.rows.size(), 8U);
    expect_shares(whole, tier);
    Reports rest;
    train(text_config(directory, tier + "-rest", overrides), rest, nullptr,
          {.resume = directory.path() / tier / "checkpoints/step-3"});
    ASSERT_EQ(rest.rows.size(), 5U);
    expect_shares(rest, tier + ", resumed");
    // An evaluation uploads its batches, which do not belong to the next step.
    EXPECT_LE(whole.rows[4].bytes.at("upload"), whole.rows[3].bytes.at("upload"));
  }
}

TEST(GemmShare, IsNeverAboveOne) {
  ProvenPeak peak(100.0);  // FLOP/s, measured during other work
  EXPECT_DOUBLE_EQ(peak.share_of(50.0), 0.5);
  EXPECT_DOUBLE_EQ(peak.share_of(341.0), 1.0);
  EXPECT_DOUBLE_EQ(peak.share_of(170.5), 0.5);
  EXPECT_DOUBLE_EQ(peak.value(), 341.0);
  EXPECT_EQ(peak.share_of(0.0), 0.0);
  EXPECT_EQ(ProvenPeak(0.0).share_of(5.0), 0.0);
}

/// Losses and scales of steps, -1 where they were skipped.
using Steps = std::vector<std::pair<double, double>>;
Steps steps_of(const Reports& reports, std::uint64_t after) {
  Steps steps;
  for (const StepMetrics& row : reports.rows) {
    if (row.step <= after) continue;
    steps.emplace_back(row.loss.value(), row.skipped ? -1.0 : row.loss_scale.value());
  }
  return steps;
}

TEST(LossScale, OfAResumedRunIsThatOfAnUninterruptedRun) {
  const test::TempDir directory;
  std::vector<std::string> overrides = test::kFp16;
  overrides.insert(overrides.end(), {"ballast.steps=9", "ballast.checkpoint_every=3",
                                     "ballast.checkpoint_keep=9", "ballast.max_skipped_steps=1"});
  Reports whole;
  train(text_config(directory, "run", overrides), whole, nullptr);
  const Steps all = steps_of(whole, 0);
  ASSERT_EQ(all.size(), 9U);
  EXPECT_EQ(all.front().second, -1.0);
  EXPECT_GT(all.back().second, 0.0);
  // The states of the scale differ: in the middle of a window, and at its end.
  for (const std::uint64_t step : {3, 6}) {
    Reports rest;
    train(text_config(directory, "from" + std::to_string(step), overrides), rest, nullptr,
          {.resume = directory.path() / "run/checkpoints" / ("step-" + std::to_string(step))});
    EXPECT_EQ(steps_of(rest, 0), steps_of(whole, step)) << "after step " << step;
  }
}

TEST(LossScale, TooSmallAScaleEndsTheRunAfterTheRowOfItsStep) {
  const test::TempDir directory;
  std::vector<std::string> overrides = test::kFp16;
  overrides.insert(overrides.end(),
                   {"ballast.steps=9", "fp16.initial_scale_power=41", "fp16.min_loss_scale=1e12"});
  Reports reports;
  test::expect_error(ErrorCategory::numeric,
                     {"step 3: gradients are not finite in fp16, and the loss scale 1"},
                     [&] { train(text_config(directory, "run", overrides), reports, nullptr); });
  EXPECT_EQ(reports.rows.size(), 3U);
}

/// The line that a resume prints if its bits may differ; "" if it prints none. The rest of a run
/// that stopped after its first step is trained with one thread.
std::string line_about_arithmetic(const test::TempDir& directory, const std::string& run) {
  const test::CapturedLog log;
  Reports rest;
  train(text_config(directory, run, {"ballast.steps=2", "ballast.compute_threads=1"}), rest,
        nullptr, {.resume = directory.path() / "run/checkpoints/step-1"});
  EXPECT_EQ(rest.rows.size(), 1U);
  const std::string text = log.text();
  return text.find("may differ in their last bits") == std::string::npos ? "" : text;
}

TEST(Resume, SaysThatOtherKernelsMayHaveOtherBits) {
  const test::TempDir directory;
  Reports reports;
  train(text_config(directory, "run",
                    {"ballast.steps=2", "ballast.checkpoint_every=1", "ballast.checkpoint_keep=2",
                     "ballast.compute_threads=1"}),
        reports, nullptr);
  EXPECT_EQ(line_about_arithmetic(directory, "same"), "");
  const test::Variable slower("BALLAST_ISA_MASK", "scalar");
  const std::string line = line_about_arithmetic(directory, "other");
  EXPECT_NE(line.find("step-1: computed with 1 rank, "), std::string::npos) << line;
  EXPECT_NE(line.find("this run computes with 1 rank, scalar kernels"), std::string::npos) << line;
}

TEST(Resume, KnowsHowMomentsInEightBitsWereRounded) {
  const test::TempDir directory;
  const auto arithmetic = [&](const std::string& states) {
    Reports reports;
    train(text_config(directory, states,
                      {"ballast.steps=1", "ballast.checkpoint_every=1",
                       "ballast.optimizer_states=" + states}),
          reports, nullptr);
    const auto folder = directory.path() / states / "checkpoints/step-1";
    return checkpoint::Checkpoint(folder).facts().arithmetic;
  };
  EXPECT_NE(arithmetic("8bit").find(", 8-bit moments rounded by rule "), std::string::npos);
  EXPECT_EQ(arithmetic("fp32").find(", 8-bit moments"), std::string::npos);
}

TEST(DataContent, DependsOnBytesNotPaths) {
  const test::TempDir directory;
  const auto content = [&](const std::vector<std::string>& texts, const std::string& folder) {
    std::vector<std::filesystem::path> files;
    files.reserve(texts.size());
    for (const std::string& text : texts) {
      files.push_back(directory.write(folder + "/" + std::to_string(files.size()), text));
    }
    return data::describe_content(files, 7);
  };
  const std::string text(100'000, 'a');
  const std::string expected = content({text, "b"}, "here");
  EXPECT_TRUE(expected.starts_with("2 files, 97.7 KiB, 7 tokens, XXH3 ")) << expected;
  EXPECT_EQ(content({text, "b"}, "there"), expected);
  EXPECT_NE(content({text, "c"}, "changed"), expected);
  EXPECT_NE(content({"b", text}, "exchanged"), expected);
  EXPECT_NE(content({text + "b", ""}, "cut elsewhere"), expected);
  // Too large to be read as a whole.
  std::string large(20 << 20, 'a');
  const std::string sampled = content({large}, "large");
  large.back() = 'b';
  EXPECT_NE(content({large}, "large"), sampled);
  large.back() = 'a';
  large.front() = 'b';
  EXPECT_NE(content({large}, "large"), sampled);
}

}  // namespace
}  // namespace ballast::train::trainer_test
