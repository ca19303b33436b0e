#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "ballast/core/random.h"

namespace ballast::test {

/// Overrides of a config, each "key=value".
using Overrides = std::vector<std::string>;

/// Settings of which a run has one.
using Axis = std::vector<Overrides>;

/// A run: the number of its setting of each axis.
using Row = std::vector<std::size_t>;

/// All pairs of settings of different axes, and which of them the rows so far contain.
class CoveredPairs {
 public:
  explicit CoveredPairs(const std::vector<Axis>& axes) {
    for (const Axis& axis : axes) {
      starts_.push_back(count_);
      count_ += axis.size();
    }
    covered_.assign(count_ * count_, false);
    for (std::size_t a = 0; a < axes.size(); ++a) {
      for (std::size_t b = a + 1; b < axes.size(); ++b) {
        for (std::size_t i = 0; i < axes[a].size(); ++i) {
          for (std::size_t j = 0; j < axes[b].size(); ++j) missing_.push_back({{a, i}, {b, j}});
        }
      }
    }
  }

  struct Chosen {
    std::size_t axis = 0;
    std::size_t setting = 0;
  };
  using Pair = std::pair<Chosen, Chosen>;

  [[nodiscard]] bool covers(const Pair& pair) const { return covered_[place(pair)]; }
  [[nodiscard]] const std::vector<Pair>& missing() const { return missing_; }

  void add(const Row& row) {
    for (std::size_t a = 0; a < row.size(); ++a) {
      for (std::size_t b = a + 1; b < row.size(); ++b) {
        covered_[place({{a, row[a]}, {b, row[b]}})] = true;
      }
    }
    std::erase_if(missing_, [&](const Pair& pair) { return covers(pair); });
  }

 private:
  [[nodiscard]] std::size_t place(const Pair& pair) const {
    const auto& [first, second] = pair.first.axis < pair.second.axis
                                      ? std::pair(pair.first, pair.second)
                                      : std::pair(pair.second, pair.first);
    return (starts_[first.axis] + first.setting) * count_ + starts_[second.axis] + second.setting;
  }

  std::vector<std::size_t> starts_;
  std::size_t count_ = 0;
  std::vector<bool> covered_;
  std::vector<Pair> missing_;
};

/// A row that contains the first missing pair and, chosen axis by axis from a random first one, the
/// settings that form most missing pairs. `seed` also decides between equals.
inline Row covering_row(const std::vector<Axis>& axes, const CoveredPairs& pairs,
                        std::uint64_t seed) {
  const auto [first, second] = pairs.missing().front();
  std::vector<CoveredPairs::Chosen> chosen = {first, second};
  const std::size_t start = random_u64(seed, 0) % axes.size();
  for (std::size_t i = 0; i < axes.size(); ++i) {
    const std::size_t axis = (start + i) % axes.size();
    if (axis == first.axis || axis == second.axis) continue;
    const std::size_t count = axes[axis].size();
    const std::size_t shift = random_u64(seed, i + 1) % count;
    CoveredPairs::Chosen best;
    std::ptrdiff_t most = -1;
    for (std::size_t j = 0; j < count; ++j) {
      const CoveredPairs::Chosen candidate = {axis, (j + shift) % count};
      const std::ptrdiff_t gained =
          std::count_if(chosen.begin(), chosen.end(), [&](const CoveredPairs::Chosen& other) {
            return !pairs.covers({candidate, other});
          });
      if (gained > most) {
        most = gained;
        best = candidate;
      }
    }
    chosen.push_back(best);
  }
  Row row(axes.size());
  for (const CoveredPairs::Chosen& one : chosen) row[one.axis] = one.setting;
  return row;
}

inline Overrides joined(Overrides first, const Overrides& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

inline std::string text_of(const Overrides& settings) {
  return fmt::format("{}", fmt::join(settings, " "));
}

/// The overrides of a row's settings.
inline Overrides overrides_of(const std::vector<Axis>& axes, const Row& row) {
  Overrides all;
  for (std::size_t a = 0; a < axes.size(); ++a) {
    all.insert(all.end(), axes[a][row[a]].begin(), axes[a][row[a]].end());
  }
  return all;
}

/// Few rows in which each setting of an axis occurs with each setting of every other axis. The
/// greedy search is that of AETG, see Cohen et al., "The AETG System", IEEE TSE 23(7), 1997.
inline std::vector<Row> rows_of_pairs(const std::vector<Axis>& axes) {
  constexpr std::uint64_t kCandidates = 40;
  CoveredPairs pairs(axes);
  std::vector<Row> rows;
  while (!pairs.missing().empty()) {
    Row best;
    std::size_t fewest = pairs.missing().size();
    for (std::uint64_t candidate = 0; candidate < kCandidates; ++candidate) {
      const Row row = covering_row(axes, pairs, kCandidates * rows.size() + candidate);
      CoveredPairs after = pairs;
      after.add(row);
      if (after.missing().size() >= fewest) continue;
      fewest = after.missing().size();
      best = row;
    }
    pairs.add(best);
    rows.push_back(best);
  }
  return rows;
}

/// Rows in which each setting occurs. Their number is that of the settings of the longest axis. The
/// rows of different seeds combine settings differently.
inline std::vector<Row> rows_of_settings(const std::vector<Axis>& axes, std::uint64_t seed) {
  std::size_t count = 0;
  for (const Axis& axis : axes) count = std::max(count, axis.size());
  std::vector<Row> rows(count, Row(axes.size()));
  for (std::size_t a = 0; a < axes.size(); ++a) {
    const std::size_t shift = random_u64(seed, a) % axes[a].size();
    for (std::size_t i = 0; i < count; ++i) rows[i][a] = (i + shift) % axes[a].size();
  }
  return rows;
}

}  // namespace ballast::test
