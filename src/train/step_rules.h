#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "ballast/checkpoint/checkpoints.h"
#include "ballast/config/config.h"

namespace ballast::train {

/// Learning rate of every optimizer step, as DeepSpeed 0.19 computes it (its
/// runtime/lr_schedules.py), in double.
///
/// DeepSpeed's schedulers start at t = -1 and move to t = 0, 1, 2, ... after each optimizer step,
/// so the k-th optimizer step (from 1) uses t = k - 2: step 1 has the initial rate, and so has step
/// 2 where gamma(0) = 0. Skipped steps (non-finite gradients) do not count in k.
///
/// With W = max(2, warmup_num_steps), N = total_num_steps, and during warm-up (0 <= t < W)
/// gamma(t) = ln(t + 1) / ln(W), or t / W when warmup_linear; gamma(-1) = 0:
///  - constant: lr.
///  - warmup: min + (max - min) * gamma; gamma is 1 from t = W on.
///  - warmup_decay: the same, with gamma = max(0, (N - t) / max(1, N - W)) from t = W on.
///  - warmup_cosine: lr * ratio; ratio = 0 at t = -1 (for every warmup_min_ratio),
///    warmup_min_ratio + (1 - warmup_min_ratio) * gamma during warm-up, and then
///    max(0, cos_min_ratio + (1 - cos_min_ratio) * (1 + cos(pi * p)) / 2),
///    p = min(1, (t - W + 1) / max(1, N - W)).
/// linear is that of transformers (optimization.py), with W = warmup_num_steps: after s = k - 1
/// steps lr * s / W below W, then lr * max(0, (N - s) / max(1, N - W)).
/// min is warmup_min_lr, max is warmup_max_lr or, when that is unset, `lr`.
class LrSchedule {
 public:
  /// `lr` is optimizer.lr. Throws Error(config) when a decaying schedule has no total_num_steps.
  LrSchedule(const config::SchedulerSection& section, double lr);

  /// Returns the learning rate of optimizer step `k`, from 1.
  [[nodiscard]] double at(std::uint64_t k) const;

 private:
  [[nodiscard]] double warmup(double t) const;
  /// Share of lr in a linear schedule after `done` steps.
  [[nodiscard]] double linear_share(double done) const;

  config::SchedulerSection::Type type_;
  double lr_;
  double min_lr_;
  double max_lr_;
  double warmup_steps_;
  bool linear_;
  double total_steps_;
  double warmup_min_ratio_;
  double cos_min_ratio_;
};

/// Describes learning rate, schedule, optimizer and weight decay in a few words.
std::string describe_rate(const config::Config& config);

/// The loss scale of the next step (engine::Engine::train_step()). It depends only on which steps
/// were skipped, which all ranks know. The rules are those of DeepSpeed's DynamicLossScaler. An
/// overflow halves the scale, except the first `hysteresis` - 1 overflows since the hysteresis was
/// last restored. A good step after `loss_scale_window` good steps in a row doubles the scale and
/// restores the hysteresis. With `consecutive_hysteresis`, every good step restores it.
class LossScaler {
 public:
  /// Without fp16 the scale is 1. It is also constant if `loss_scale` sets it.
  explicit LossScaler(const config::Config& config);

  [[nodiscard]] double scale() const { return now_.scale; }
  /// Returns whether an overflow may change the scale.
  [[nodiscard]] bool is_dynamic() const { return dynamic_; }
  /// Updates the scale after step `step`. `skipped`: a gradient was not finite. Throws
  /// Error(numeric) for an overflow at the smallest scale.
  void after_step(std::uint64_t step, bool skipped);

  /// State for checkpoints; empty if the scale is constant.
  [[nodiscard]] std::optional<checkpoint::LossScale> state() const;
  /// Continues from the state() of a checkpoint. Does nothing without one, or if the scale is
  /// constant.
  void restart(const std::optional<checkpoint::LossScale>& state);

 private:
  config::Fp16Section options_;
  bool dynamic_;
  checkpoint::LossScale now_;
};

/// Finds loss spikes (ballast.spike). A step is in a spike if its loss is not finite, or exceeds
/// the mean loss of the last `window` steps by `factor` standard deviations, once the window is
/// half full. The rule is that of OLMo-core's SkipStepOptimizer, whose factor is 6 too. It depends
/// only on the losses, which are equal on all ranks.
class Spikes {
 public:
  explicit Spikes(const config::SpikeSection& options) : options_(options) {}

  /// Adds the loss of the next step. If a spike begins, returns its description ("loss 9.1 is above
  /// 3.3, ..."). Otherwise, also inside a spike, returns "". A step without a loss changes nothing.
  std::string add(std::optional<double> of_step);

  /// Losses in the window, oldest first; empty if ballast.spike is off.
  [[nodiscard]] std::vector<double> losses() const { return {losses_.begin(), losses_.end()}; }
  /// Continues after the step that had these losses().
  void restart(const std::vector<double>& losses);

 private:
  /// Describes the problem of a loss; "" if there is none.
  [[nodiscard]] std::string judge(double loss) const;

  config::SpikeSection options_;
  std::deque<double> losses_;  ///< only finite ones
  bool inside_ = false;        ///< the last step was in a spike
};

}  // namespace ballast::train
