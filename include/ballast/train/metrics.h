#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ballast/core/units.h"

namespace ballast::train {

/// Metrics of one step for metrics.jsonl. Keys of the maps are names of lanes and tiers ("fetch",
/// "upload", ...; "device", "host", "nvme").
struct StepMetrics {
  std::uint64_t step = 0;  ///< from 1
  /// Mean over the step's targets, or over its pairs. Empty if the step has none; then its gradient
  /// is zero.
  std::optional<double> loss;
  double lr = 0.0;
  double grad_norm = 0.0;    ///< before clipping, without the loss scale
  std::uint64_t tokens = 0;  ///< tokens trained on in this step, all ranks, without padding
  double step_seconds = 0.0;
  double tokens_per_second = 0.0;
  bool skipped = false;      ///< no update, because gradients were not finite
  bool rolled_back = false;  ///< speculative updates were undone and repeated
  /// For lanes that each device has: means over the devices.
  std::map<std::string, double> busy_seconds;
  std::map<std::string, double>
      stalled_seconds;  ///< time in which the next operation waited for its inputs
  std::map<std::string, Bytes> bytes;
  std::map<std::string, Bytes> peak_bytes;  ///< "device": the largest of all devices
  /// Only with several devices; otherwise empty.
  struct Device {
    std::map<std::string, double> busy_seconds;  ///< the device's lanes only
    std::map<std::string, double> stalled_seconds;
    Bytes peak_bytes = 0;
  };
  std::vector<Device> devices;
  Bytes nvme_bytes_written = 0;      ///< since the start of the run
  std::optional<double> loss_scale;  ///< in fp16: the scale of this step; omitted when unset
  /// Number of earlier batches that rollbacks skipped (ballast.spike). Omitted when 0.
  std::uint64_t skipped_batches = 0;
  /// Only for a model with experts; otherwise omitted.
  struct Experts {
    double balance_loss = 0.0;   ///< load-balancing loss without its coefficient
    double router_z_loss = 0.0;  ///< router z-loss without its coefficient
    double largest_load = 0.0;   ///< rows of the busiest expert / mean of its layer
    std::uint64_t idle = 0;      ///< experts without rows, in all layers
  };
  std::optional<Experts> experts;
  /// Only for training on pairs: means over the pairs of the step. Otherwise omitted.
  struct Rewards {
    double chosen = 0.0;
    double rejected = 0.0;
    double accuracy = 0.0;  ///< share of the pairs whose chosen completion has the larger reward
    [[nodiscard]] double margin() const { return chosen - rejected; }
  };
  std::optional<Rewards> rewards;
  /// Mean loss over the targets of the evaluation data; `eval_perplexity` in the file is its
  /// exponential. With rewards: mean loss of the pairs, without perplexity. Omitted when unset.
  std::optional<double> eval_loss;
};

/// Returns `metrics` as a JSON object without newline. Times are in `lanes.{lane}.busy_seconds` and
/// `lanes.{lane}.stalled_seconds`; those of device N are in `devices.N.lanes`. Finite numbers read
/// back bit for bit. NaN and infinities become null, because JSON has neither. A step without a
/// loss has null, too, and `targets` 0.
std::string to_json_line(const StepMetrics& metrics);

class WaitingFile;

/// Writes metrics.jsonl with one line per step. write() returns after the line was passed to the
/// kernel. A line that cannot be written waits (WaitingFile).
class MetricsWriter {
 public:
  /// Treatment of an existing file.
  enum class Existing {
    replaced,  ///< when the first line is written
    refused,
    continued  ///< lines are appended; see continue_after()
  };

  /// Creates `path` exclusively, or opens it. Throws Error(io), with EEXIST if the file exists and
  /// `existing` refuses it.
  explicit MetricsWriter(const std::filesystem::path& path, Existing existing = Existing::replaced);
  /// Removes a file that this object created, if it has no line.
  ~MetricsWriter();
  MetricsWriter(const MetricsWriter&) = delete;
  MetricsWriter& operator=(const MetricsWriter&) = delete;

  /// Locks the file against other processes that call this, until the object or the process ends.
  /// Returns false if another process has the lock, and true on a file system without locks. Then
  /// replaces the file by a copy if it is a link to the file of another run. Throws Error(io).
  [[nodiscard]] bool lock();
  /// Returns whether there was no file before.
  [[nodiscard]] bool is_new() const { return created_; }
  /// Appends one line, after those that wait. If the write fails (full disk, file-size limit),
  /// removes the partial line, which then waits too. A deleted file is created again and locked
  /// like before; throws Error(usage) if another process has locked it.
  void write(const StepMetrics& metrics);
  [[nodiscard]] std::uint64_t rows() const { return rows_; }
  /// Removes the lines after `step` from a continued file, which has one line per step, and from
  /// those that wait. Throws Error(io).
  void continue_after(std::uint64_t step);
  /// Returns the size of the file with all lines. They are on the disk then, unless lines wait.
  Bytes sync();
  /// The file, including the lines that wait.
  [[nodiscard]] WaitingFile& file() { return *file_; }

 private:
  void open(const std::filesystem::path& path, int flags);

  bool created_ = true;
  std::unique_ptr<WaitingFile> file_;
  std::uint64_t rows_ = 0;
};

}  // namespace ballast::train
