#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "ballast/core/units.h"

namespace ballast::train {

/// Metrics of one step for metrics.jsonl. Keys of the maps are the names of lanes and tiers
/// ("fetch", "upload", ...; "device", "host", "nvme").
struct StepMetrics {
  std::uint64_t step = 0;  ///< from 1
  double loss = 0.0;       ///< mean over the step's tokens
  double lr = 0.0;
  double grad_norm = 0.0;    ///< before clipping, without the loss scale
  std::uint64_t tokens = 0;  ///< trained on in this step, all ranks, no padding
  double step_seconds = 0.0;
  double tokens_per_second = 0.0;
  bool skipped = false;      ///< no update, because of non-finite gradients
  bool rolled_back = false;  ///< speculative updates were undone and repeated
  std::map<std::string, double> busy_seconds;
  std::map<std::string, double> stalled_seconds;  ///< the next operation waited for its inputs
  std::map<std::string, Bytes> bytes;
  std::map<std::string, Bytes> peak_bytes;
  Bytes nvme_bytes_written = 0;      ///< since the start of the run
  std::optional<double> loss_scale;  ///< of this step, in fp16; left out when unset
  /// Batches before this step that rollbacks have left out (ballast.spike). Left out when 0.
  std::uint64_t skipped_batches = 0;
  /// Of a model with experts; left out for others.
  struct Experts {
    double balance_loss = 0.0;   ///< load-balancing loss without its coefficient
    double router_z_loss = 0.0;  ///< likewise
    double largest_load = 0.0;   ///< most rows of an expert / mean of its layer
    std::uint64_t idle = 0;      ///< experts without rows, of all layers
  };
  std::optional<Experts> experts;
  /// Of training on pairs: means over the pairs of the step. Left out otherwise.
  struct Rewards {
    double chosen = 0.0;
    double rejected = 0.0;
    double accuracy = 0.0;  ///< share of the pairs whose chosen completion has the larger reward
    [[nodiscard]] double margin() const { return chosen - rejected; }
  };
  std::optional<Rewards> rewards;
  /// Mean over the targets of the evaluation data; the line has its exponential too, as
  /// `eval_perplexity`; with rewards, mean loss of the pairs alone. Left out when unset.
  std::optional<double> eval_loss;
};

/// A JSON object without newline with the members of `metrics`; times are in
/// `lanes.{lane}.busy_seconds` and `lanes.{lane}.stalled_seconds`. Finite numbers read back bit for
/// bit; NaN and infinities become null, since JSON has neither.
std::string to_json_line(const StepMetrics& metrics);

class WaitingFile;

/// Writes metrics.jsonl: one line per step, passed to the kernel before write() returns. A line
/// that cannot be written waits (WaitingFile).
class MetricsWriter {
 public:
  /// What happens to a file that is there already.
  enum class Existing {
    replaced,  ///< by the first line
    refused,
    continued  ///< lines are added; see continue_after()
  };

  /// Creates `path`, so that no other writer can, or opens it. Throws Error(io), with EEXIST when
  /// a file is there and `existing` refuses it.
  explicit MetricsWriter(std::filesystem::path path, Existing existing = Existing::replaced);
  /// Removes a file that it has created and that has no line.
  ~MetricsWriter();
  MetricsWriter(const MetricsWriter&) = delete;
  MetricsWriter& operator=(const MetricsWriter&) = delete;

  /// Keeps other processes that call this from the file, until the object or the process ends.
  /// False if another one has it. A file system without locks gives none, and true.
  [[nodiscard]] bool lock();
  /// Whether there was no file.
  [[nodiscard]] bool is_new() const { return created_; }
  /// Appends one line, and before it those that wait. If the write fails (full disk, file-size
  /// limit), removes the partial line, which then waits, too. A file that was deleted is made again
  /// and locked like before: throws Error(usage) if another process has it.
  void write(const StepMetrics& metrics);
  [[nodiscard]] std::uint64_t rows() const { return rows_; }
  /// Keeps the lines up to `step` of a continued file, which has a line for each step, and of those
  /// that wait. Throws Error(io).
  void continue_after(std::uint64_t step);
  /// Returns the size of the file with all lines, which is then on the disk unless lines wait.
  Bytes sync();
  /// The file and its lines that wait.
  [[nodiscard]] WaitingFile& file() { return *file_; }

 private:
  bool created_ = true;
  std::unique_ptr<WaitingFile> file_;
  std::uint64_t rows_ = 0;
};

}  // namespace ballast::train
