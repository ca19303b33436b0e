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

}  // namespace ballast::plan
