#include "ballast/train/metrics.h"

#include <cerrno>
#include <charconv>
#include <cmath>
#include <fstream>
#include <string_view>
#include <system_error>
#include <utility>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <unistd.h>

#include "ballast/core/error.h"
#include "ballast/text/files.h"
#include "ballast/text/json.h"

#include "src/train/waiting_file.h"

namespace ballast::train {

using text::Json;

namespace {

bool is_locked_by_another(const text::AppendedFile& file) {
  return ::flock(file.descriptor().number(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK;
}

/// Returns the size of the leading complete lines of metrics.jsonl with steps up to `step`.
Bytes bytes_up_to(const std::filesystem::path& path, std::uint64_t step) {
  constexpr std::string_view kBegin = R"({"step":)";
  std::ifstream file(path, std::ios::binary);
  Bytes kept = 0;
  for (std::string line; std::getline(file, line) && !file.eof(); kept += line.size() + 1) {
    std::uint64_t own = 0;
    const char* const end = line.data() + line.size();
    if (!line.starts_with(kBegin)) break;
    const auto read = std::from_chars(line.data() + kBegin.size(), end, own);
    if (read.ec != std::errc{} || own > step) break;
  }
  return kept;
}

/// Returns the times of lanes: {"compute":{"busy_seconds":0.25,"stalled_seconds":0.5}}.
Json lanes_json(const std::map<std::string, double>& busy,
                const std::map<std::string, double>& stalled) {
  Json lanes = Json::object();
  for (const auto& [lane, seconds] : busy) lanes[lane]["busy_seconds"] = seconds;
  for (const auto& [lane, seconds] : stalled) lanes[lane]["stalled_seconds"] = seconds;
  return lanes;
}

}  // namespace

std::string to_json_line(const StepMetrics& metrics) {
  const Json lanes = lanes_json(metrics.busy_seconds, metrics.stalled_seconds);
  Json bytes = Json::object();
  for (const auto& [lane, count] : metrics.bytes) bytes[lane] = count;
  Json peak_bytes = Json::object();
  for (const auto& [tier, count] : metrics.peak_bytes) peak_bytes[tier] = count;
  Json line = Json::object({{"step", metrics.step},
                            {"loss", metrics.loss ? Json(*metrics.loss) : Json()},
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
  for (std::size_t d = 0; d < metrics.devices.size(); ++d) {
    const StepMetrics::Device& device = metrics.devices[d];
    line["devices"][std::to_string(d)] =
        Json::object({{"lanes", lanes_json(device.busy_seconds, device.stalled_seconds)},
                      {"peak_bytes", device.peak_bytes}});
  }
  if (!metrics.loss) line["targets"] = std::uint64_t{0};
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

MetricsWriter::MetricsWriter(const std::filesystem::path& path, Existing existing) {
  try {
    open(path, O_EXCL);
  } catch (const Error& error) {
    if (error.error_number() != EEXIST || existing == Existing::refused) throw;
    created_ = false;
    open(path, 0);
  }
}

void MetricsWriter::open(const std::filesystem::path& path, int flags) {
  const auto claim = [](const text::AppendedFile& file) {
    if (is_locked_by_another(file)) {
      throw Error(
          ErrorCategory::usage,
          fmt::format("{} was deleted, and another process writes it now", file.path().string()));
    }
  };
  file_ = std::make_unique<WaitingFile>(text::AppendedFile(path, flags), "", claim);
}

MetricsWriter::~MetricsWriter() {
  if (created_ && rows_ == 0) ::unlink(file_->path().c_str());
}

bool MetricsWriter::lock() {
  if (is_locked_by_another(file_->file())) {
    created_ = false;  // the other process writes to it
    return false;
  }
  const std::filesystem::path path = file_->path();
  if (created_ || !text::make_separate(path)) return true;
  log(LogLevel::info, fmt::format("{} was a link to a file with another name, perhaps of another "
                                  "run; it is a copy now",
                                  path.string()));
  open(path, 0);
  return !is_locked_by_another(file_->file());
}

void MetricsWriter::continue_after(std::uint64_t step) {
  file_->file().cut(bytes_up_to(file_->path(), step));
  file_->forget_after(step);
  rows_ = 1;
}

Bytes MetricsWriter::sync() {
  file_->flush();
  const text::AppendedFile& file = file_->file();
  try {
    text::sync_file(file.descriptor(), file.path());
  } catch (const Error& error) {
    log(LogLevel::warning, fmt::format("{}; training continues", error.what()));
  }
  return file_->size();
}

void MetricsWriter::write(const StepMetrics& metrics) {
  if (rows_ == 0 && !created_) file_->file().cut(0);  // the lines of another run
  file_->append(metrics.step, to_json_line(metrics) + '\n');
  if (!file_->failure()) ++rows_;
}

}  // namespace ballast::train
