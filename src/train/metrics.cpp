#include "ballast/train/metrics.h"

#include <cerrno>
#include <cmath>
#include <utility>

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include "ballast/core/error.h"
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
  if (metrics.loss_scale) line["loss_scale"] = *metrics.loss_scale;
  if (metrics.skipped_batches > 0) line["skipped_batches"] = metrics.skipped_batches;
  if (metrics.experts) {
    line["experts"] = Json::object({{"balance_loss", metrics.experts->balance_loss},
                                    {"router_z_loss", metrics.experts->router_z_loss},
                                    {"largest_load", metrics.experts->largest_load},
                                    {"idle", metrics.experts->idle}});
  }
  if (metrics.rewards) {
    line["rewards"] = Json::object({{"chosen", metrics.rewards->chosen},
                                    {"rejected", metrics.rewards->rejected},
                                    {"accuracy", metrics.rewards->accuracy},
                                    {"margin", metrics.rewards->margin()}});
  }
  if (metrics.eval_loss) {
    line["eval_loss"] = *metrics.eval_loss;
    if (!metrics.rewards) line["eval_perplexity"] = std::exp(*metrics.eval_loss);
  }
  return line.compact();
}

MetricsWriter::MetricsWriter(std::filesystem::path path, Existing existing) {
  try {
    file_ = text::AppendedFile(path, O_EXCL);
  } catch (const Error& error) {
    if (error.error_number() != EEXIST || existing == Existing::refused) throw;
    created_ = false;
    file_ = text::AppendedFile(std::move(path), 0);
  }
}

MetricsWriter::~MetricsWriter() {
  if (created_ && rows_ == 0) ::unlink(file_.path().c_str());
}

bool MetricsWriter::lock() {
  const int file = file_.descriptor().number();
  if (::flock(file, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK) return true;
  created_ = false;  // the other one writes to it
  return false;
}

void MetricsWriter::continue_after(Bytes bytes) {
  file_.cut(bytes);
  rows_ = 1;
}

Bytes MetricsWriter::sync() {
  text::sync_file(file_.descriptor(), file_.path());
  return file_.size();
}

void MetricsWriter::write(const StepMetrics& metrics) {
  if (rows_ == 0 && !created_) file_.cut(0);  // the lines of another run
  file_.append(to_json_line(metrics) + '\n');
  ++rows_;
}

}  // namespace ballast::train
