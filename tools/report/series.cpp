#include "tools/report/series.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "ballast/core/tier.h"
#include "ballast/plan/timeline.h"

#include "tools/quantile.h"

namespace ballast::tools {
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
