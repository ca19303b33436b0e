#include "tools/report/metrics_log.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <span>
#include <utility>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>

#include "ballast/core/error.h"
#include "ballast/text/files.h"
#include "ballast/text/json.h"

namespace ballast::tools {
namespace {

constexpr std::size_t kTail = 256;
constexpr std::size_t kPart = std::size_t{4} << 20U;
constexpr std::size_t kLongestLine = std::size_t{16} << 20U;

std::string read_at(const Descriptor& file, const std::filesystem::path& path, Bytes offset,
                    std::size_t size) {
  std::string text(size, '\0');
  text::read_fully(file, path, offset, std::as_writable_bytes(std::span(text)));
  return text;
}

/// The entry of a column; nothing for values that are not drawn.
std::optional<double> entry_of(const text::Json& value) {
  if (value.is_number()) return value.number();
  if (value.is_boolean()) return value.flag() ? 1.0 : 0.0;
  if (value.is_null()) return MetricsLog::kNotFinite;
  return std::nullopt;
}

}  // namespace

const double MetricsLog::kMissing = std::numeric_limits<double>::quiet_NaN();
const double MetricsLog::kNotFinite = std::numeric_limits<double>::infinity();

MetricsLog::MetricsLog(std::filesystem::path file) : file_(std::move(file)) {}

void MetricsLog::restart() {
  ++restarts_;
  offset_ = 0;
  tail_.clear();
  begun_.clear();
  steps_.clear();
  columns_.clear();
  lines_ = bad_lines_ = 0;
  first_bad_.clear();
}

bool MetricsLog::update() {
  const Descriptor file = text::open_file(file_, O_RDONLY | O_NONBLOCK, ErrorCategory::io);
  const Bytes size = text::regular_file_size(file, file_, ErrorCategory::io);
  struct stat status = {};
  ::fstat(file.number(), &status);
  const bool replaced = status.st_ino != inode_ || size < offset_ + begun_.size() ||
                        read_at(file, file_, offset_ - tail_.size(), tail_.size()) != tail_;
  if (replaced) restart();
  inode_ = status.st_ino;
  const Bytes seen = offset_ + begun_.size();
  if (seen == size) return replaced;
  begun_.clear();
  while (offset_ + begun_.size() < size) {
    const Bytes at = offset_ + begun_.size();
    begun_ += read_at(file, file_, at, std::min<std::size_t>(kPart, size - at));
    const std::size_t whole = begun_.rfind('\n') + 1;  // 0 without one
    if (whole == 0 && begun_.size() > kLongestLine) {
      throw Error(ErrorCategory::data,
                  fmt::format("{}: line {} does not end; is this the metrics.jsonl of a run?",
                              file_.string(), lines_ + 1));
    }
    if (whole == 0) continue;
    const std::string text = begun_.substr(0, whole);
    begun_.erase(0, whole);
    offset_ += whole;
    tail_ = text.substr(text.size() - std::min(kTail, text.size()));
    read_lines(text);
  }
  if (rows() == 0 && bad_lines_ > 0) {
    throw Error(ErrorCategory::data,
                fmt::format("{}; is this the metrics.jsonl of a run?", first_bad_));
  }
  return true;
}

void MetricsLog::read_lines(std::string_view text) {
  while (!text.empty()) {
    const std::size_t end = text.find('\n');
    add(text.substr(0, end));
    text.remove_prefix(end + 1);
  }
}

void MetricsLog::add(std::string_view line) {
  ++lines_;
  const auto refuse = [&](const std::string& why) {
    if (bad_lines_++ == 0) first_bad_ = why;
  };
  const std::string name = fmt::format("{}: line {}", file_.string(), lines_);
  text::Json row;
  try {
    row = text::parse_json(line, name, {.category = ErrorCategory::data});
  } catch (const Error& error) {
    refuse(error.what());
    return;
  }
  const text::Json* step = row.find("step");
  const auto number = step == nullptr ? std::nullopt : step->whole();
  if (!number) {
    refuse(name + " has no step");
    return;
  }
  // A run that went back to a checkpoint has removed these rows. A file that was concatenated by
  // hand may contain them.
  drop_rows(static_cast<std::size_t>(std::lower_bound(steps_.begin(), steps_.end(), *number) -
                                     steps_.begin()));
  const std::size_t before = rows();
  const text::Json* targets = row.find("targets");
  const bool without_loss = targets != nullptr && targets->whole() == 0U;
  for_each_value(row, [&](const std::string& key, const text::Json& value) {
    const std::optional<double> entry = entry_of(value);
    if (!entry || (key == "loss" && without_loss)) return;
    Column& column = columns_[key];
    column.resize(before, kMissing);
    column.push_back(*entry);
  });
  steps_.push_back(*number);
}

void MetricsLog::drop_rows(std::size_t rows) {
  if (rows == steps_.size()) return;
  steps_.resize(rows);
  for (auto& [key, column] : columns_) column.resize(std::min(rows, column.size()));
}

std::vector<std::string> MetricsLog::keys() const {
  std::vector<std::string> keys;
  for (const auto& [key, column] : columns_) keys.push_back(key);
  return keys;
}

MetricsLog::Column MetricsLog::column(const std::string& key) const {
  const auto found = columns_.find(key);
  Column column = found == columns_.end() ? Column() : found->second;
  column.resize(rows(), kMissing);
  return column;
}

double MetricsLog::last(const std::string& key) const {
  const auto found = columns_.find(key);
  if (found == columns_.end()) return kMissing;
  const auto end = std::find_if(found->second.rbegin(), found->second.rend(),
                                [](double value) { return std::isfinite(value); });
  return end == found->second.rend() ? kMissing : *end;
}

std::vector<std::string> MetricsLog::notes() const {
  std::vector<std::string> notes;
  if (!begun_.empty()) {
    notes.push_back("The last line of metrics.jsonl is not complete; it is left out.");
  }
  if (bad_lines_ > 0) {
    notes.push_back(fmt::format(
        "{} line{} of metrics.jsonl cannot be read and {} left out; the first: {}", bad_lines_,
        bad_lines_ == 1 ? "" : "s", bad_lines_ == 1 ? "is" : "are", first_bad_));
  }
  return notes;
}

}  // namespace ballast::tools
