#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "ballast/text/json.h"

#include "tools/io/search.h"

namespace ballast::tools {

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
