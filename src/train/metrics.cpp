#include "ballast/train/metrics.h"

#include <span>
#include <utility>

#include <fcntl.h>
#include <unistd.h>

#include "ballast/core/error.h"
#include "ballast/text/files.h"
#include "ballast/text/json.h"

namespace ballast::train {

using text::Json;

std::string to_json_line(const StepMetrics& metrics) {
  Json lanes = Json::object();
  for (const auto& [lane, seconds] : metrics.busy_seconds) lanes[lane]["busy_seconds"] = seconds;
  for (const auto& [lane, seconds] : metrics.stalled_seconds) {
    lanes[lane]["stalled_seconds"] = seconds;
  }
  Json bytes = Json::object();
  for (const auto& [lane, count] : metrics.bytes) bytes[lane] = count;
  Json peak_bytes = Json::object();
  for (const auto& [tier, count] : metrics.peak_bytes) peak_bytes[tier] = count;
  Json line = Json::object({{"step", metrics.step},
                            {"loss", metrics.loss},
                            {"lr", metrics.lr},
                            {"grad_norm", metrics.grad_norm},
                            {"tokens", metrics.tokens},
                            {"step_seconds", metrics.step_seconds},
                            {"tokens_per_second", metrics.tokens_per_second},
                            {"skipped", metrics.skipped},
                            {"lanes", lanes},
                            {"bytes", bytes},
                            {"peak_bytes", peak_bytes},
                            {"nvme_bytes_written", metrics.nvme_bytes_written}});
  if (metrics.eval_loss) line["eval_loss"] = *metrics.eval_loss;
  return line.compact();
}

MetricsWriter::MetricsWriter(std::filesystem::path path)
    : path_(std::move(path)),
      descriptor_(
          text::open_file(path_, O_WRONLY | O_CREAT | O_TRUNC | O_APPEND, ErrorCategory::io)) {}

void MetricsWriter::write(const StepMetrics& metrics) {
  const auto line = to_json_line(metrics) + '\n';
  try {
    text::write_fully(descriptor_, path_, std::as_bytes(std::span(line)));
  } catch (const Error&) {
    // Report the write error, not an error of the truncation.
    [[maybe_unused]] const int result =
        ::ftruncate(descriptor_.number(), static_cast<off_t>(size_));
    throw;
  }
  size_ += line.size();
}

}  // namespace ballast::train
