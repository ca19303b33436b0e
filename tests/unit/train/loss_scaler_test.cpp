#include <fstream>
#include <string>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "ballast/core/error.h"

#include "src/train/step_rules.h"
#include "tests/support/expect_error.h"
#include "tests/support/fixtures.h"

namespace ballast::train::loss_scaler_test {
namespace {

config::Config config_of(const nlohmann::json& options) {
  config::Config config;
  config.type = DType::f16;
  config::Fp16Section& f = config.fp16;
  f.initial_scale_power = options["initial_scale_power"];
  f.loss_scale_window = options["loss_scale_window"];
  f.hysteresis = options["hysteresis"];
  f.consecutive_hysteresis = options.value("consecutive_hysteresis", false);
  f.min_loss_scale = options.value("min_loss_scale", 1.0);
  return config;
}

/// tests/data/make_loss_scale_fixture.py has the program. Each scaler is rebuilt from its state
/// once, as after a checkpoint.
TEST(LossScaler, ScalesAreThoseOfDeepSpeed) {
  nlohmann::json cases;
  std::ifstream(test::fixture("loss_scales.json")) >> cases;
  ASSERT_GT(cases.size(), 10U);
  for (const nlohmann::json& of : cases) {
    SCOPED_TRACE(of["options"].dump());
    const config::Config config = config_of(of["options"]);
    LossScaler scaler(config);
    const std::size_t steps = of["overflows"].size();
    for (std::size_t step = 0; step < steps; ++step) {
      EXPECT_EQ(scaler.scale(), of["scales"][step].get<double>()) << "step " << step;
      if (step == steps / 2) {
        const auto state = scaler.state();
        scaler = LossScaler(config);
        scaler.restart(state);
      }
      const bool overflow = of["overflows"][step] == 1;
      if (step + 1 == steps && of["ends"] == true) {
        EXPECT_THROW(scaler.after_step(step, overflow), Error);
      } else {
        scaler.after_step(step, overflow);
      }
    }
    if (of["ends"] == false) {
      EXPECT_EQ(scaler.scale(), of["scales"].back().get<double>());
    }
  }
}

TEST(LossScaler, OverflowAtTheSmallestScaleIsOneLine) {
  config::Config config;
  config.type = DType::f16;
  config.fp16.initial_scale_power = 0;
  config.fp16.hysteresis = 1;
  LossScaler scaler(config);
  test::expect_error(
      ErrorCategory::numeric,
      {"step 7: gradients are not finite in fp16, and the loss scale 1 is already the smallest "
       "(fp16.min_loss_scale); lower the learning rate, check the data, or train in bf16 "
       "(bf16.enabled)"},
      [&] { scaler.after_step(7, true); });
}

TEST(LossScaler, IsConstantIfConfiguredAndOneWithoutFp16) {
  config::Config config;
  config.fp16.loss_scale = 128.0;
  LossScaler none(config);
  none.after_step(1, true);
  EXPECT_EQ(none.scale(), 1.0);
  config.type = DType::f16;
  LossScaler constant(config);
  for (std::uint64_t step = 1; step < 40; ++step) constant.after_step(step, step % 2 == 0);
  EXPECT_EQ(constant.scale(), 128.0);
  EXPECT_FALSE(constant.state());
  constant.restart(checkpoint::LossScale{.scale = 4.0});
  EXPECT_EQ(constant.scale(), 128.0);
}

/// Gradients of zeros never overflow.
TEST(LossScaler, StaysFinite) {
  config::Config config;
  config.type = DType::f16;
  config.fp16.loss_scale_window = 1;
  LossScaler scaler(config);
  for (std::uint64_t step = 0; step < 3000; ++step) scaler.after_step(step, false);
  EXPECT_EQ(scaler.scale(), 0x1p100);
}

}  // namespace
}  // namespace ballast::train::loss_scaler_test
