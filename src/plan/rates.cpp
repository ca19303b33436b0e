#include "ballast/plan/rates.h"

#include <algorithm>
#include <cmath>

#include "ballast/core/error.h"

namespace ballast::plan {

double rate_at(const Curve& curve, double tokens) {
  if (curve.empty()) throw Error(ErrorCategory::config, "rates: a curve has no points");
  const auto right = std::find_if(curve.begin(), curve.end(),
                                  [&](const CurvePoint& point) { return point.tokens >= tokens; });
  if (right == curve.end()) return curve.back().flops_per_second;
  if (right == curve.begin() || right->tokens == tokens) return right->flops_per_second;
  const CurvePoint& left = *(right - 1);
  const double position = std::log(tokens / left.tokens) / std::log(right->tokens / left.tokens);
  const double seconds =
      (1.0 - position) / left.flops_per_second + position / right->flops_per_second;
  return 1.0 / seconds;
}

void complete(Rates& rates) {
  if (rates.measured_at > 0.0) return;
  // The kernels of the host device are equally fast for all heads.
  const bool host = rates.shared_cores > 0;
  for (const AttentionClassInfo& info : kAttentionClasses) {
    AttentionRate& rate = rates.of(info.id);
    const AttentionRate& like = rates.of(info.substitute);
    const auto fill = [&](double& own, double substitute, double share) {
      if (own > 0.0 || !(substitute > 0.0)) return;
      own = (host ? 1.0 : share) * substitute;
      rate.assumed = true;
    };
    fill(rate.forward, like.forward, info.forward);
    fill(rate.backward, like.backward, info.backward);
  }
  if (host || rates.adapter_per_second > 0.0 || !(rates.device_memory_per_second > 0.0)) return;
  rates.adapter_per_second = kAdapterShare * rates.device_memory_per_second;
  rates.adapters_assumed = true;
}

}  // namespace ballast::plan
