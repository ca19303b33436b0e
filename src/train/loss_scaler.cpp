#include "src/train/loss_scaler.h"

#include <algorithm>

#include <fmt/format.h>

#include "ballast/comm/collective_try.h"
#include "ballast/core/error.h"

namespace ballast::train {
namespace {

/// Maximum scale, which is reached only if practically all gradients are zero.
constexpr double kGreatest = 0x1p100;

}  // namespace

LossScaler::LossScaler(const config::Config& config)
    : options_(config.fp16),
      dynamic_(config.type == DType::f16 && config.fp16.loss_scale == 0.0),
      now_{.hysteresis = config.fp16.hysteresis} {
  if (dynamic_) {
    now_.scale = config.fp16.initial_scale();
  } else if (config.type == DType::f16) {
    now_.scale = config.fp16.loss_scale;
  }
}

void LossScaler::after_step(std::uint64_t step, bool skipped) {
  if (!dynamic_) return;
  if (!skipped) {
    const std::uint64_t before = now_.good_steps++;
    const bool window_ends = before > 0 && before % options_.loss_scale_window == 0;
    if (window_ends) now_.scale = std::min(2.0 * now_.scale, kGreatest);
    if (window_ends || options_.consecutive_hysteresis) now_.hysteresis = options_.hysteresis;
    return;
  }
  now_.good_steps = 0;
  if (now_.hysteresis > 1) {
    --now_.hysteresis;
    return;
  }
  if (now_.scale <= options_.min_loss_scale) {
    throw comm::JointError(
        ErrorCategory::numeric,
        fmt::format("step {}: gradients are not finite in fp16, and the loss scale {} is "
                    "already the smallest (fp16.min_loss_scale); lower the learning rate, "
                    "check the data, or train in bf16 (bf16.enabled)",
                    step, now_.scale));
  }
  now_.scale = std::max(now_.scale / 2.0, options_.min_loss_scale);
}

std::optional<checkpoint::LossScale> LossScaler::state() const {
  return dynamic_ ? std::optional(now_) : std::nullopt;
}

void LossScaler::restart(const std::optional<checkpoint::LossScale>& state) {
  if (dynamic_ && state) now_ = *state;
}

}  // namespace ballast::train
