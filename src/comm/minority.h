#pragma once

#include <algorithm>
#include <cstddef>
#include <map>
#include <vector>

namespace ballast::comm {

/// Ranks whose values differ from that of most ranks.
struct Minority {
  std::size_t reference = 0;        ///< the lowest rank with the most frequent value
  std::vector<std::size_t> others;  ///< ranks with other values, ascending
};

/// Compares one value per rank. Of two that are equally frequent, that of the lower rank counts.
template <class T>
Minority find_minority(const std::vector<T>& values) {
  std::map<T, std::size_t> frequency;
  for (const T& value : values) ++frequency[value];
  const auto right = std::max_element(
      values.begin(), values.end(),
      [&](const T& one, const T& other) { return frequency[one] < frequency[other]; });
  Minority found = {.reference = static_cast<std::size_t>(right - values.begin()), .others = {}};
  for (std::size_t rank = 0; rank < values.size(); ++rank) {
    if (values[rank] != *right) found.others.push_back(rank);
  }
  return found;
}

}  // namespace ballast::comm
