#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "tools/io/search.h"

namespace ballast::tools {

/// What was found for one path.
struct TunedPath {
  std::filesystem::path path;
  IoSetting setting;
  IoRates rates;
  std::vector<IoTrial> trials;
};

/// What `ballast tune io` found.
struct IoTuning {
  std::vector<TunedPath> paths;
  IoSetting common;             ///< best for all of them
  double mixed_together = 0.0;  ///< GB/s of all paths at once, at their common setting
};

/// Puts the tuning into a config: aio.backend, block_size, queue_depth and paths, and the nvme_path
/// of each offload section whose device is nvme or auto. The rest of the text stays. Throws Error
/// and leaves the file when the effective config would not be what was tuned.
void write_tuning(const std::filesystem::path& config, const IoTuning& tuning);

/// Throws Error when write_tuning could not succeed, before time is spent on measuring.
void check_writable_config(const std::filesystem::path& config);

}  // namespace ballast::tools
