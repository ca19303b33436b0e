#include "src/train/spikes.h"

#include <cmath>
#include <numeric>

#include <fmt/format.h>

namespace ballast::train {

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
