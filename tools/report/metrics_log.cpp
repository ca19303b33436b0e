#include "tools/report/metrics_log.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>

#include "ballast/core/clocks.h"
#include "ballast/core/error.h"
#include "ballast/core/places.h"
#include "ballast/plan/lane_times.h"
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

namespace {

using text::Json;

/// Calls `use` with the begin and the end of each group of `rows` rows.
void for_each_group(std::size_t rows, std::size_t groups,
                    const std::function<void(std::size_t, std::size_t)>& use) {
  groups = std::min(groups, rows);
  for (std::size_t g = 0; g < groups; ++g) use(g * rows / groups, (g + 1) * rows / groups);
}

/// Rows of a group to draw, in ascending order.
std::vector<std::size_t> extremes(const std::vector<double>& values, std::size_t begin,
                                  std::size_t end) {
  constexpr std::size_t kNone = std::numeric_limits<std::size_t>::max();
  std::size_t least = kNone;
  std::size_t most = kNone;
  std::size_t not_finite = kNone;
  for (std::size_t i = begin; i < end; ++i) {
    if (!std::isfinite(values[i])) {
      not_finite = i;
      continue;
    }
    if (least == kNone || values[i] < values[least]) least = i;
    if (most == kNone || values[i] > values[most]) most = i;
  }
  std::vector<std::size_t> found;
  for (const std::size_t i : {least, most, not_finite}) {
    if (i != kNone) found.push_back(i);
  }
  std::sort(found.begin(), found.end());
  found.erase(std::unique(found.begin(), found.end()), found.end());
  return found;
}

double mean_of(const std::vector<double>& values, std::size_t begin, std::size_t end) {
  double sum = 0.0;
  std::size_t count = 0;
  for (std::size_t i = begin; i < end; ++i) {
    if (!std::isfinite(values[i])) continue;
    sum += values[i];
    ++count;
  }
  return count == 0 ? MetricsLog::kMissing : sum / static_cast<double>(count);
}

/// For each group, the mean or the greatest of the finite entries; null if there is none.
Json reduced(const MetricsLog& log, const std::string& key, std::size_t groups, bool greatest) {
  const std::vector<double> values = log.column(key);
  Json out = Json::array();
  for_each_group(log.rows(), groups, [&](std::size_t begin, std::size_t end) {
    const double mean = mean_of(values, begin, end);
    double most = mean;
    for (std::size_t i = begin; greatest && i < end; ++i) {
      if (std::isfinite(values[i])) most = std::max(most, values[i]);
    }
    out.push_back(most);
  });
  return out;
}

/// Rounds to the number of digits that a drawing can show.
Json rounded(const Json& values) {
  Json out = Json::array();
  for (const Json& value : values.elements()) {
    out.push_back(value.is_null() ? Json()
                                  : Json::number_of(fmt::format("{:.6g}", value.number())));
  }
  return out;
}

/// Means of groups of rows, each at its group's middle step.
Json mean_line(const std::vector<std::uint64_t>& steps, const std::vector<double>& values) {
  constexpr std::size_t kGroups = 400;
  Json middles = Json::array();
  Json means = Json::array();
  for_each_group(values.size(), kGroups, [&](std::size_t begin, std::size_t end) {
    middles.push_back(steps[(begin + end - 1) / 2]);
    means.push_back(mean_of(values, begin, end));
  });
  return Json::object({{"steps", middles}, {"values", rounded(means)}});
}

}  // namespace

Json series_json(const MetricsLog& log, const std::string& key, std::size_t groups) {
  const std::vector<double> column = log.column(key);
  std::vector<double> values;
  std::vector<std::uint64_t> steps;
  for (std::size_t i = 0; i < column.size(); ++i) {
    if (std::isnan(column[i])) continue;
    values.push_back(column[i]);
    steps.push_back(log.steps()[i]);
  }
  Json drawn_steps = Json::array();
  Json drawn_values = Json::array();
  const bool all = values.size() <= 2 * groups;
  for_each_group(values.size(), all ? values.size() : groups,
                 [&](std::size_t begin, std::size_t end) {
                   for (const std::size_t i : extremes(values, begin, end)) {
                     drawn_steps.push_back(steps[i]);
                     drawn_values.push_back(values[i]);
                   }
                 });
  const std::size_t per_group = all ? 1 : (values.size() + groups - 1) / groups;
  Json out = Json::object(
      {{"rows_per_group", per_group}, {"steps", drawn_steps}, {"values", drawn_values}});
  if (!all) out.add("mean", mean_line(steps, values));
  return out;
}

Json means_json(const MetricsLog& log, std::size_t groups) {
  Json first = Json::array();
  Json last = Json::array();
  for_each_group(log.rows(), groups, [&](std::size_t begin, std::size_t end) {
    first.push_back(log.steps()[begin]);
    last.push_back(log.steps()[end - 1]);
  });
  const std::uint32_t count = device_count(log);
  Json lanes = Json::object();
  for (const plan::Lane lane : plan::lanes_of(count)) {
    const std::string name(to_string(lane));
    const auto mean = [&](const std::string& key) {
      return rounded(reduced(log, key, groups, false));
    };
    lanes[name] = Json::object({{"busy_seconds", mean("lanes." + name + ".busy_seconds")},
                                {"stalled_seconds", mean("lanes." + name + ".stalled_seconds")},
                                {"bytes", mean("bytes." + name)}});
  }
  Json devices = Json::array();
  for (std::uint32_t d = 0; d < count && count > 1; ++d) {
    Json own = Json::object();
    for (const plan::Lane lane : plan::kDrawnLanes) {
      if (!is_per_device(lane)) continue;
      const std::string name(to_string(lane));
      const std::string key = fmt::format("devices.{}.lanes.{}.busy_seconds", d, name);
      own[name] = Json::object({{"busy_seconds", rounded(reduced(log, key, groups, false))}});
    }
    devices.push_back(own);
  }
  Json peaks = Json::object();
  for (const Tier tier : kTiers) {
    const std::string name(to_string(tier));
    peaks[name] = reduced(log, "peak_bytes." + name, groups, true);
  }
  return Json::object({{"first", first},
                       {"last", last},
                       {"step_seconds", rounded(reduced(log, "step_seconds", groups, false))},
                       {"lanes", lanes},
                       {"devices", devices},
                       {"peak_bytes", peaks}});
}

std::uint32_t device_count(const MetricsLog& log) {
  std::uint32_t count = 0;
  while (std::isfinite(log.last(fmt::format("devices.{}.peak_bytes", count)))) ++count;
  return std::max(count, 1U);
}

double median_of(const MetricsLog& log, const std::string& key) {
  std::vector<double> values = log.column(key);
  values.erase(std::remove_if(values.begin(), values.end(),
                              [](double value) { return !std::isfinite(value); }),
               values.end());
  return quantile(std::move(values), 0.5);
}

}  // namespace ballast::tools
