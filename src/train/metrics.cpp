#include "ballast/train/metrics.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <span>
#include <utility>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
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
                            {"rolled_back", metrics.rolled_back},
                            {"lanes", lanes},
                            {"bytes", bytes},
                            {"peak_bytes", peak_bytes},
                            {"nvme_bytes_written", metrics.nvme_bytes_written}});
  if (metrics.skipped_batches > 0) line["skipped_batches"] = metrics.skipped_batches;
  if (metrics.experts) {
    line["experts"] = Json::object({{"balance_loss", metrics.experts->balance_loss},
                                    {"router_z_loss", metrics.experts->router_z_loss},
                                    {"largest_load", metrics.experts->largest_load},
                                    {"idle", metrics.experts->idle}});
  }
  if (metrics.eval_loss) {
    line["eval_loss"] = *metrics.eval_loss;
    line["eval_perplexity"] = std::exp(*metrics.eval_loss);
  }
  return line.compact();
}

MetricsWriter::MetricsWriter(std::filesystem::path path, Existing existing)
    : path_(std::move(path)) {
  constexpr int kFlags = O_WRONLY | O_CREAT | O_APPEND;
  try {
    descriptor_ = text::open_file(path_, kFlags | O_EXCL, ErrorCategory::io);
  } catch (const Error& error) {
    if (error.error_number() != EEXIST || existing == Existing::refused) throw;
    created_ = false;
    descriptor_ = text::open_file(path_, kFlags, ErrorCategory::io);
  }
}

MetricsWriter::~MetricsWriter() {
  if (created_ && rows_ == 0) ::unlink(path_.c_str());
}

bool MetricsWriter::lock() {
  if (::flock(descriptor_.number(), LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK) return true;
  created_ = false;  // the other one writes to it
  return false;
}

/// Of another run, whose file this one replaces.
void MetricsWriter::drop_old_lines() {
  struct stat status = {};
  if (::fstat(descriptor_.number(), &status) == 0 && status.st_size == 0) return;
  cut(0);
}

void MetricsWriter::cut(Bytes size) {
  if (::ftruncate(descriptor_.number(), static_cast<off_t>(size)) == 0) return;
  const int error_number = errno;
  throw Error(ErrorCategory::io, fmt::format("cannot shorten {}", path_.string()), error_number);
}

void MetricsWriter::continue_after(Bytes bytes) {
  size_ = std::min(bytes, text::regular_file_size(descriptor_, path_, ErrorCategory::io));
  cut(size_);
  rows_ = 1;
}

Bytes MetricsWriter::sync() {
  text::sync_file(descriptor_, path_);
  return size_;
}

void MetricsWriter::write(const StepMetrics& metrics) {
  const auto line = to_json_line(metrics) + '\n';
  if (rows_ == 0 && !created_) drop_old_lines();
  try {
    text::write_fully(descriptor_, path_, std::as_bytes(std::span(line)));
  } catch (const Error&) {
    // Report the write error, not an error of the truncation.
    [[maybe_unused]] const int result =
        ::ftruncate(descriptor_.number(), static_cast<off_t>(size_));
    throw;
  }
  size_ += line.size();
  ++rows_;
}

}  // namespace ballast::train
