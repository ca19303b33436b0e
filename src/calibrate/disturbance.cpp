#include <string_view>
#include <utility>

#include <fmt/format.h>

#include "ballast/calibrate/calibrate.h"

#include "src/calibrate/calibration.h"

namespace ballast::calibrate {
namespace {

/// Larger micro-batches may lose up to this share of the rate to caches.
constexpr double kLeastKept = 0.5;
/// More tokens take at least this share of the time that fewer tokens take.
constexpr double kLeastTime = 0.7;

/// Describes how `curve` contradicts itself; "" if it does not.
std::string contradiction(std::string_view kernels, const plan::Curve& curve) {
  for (std::size_t i = 1; i < curve.size(); ++i) {
    const plan::CurvePoint& less = curve[i - 1];
    const plan::CurvePoint& more = curve[i];
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

Measurement measure_part(const std::function<Attempt()>& attempt,
                         const std::function<bool(const std::string& why)>& again) {
  Attempt made = attempt();
  std::string disturbance = disturbance_of(made);
  if (!disturbance.empty() && again(disturbance)) {
    made = attempt();
    disturbance = disturbance_of(made);
  }
  const bool contradicts = !disturbance.empty() && made.others_share <= kMuchOtherWork;
  return {std::move(made.rates), std::move(disturbance), contradicts ? 1.0 : made.others_share,
          made.spread};
}

}  // namespace ballast::calibrate
