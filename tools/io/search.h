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

  [[nodiscard]] Bytes in_flight() const { return block * depth; }
  friend bool operator==(const IoSetting&, const IoSetting&) = default;
};

/// Measurements of one setting on one path.
struct IoTrial {
  IoSetting setting;
  std::vector<double> rates;  ///< GB/s of each turn

  [[nodiscard]] double median() const;
};

/// The settings to try: all for the first of `backends` (best first), some for the others. None
/// exceeds the default in-flight limit of QueueOptions.
std::vector<IoSetting> settings_to_try(const std::vector<std::string>& backends);

/// Tries all settings with the mixed pattern in short turns, drops slow ones and repeats, until
/// `seconds` of measuring are over. Settings that were not tried have no rates.
std::vector<IoTrial> search(const std::vector<IoSetting>& settings, IoRegion& region,
                            double seconds, std::string_view task,
                            const std::atomic<bool>& interrupted);

/// Score of a setting, relative to the best, which has 1.
struct IoScore {
  IoSetting setting;
  double share = 0.0;
};

/// Chooses among the settings within 3% of the best: the first backend of `backends`, then the
/// least memory in flight, then the fastest. `scores` must not be empty.
IoSetting choose(const std::vector<IoScore>& scores, const std::vector<std::string>& backends);

/// The trials of one path relative to its best. `proven`: only those with at least half of the
/// largest number of turns.
std::vector<IoScore> scores_of(const std::vector<IoTrial>& trials, bool proven);

/// The worst score over all paths, for settings that were tried on every path.
std::vector<IoScore> common_scores(const std::vector<std::vector<IoTrial>>& trials_by_path);

/// Bandwidth of a setting in GB/s: medians of short turns.
struct IoRates {
  double read = 0.0;
  double write = 0.0;
  double mixed = 0.0;
};
IoRates measure_rates(const IoSetting& setting, std::span<IoRegion> regions, double seconds,
                      std::string_view task, const std::atomic<bool>& interrupted);

}  // namespace ballast::tools
