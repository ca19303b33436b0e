#pragma once

#include <cstddef>
#include <cstdint>

namespace ballast::model {

/// Statistics of a packed gradient, in device memory.
struct GradientStats {
  double sum_of_squares = 0.0;   ///< over the packed values, accumulated in double in a fixed order
  std::uint64_t non_finite = 0;  ///< packed values that are inf or NaN
};

/// Values per partial GradientStats.
inline constexpr std::size_t kStatsChunk = 65536;

}  // namespace ballast::model
