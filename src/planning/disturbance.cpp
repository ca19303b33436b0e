#include <string_view>
#include <utility>

#include <fmt/format.h>

#include "src/planning/calibration.h"

namespace ballast::planning {
namespace {

/// Larger micro-batches may lose so much of the rate to caches, not more.
constexpr double kLeastKept = 0.5;
/// More tokens take at least so much of the time that fewer tokens take.
constexpr double kLeastTime = 0.7;

/// How `curve` contradicts itself; "" if it does not.
std::string contradiction(std::string_view kernels, const schedule::Curve& curve) {
  for (std::size_t i = 1; i < curve.size(); ++i) {
    const schedule::CurvePoint& less = curve[i - 1];
    const schedule::CurvePoint& more = curve[i];
    const double kept = more.flops_per_second / less.flops_per_second;
    const double time = more.tokens / less.tokens / kept;
    if (kept >= kLeastKept && time >= kLeastTime) continue;
    return fmt::format("the {} rate went from {:.3g} to {:.3g} TFLOP/s between {} and {} tokens",
                       kernels, 1e-12 * less.flops_per_second, 1e-12 * more.flops_per_second,
                       less.tokens, more.tokens);
  }
  return "";
}

std::string disturbance_of(const Attempt& attempt) {
  if (attempt.others_share > kMuchOtherWork) {
    return fmt::format("other work used {:.0f}% of the CPU time", 100.0 * attempt.others_share);
  }
  for (const auto& [kernels, curve] :
       {std::pair{"forward", &attempt.rates.forward},
        std::pair{"backward", &attempt.rates.backward}, std::pair{"head", &attempt.rates.head}}) {
    if (std::string text = contradiction(kernels, *curve); !text.empty()) return text;
  }
  return "";
}

}  // namespace

Calibration measure_undisturbed(const std::function<Attempt()>& attempt,
                                const std::function<void(const std::string& why)>& again) {
  constexpr int kAttempts = 3;
  Attempt best = attempt();
  std::string disturbance = disturbance_of(best);
  for (int i = 1; i < kAttempts && !disturbance.empty(); ++i) {
    again(disturbance);
    Attempt next = attempt();
    std::string now = disturbance_of(next);
    if (!now.empty() && next.others_share >= best.others_share) continue;
    best = std::move(next);
    disturbance = std::move(now);
  }
  return {std::move(best.rates), std::move(disturbance)};
}

}  // namespace ballast::planning
