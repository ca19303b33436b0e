#include "src/model/host/pairs.h"

#include <algorithm>
#include <numeric>

namespace ballast::model::host {

void weigh_pairs(const PairRows& rows, const Preference& how, PairResult* results) {
  for (std::size_t pair = 0; pair < rows.pairs; ++pair) {
    const std::size_t first = 2 * pair * rows.length;
    const std::size_t second = first + rows.length;
    const std::size_t end = second + rows.length;
    const double* const reference = rows.reference + 2 * pair;
    const auto sum = [&](std::size_t begin, std::size_t stop) {
      return std::accumulate(rows.losses + begin, rows.losses + stop, 0.0);
    };
    const bool counts = std::any_of(rows.targets + first, rows.targets + end,
                                    [](std::int32_t target) { return target >= 0; });
    WeighedPair found;
    if (counts) {
      found = weigh_pair(how, {sum(first, second), reference[0]}, {sum(second, end), reference[1]});
    }
    results[pair] = found.result;
    std::fill_n(rows.weights + first, rows.length, found.weight);
    std::fill_n(rows.weights + second, rows.length, -found.weight);
  }
}

}  // namespace ballast::model::host
