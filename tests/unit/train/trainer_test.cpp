#include "ballast/train/trainer.h"

#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tests/support/temp_dir.h"
#include "tests/support/tiny_config.h"

namespace ballast::train::trainer_test {
namespace {

/// Keeps what a run reports of its matrix products.
struct Reports : Observer {
  void planned(const engine::Blueprint& /*blueprint*/, const std::string& /*device*/) override {}
  void started(const RunStart& start) override { peak = start.gemm_peak_flops; }
  void stepped(const StepReport& report) override {
    flops.push_back(report.gemm_share * peak * report.metrics.step_seconds);
    evaluations += report.metrics.eval_loss ? 1 : 0;
  }
  void finished(const RunSummary& /*summary*/) override {}

  double peak = 0.0;
  std::vector<double> flops;  ///< of a step, by its share, its time and the peak of the start
  int evaluations = 0;
};

TEST(GemmShare, OfEveryStepIsThatOfThePeakAtTheStart) {
  const test::TempDir directory;
  // With an evaluation after each step: the peak is not measured again.
  config::Config config = test::tiny_config(
      R"("vocab_size": 256, "hidden_size": 32, "num_layers": 1, "num_heads": 2)", false,
      directory.path() / "run", {"ballast.steps=4", "ballast.eval_every=1", "data.held_out=0.3"});
  config.data.tokens.clear();
  std::string text;
  for (int i = 0; i < 3000; ++i) text += static_cast<char>('a' + i * i % 23);
  config.data.text = {directory.write("text.txt", text)};
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

}  // namespace
}  // namespace ballast::train::trainer_test
