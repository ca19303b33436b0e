#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>

#include "ballast/core/descriptor.h"
#include "ballast/core/units.h"

namespace ballast::train {

/// What one step was, for metrics.jsonl. Keys of the maps are the names of stages and tiers
/// ("fetch", "upload", ...; "device", "host", "nvme").
struct StepMetrics {
  std::uint64_t step = 0;  ///< from 1
  double loss = 0.0;       ///< mean over the step's tokens
  double lr = 0.0;
  double grad_norm = 0.0;    ///< before clipping
  std::uint64_t tokens = 0;  ///< trained on in this step, all ranks, no padding
  double step_seconds = 0.0;
  double tokens_per_second = 0.0;
  bool skipped = false;  ///< no update, because of non-finite gradients
  std::map<std::string, double> busy_seconds;
  std::map<std::string, double> stalled_seconds;  ///< the next operation waited for its inputs
  std::map<std::string, Bytes> bytes;
  std::map<std::string, Bytes> peak_bytes;
  Bytes nvme_bytes_written = 0;     ///< since the start of the run
  std::optional<double> eval_loss;  ///< left out of the line when unset
};

/// The line for `metrics`, without newline: a JSON object with the fields `step` `loss` `lr`
/// `grad_norm` `tokens` `step_seconds` `tokens_per_second` `skipped` `lanes.{stage}.busy_seconds`
/// `lanes.{stage}.stalled_seconds` `bytes.{stage}` `peak_bytes.{tier}` `nvme_bytes_written` and
/// `eval_loss`. Finite numbers read back bit for bit; JSON has no others, so NaN and infinities
/// become null.
std::string to_json_line(const StepMetrics& metrics);

/// metrics.jsonl: one line per step, handed to the system before write() returns.
class MetricsWriter {
 public:
  /// Creates `path`, or empties it. Throws Error(io).
  explicit MetricsWriter(std::filesystem::path path);

  /// Appends one line. On a failed write (full disk, file-size limit) takes back the part that was
  /// written, so that the file keeps whole lines, and throws Error(io).
  void write(const StepMetrics& metrics);

 private:
  std::filesystem::path path_;
  Descriptor descriptor_;
  Bytes size_ = 0;
};

}  // namespace ballast::train
