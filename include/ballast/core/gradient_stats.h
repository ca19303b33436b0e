#pragma once

#include <cstdint>

namespace ballast {

/// Statistics of a gradient in the type in which it is stored.
struct GradientStats {
  double sum_of_squares = 0.0;   ///< in a fixed order, double accumulators
  std::uint64_t non_finite = 0;  ///< values that are inf or NaN
};

}  // namespace ballast
