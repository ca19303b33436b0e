#pragma once

#include <atomic>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tools/io/load.h"

namespace ballast::tools {

/// Block size, depth and backend of a queue.
struct IoSetting {
  Bytes block = 0;
  unsigned depth = 0;
  std::string backend;

  /// Memory that is in transit.
  [[nodiscard]] Bytes in_flight() const { return block * depth; }
  friend bool operator==(const IoSetting&, const IoSetting&) = default;
};

/// What came out for one setting on one path.
struct IoTrial {
  IoSetting setting;
  std::vector<double> rates;  ///< GB/s of each time that it was tried, in order

  [[nodiscard]] double median() const;
};

/// The settings worth trying: of the first of `backends` (best first) all, of the others some. None
/// has more in flight than QueueOptions allows by default.
std::vector<IoSetting> settings_to_try(const std::vector<std::string>& backends);

/// Tries all settings with the mixed pattern in short turns, drops losers, tries the rest again,
/// until `seconds` of measuring are spent. Settings that there was no time for have no rates.
std::vector<IoTrial> search(const std::vector<IoSetting>& settings, IoRegion& region,
                            double seconds, std::string_view task,
                            const std::atomic<bool>& interrupted);

/// How good a setting is, 1 being the best.
struct IoScore {
  IoSetting setting;
  double share = 0.0;
};

/// Of the settings within 3% of the best: the backend that comes first in `backends`, then the
/// least in flight, then the fastest. `scores` must not be empty.
IoSetting choose(const std::vector<IoScore>& scores, const std::vector<std::string>& backends);

/// The trials of one path as shares of its best; `proven`: only those that were tried at least half
/// as often as any, since one turn proves little.
std::vector<IoScore> scores_of(const std::vector<IoTrial>& trials, bool proven);

/// For settings that were tried on every path, their worst share among the paths.
std::vector<IoScore> common_scores(const std::vector<std::vector<IoTrial>>& trials_by_path);

/// Bandwidth of a setting: medians of short turns.
struct IoRates {
  double read = 0.0;  ///< GB/s
  double write = 0.0;
  double mixed = 0.0;
};
IoRates measure_rates(const IoSetting& setting, std::span<IoRegion> regions, double seconds,
                      std::string_view task, const std::atomic<bool>& interrupted);

}  // namespace ballast::tools
