#pragma once

#include <algorithm>
#include <cstddef>
#include <limits>

#include "src/model/compute/matrix.h"

namespace ballast::model::host {

/// Numbers of parts into which the rows and the columns of a result are cut.
struct ProductGrid {
  std::size_t rows = 1;
  std::size_t columns = 1;
};

/// Shortest side of a part, apart from the last unit. In oneDNN, results of one row or column use
/// another kernel with another order of sums.
constexpr std::size_t kShortestSide = 64;

/// Returns the fastest grid of at most `parts` parts, of which each thread computes one.
inline ProductGrid grid_of(const Extents& e, std::size_t parts) {
  // Copying a row or column of the operands takes as long as multiplying this many.
  constexpr std::size_t kCopy = 40;
  const std::size_t most_rows = std::clamp<std::size_t>(e.m / kShortestSide, 1, parts);
  const std::size_t most_columns = std::max<std::size_t>(e.n / kShortestSide, 1);
  ProductGrid best;
  std::size_t least = std::numeric_limits<std::size_t>::max();
  for (std::size_t rows = 1; rows <= most_rows; ++rows) {
    const std::size_t columns = std::min(parts / rows, most_columns);
    const std::size_t cost = (e.m / rows + kCopy) * (e.n / columns + kCopy);
    if (cost < least) best = {rows, columns};
    least = std::min(least, cost);
  }
  return best;
}

}  // namespace ballast::model::host
