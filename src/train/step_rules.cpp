#include "src/train/step_rules.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <numeric>

#include <fmt/format.h>

#include "ballast/comm/agreement.h"
#include "ballast/core/error.h"

namespace ballast::train {

using Type = config::SchedulerSection::Type;

LrSchedule::LrSchedule(const config::SchedulerSection& section, double lr)
    : type_(section.type),
      lr_(lr),
      min_lr_(section.warmup_min_lr),
      max_lr_(section.warmup_max_lr.value_or(lr)),
      warmup_steps_(std::max(section.type == Type::linear ? 0.0 : 2.0,
                             static_cast<double>(section.warmup_num_steps))),
      linear_(section.warmup_linear),
      total_steps_(static_cast<double>(section.total_num_steps)),
      warmup_min_ratio_(section.warmup_min_ratio),
      cos_min_ratio_(section.cos_min_ratio) {
  const bool decays = type_ != Type::constant && type_ != Type::warmup;
  if (decays && section.total_num_steps == 0) {
    throw Error(ErrorCategory::config,
                fmt::format("scheduler.params.total_num_steps: {} needs at least 1",
                            config::name_of(type_)));
  }
}

double LrSchedule::warmup(double t) const {
  return linear_ ? t / warmup_steps_ : 1.0 / std::log(warmup_steps_) * std::log(t + 1.0);
}

double LrSchedule::linear_share(double done) const {
  if (done < warmup_steps_) return done / warmup_steps_;
  return std::max(0.0, (total_steps_ - done) / std::max(1.0, total_steps_ - warmup_steps_));
}

double LrSchedule::at(std::uint64_t k) const {
  expects(k >= 1, "learning rate: the first step is 1");
  const double t = static_cast<double>(k) - 2.0;
  const bool warming = t < warmup_steps_;
  if (type_ == Type::constant) return lr_;
  if (type_ == Type::linear) return lr_ * linear_share(static_cast<double>(k) - 1.0);
  if (type_ == Type::warmup_cosine) {
    if (t < 0.0) return 0.0;
    if (warming) return lr_ * (warmup_min_ratio_ + warmup(t) * (1.0 - warmup_min_ratio_));
    const double progress =
        std::min(1.0, (t - warmup_steps_ + 1.0) / std::max(1.0, total_steps_ - warmup_steps_));
    const double ratio = (1.0 + std::cos(std::numbers::pi * progress)) / 2.0;
    return lr_ * std::max(0.0, cos_min_ratio_ + (1.0 - cos_min_ratio_) * ratio);
  }
  double gamma = 1.0;
  if (t < 0.0) {
    gamma = 0.0;
  } else if (warming) {
    gamma = warmup(t);
  } else if (type_ == Type::warmup_decay) {
    gamma = std::max(0.0, (total_steps_ - t) / std::max(1.0, total_steps_ - warmup_steps_));
  }
  return min_lr_ + (max_lr_ - min_lr_) * gamma;
}

std::string describe_rate(const config::Config& config) {
  const config::SchedulerSection& s = config.scheduler;
  const config::OptimizerSection& o = config.optimizer;
  const double rate =
      s.type == Type::constant || s.type == Type::linear ? o.lr : s.warmup_max_lr.value_or(o.lr);
  std::string schedule(config::name_of(s.type));
  if (s.total_num_steps > 0 && s.type != Type::warmup && s.type != Type::constant) {
    schedule += fmt::format(" to step {}", s.total_num_steps);
  }
  if (s.type != Type::constant && s.warmup_num_steps > 0) {
    schedule += fmt::format(", warm-up {}", s.warmup_num_steps);
  }
  return fmt::format("{:g}, {}; {}, weight decay {:g}", rate, schedule, config::name_of(o.type),
                     o.weight_decay);
}

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

std::string Spikes::judge(double loss) const {
  const std::size_t count = losses_.size();
  if (count < options_.window / 2) return "";
  if (!std::isfinite(loss)) return "the loss is not finite";
  const auto all = static_cast<double>(count);
  const double mean = std::accumulate(losses_.begin(), losses_.end(), 0.0) / all;
  double squares = 0.0;
  for (const double each : losses_) squares += (each - mean) * (each - mean);
  const double limit = mean + options_.factor * std::sqrt(squares / (all - 1.0));
  if (loss <= limit) return "";
  return fmt::format(
      "loss {:.4f} is above {:.4f}, {} standard deviations above the mean {:.4f} of the last {} "
      "steps",
      loss, limit, options_.factor, mean, count);
}

std::string Spikes::add(std::optional<double> of_step) {
  if (options_.action == config::SpikeSection::Action::off || !of_step) return "";
  const double loss = *of_step;
  std::string found = judge(loss);
  const bool begins = !found.empty() && !inside_;
  inside_ = !found.empty();
  if (std::isfinite(loss)) losses_.push_back(loss);
  if (losses_.size() > options_.window) losses_.pop_front();
  return begins ? found : "";
}

void Spikes::restart(const std::vector<double>& losses) {
  losses_.assign(losses.begin(), losses.end());
  while (losses_.size() > options_.window) losses_.pop_front();
  inside_ = false;
}

}  // namespace ballast::train
