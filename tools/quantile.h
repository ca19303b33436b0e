#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

namespace ballast::tools {

/// The `share` quantile (0 to 1) of `values` by the nearest rank; 0 if `values` is empty.
template <class T>
double quantile(std::vector<T> values, double share) {
  if (values.empty()) return 0.0;
  const double rank = std::max(1.0, std::ceil(share * static_cast<double>(values.size())));
  const auto at = values.begin() + static_cast<std::ptrdiff_t>(rank) - 1;
  std::nth_element(values.begin(), at, values.end());
  return static_cast<double>(*at);
}

}  // namespace ballast::tools
