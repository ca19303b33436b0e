#pragma once

#include <cstdint>
#include <string>

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

}  // namespace ballast::train
