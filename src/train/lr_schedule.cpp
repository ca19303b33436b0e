#include "ballast/train/lr_schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include <fmt/format.h>

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

}  // namespace ballast::train
