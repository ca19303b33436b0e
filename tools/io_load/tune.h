#pragma once

#include <atomic>
#include <cstddef>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ballast/text/json.h"

#include "tools/io_load/load.h"

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

/// Chooses the setting with the least memory in flight among those within 3% of the best. Among
/// equals it takes the first backend of `backends`, then the fastest. `scores` must not be empty.
IoSetting choose(const std::vector<IoScore>& scores, const std::vector<std::string>& backends);

/// Returns the settings of one path that were tried, relative to the best of them.
std::vector<IoScore> scores_of(const std::vector<IoTrial>& trials);

/// Returns the index of a trial that decides the choice after less than half of the largest number
/// of turns: the fastest, or the one that would be chosen. Nothing if both have enough.
std::optional<std::size_t> doubtful(const std::vector<IoTrial>& trials,
                                    const std::vector<std::string>& backends);

/// Gives more turns to doubtful() trials until there is none, for at most `seconds`, so that a
/// lucky turn does not decide.
void confirm(std::vector<IoTrial>& trials, const std::vector<std::string>& backends,
             IoRegion& region, double seconds, std::string_view task,
             const std::atomic<bool>& interrupted);

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

struct TunedPath {
  std::filesystem::path path;
  IoSetting setting;
  IoRates rates;
  std::vector<IoTrial> trials;
};

struct IoTuning {
  std::vector<TunedPath> paths;
  IoSetting common;             ///< best setting for all of them
  double mixed_together = 0.0;  ///< GB/s of all paths at once, at their common setting
};

/// Options of `ballast tune io`.
struct TuneIoArguments {
  std::vector<std::string> paths;
  double seconds = 20.0;
  std::string size = "1GiB";
  std::filesystem::path config;
  std::vector<double> tflops = {100.0, 400.0};
  bool json = false;
};

/// Measures and chooses; the caller calls write_tuning(). Prints tables unless `arguments.json`.
/// Throws Error, also if `arguments.config` could not be written.
IoTuning tune_io(const TuneIoArguments& arguments);

/// Output of `ballast tune io --json`.
text::Json to_json(const IoTuning& tuning, const std::vector<double>& tflops);

/// Writes the tuning into a config: aio.backend, block_size, queue_depth and paths, and the
/// nvme_path of each offload section whose device is nvme or auto. Keeps the rest of the text.
/// Throws Error and does not change the file if the effective config would differ from the tuning.
void write_tuning(const std::filesystem::path& config, const IoTuning& tuning);

/// Throws Error if write_tuning() would fail for these paths, and does not change the file. Call
/// before measuring.
void check_writable_config(const std::filesystem::path& config,
                           const std::vector<std::filesystem::path>& paths);

}  // namespace ballast::tools
