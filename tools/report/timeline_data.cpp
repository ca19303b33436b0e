#include "tools/report/timeline_data.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <map>
#include <optional>
#include <utility>

#include <fcntl.h>
#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/text/files.h"
#include "ballast/train/trace.h"

namespace ballast::tools {
namespace {

using text::Json;
using Slice = LaneTimeline::Slice;

constexpr std::string_view kTraceHead = R"({"displayTimeUnit":"ns","traceEvents":[)";
constexpr Bytes kLargestTrace = Bytes{1} << 30U;

/// Builds the slices from the events of a trace, which has an arrow's ends behind their slice.
class TraceReader {
 public:
  explicit TraceReader(std::string name) : name_(std::move(name)) {}

  void read(std::string_view line) {
    ++line_;
    while (!line.empty() && (line.back() == ',' || line.back() == '\r')) line.remove_suffix(1);
    if (line.empty() || line.front() != '{') return;
    const std::string where = fmt::format("{}: line {}", name_, line_);
    const Json event = text::parse_json(line, where, {.category = ErrorCategory::data});
    const Json* phase = event.find("ph");
    if (phase == nullptr) return;
    if (*phase == "M") add_name(event);
    if (*phase == "X") add_slice(event);
    if (timeline_.slices.empty()) return;
    const std::uint64_t id = number(event, "id").value_or(0);
    if (*phase == "s") departures_[id] = timeline_.slices.size() - 1;
    if (*phase == "f") arrivals_[id] = timeline_.slices.size() - 1;
  }

  LaneTimeline finish() {
    for (const auto& [id, slice] : arrivals_) {
      const auto from = departures_.find(id);
      if (from != departures_.end()) timeline_.slices[slice].after.push_back(from->second);
    }
    return std::move(timeline_);
  }

 private:
  static std::optional<std::uint64_t> number(const Json& object, const char* key) {
    const Json* value = object.find(key);
    return value == nullptr ? std::nullopt : value->whole();
  }

  static std::int64_t nanoseconds(const Json& event, const char* key) {
    const Json* value = event.find(key);
    return value == nullptr || !value->is_number() ? 0 : std::llround(value->number() * 1e3);
  }

  void add_name(const Json& event) {
    const Json* what = event.find("name");
    const Json* args = event.find("args");
    const Json* name = args == nullptr ? nullptr : args->find("name");
    if (what == nullptr || name == nullptr) return;
    if (*what == "thread_name") lanes_[number(event, "tid").value_or(0)] = name->text();
    if (*what == "process_name") timeline_.predicted = *name == "simulated";
  }

  void add_slice(const Json& event) {
    const Json empty;
    const Json* args = event.find("args");
    if (args == nullptr) args = &empty;
    const Json* name = event.find("name");
    timeline_.slices.push_back({.lane = lanes_[number(event, "tid").value_or(0)],
                                .name = name == nullptr ? "" : name->text(),
                                .start = nanoseconds(event, "ts"),
                                .duration = nanoseconds(event, "dur"),
                                .step = number(*args, "step").value_or(0),
                                .bytes = number(*args, "bytes").value_or(0)});
  }

  std::string name_;
  std::uint64_t line_ = 0;
  LaneTimeline timeline_;
  std::map<std::uint64_t, std::string> lanes_;
  std::map<std::uint64_t, std::size_t> departures_;
  std::map<std::uint64_t, std::size_t> arrivals_;
};

/// Marks the slices of the chain that ends last.
std::vector<bool> critical_slices(const std::vector<Slice>& slices) {
  const auto end_of = [&](std::size_t i) { return slices[i].start + slices[i].duration; };
  std::vector<bool> critical(slices.size());
  std::map<std::string, std::size_t> last_of;
  std::vector<std::optional<std::size_t>> before(slices.size());
  for (std::size_t i = 0; i < slices.size(); ++i) {
    const auto [last, first] = last_of.try_emplace(slices[i].lane, i);
    if (!first) before[i] = std::exchange(last->second, i);
  }
  std::optional<std::size_t> at;
  for (std::size_t i = 0; i < slices.size(); ++i) {
    if (!at || end_of(i) > end_of(*at)) at = i;
  }
  while (at && !critical[*at]) {
    critical[*at] = true;
    std::optional<std::size_t> latest = before[*at];
    for (const std::size_t from : slices[*at].after) {
      if (!latest || end_of(from) >= end_of(*latest)) latest = from;
    }
    at = latest;
  }
  return critical;
}

/// The slices to draw: all, or those beside the computation of one step if there are too many.
std::vector<std::size_t> drawn_slices(const LaneTimeline& timeline) {
  constexpr std::size_t kMost = 20000;
  const std::vector<Slice>& slices = timeline.slices;
  std::vector<std::size_t> drawn;
  const auto select = [&](std::int64_t from, std::int64_t to) {
    drawn.clear();
    for (std::size_t i = 0; i < slices.size(); ++i) {
      if (slices[i].start + slices[i].duration >= from && slices[i].start <= to) drawn.push_back(i);
    }
  };
  constexpr auto kNever = std::numeric_limits<std::int64_t>::max();
  select(-kNever, kNever);
  if (drawn.size() <= kMost) return drawn;
  std::map<std::uint64_t, std::pair<std::int64_t, std::int64_t>> steps;  // start and end
  for (const Slice& slice : slices) {
    if (slice.step == 0 || slice.lane != "compute") continue;
    auto& [from, to] = steps.try_emplace(slice.step, kNever, -kNever).first->second;
    from = std::min(from, slice.start);
    to = std::max(to, slice.start + slice.duration);
  }
  if (!steps.empty()) {
    const auto middle = std::next(steps.begin(), static_cast<std::ptrdiff_t>(steps.size() / 2));
    select(middle->second.first, middle->second.second);
  }
  if (drawn.size() > kMost) drawn.resize(kMost);
  return drawn;
}

}  // namespace

LaneTimeline read_trace(const std::filesystem::path& file) {
  const Descriptor open = text::open_file(file, O_RDONLY | O_NONBLOCK, ErrorCategory::io);
  const Bytes size = text::regular_file_size(open, file, ErrorCategory::io);
  if (size > kLargestTrace) {
    throw Error(ErrorCategory::data,
                fmt::format("{} has {}, more than a report reads ({}); trace "
                            "fewer steps with --trace-steps",
                            file.string(), format_bytes(size), format_bytes(kLargestTrace)));
  }
  std::string text(size, '\0');
  text::read_fully(open, file, 0, std::as_writable_bytes(std::span(text)));
  if (!text.starts_with(kTraceHead)) {
    throw Error(ErrorCategory::data,
                fmt::format("{} is not a trace of ballast train --trace or ballast plan --trace",
                            file.string()));
  }
  TraceReader reader(file.string());
  for (std::string_view rest = text; !rest.empty();) {
    const std::size_t end = rest.find('\n');
    const std::string_view line = rest.substr(0, end);
    reader.read(line == kTraceHead ? std::string_view() : line);
    rest.remove_prefix(end == std::string_view::npos ? rest.size() : end + 1);
  }
  LaneTimeline timeline = reader.finish();
  timeline.source = file.string();
  return timeline;
}

LaneTimeline predicted_timeline(const schedule::Timeline& timeline,
                                const schedule::Workload& workload) {
  LaneTimeline out = {.predicted = true, .source = "the simulator", .slices = {}};
  const auto traced = train::trace_operations(timeline);
  for (const train::TracedOperation& one : traced) {
    const double origin = traced.front().span.start;
    const schedule::Operation& operation = one.span.operation();
    const auto start = std::llround((one.span.start - origin) * 1e9);
    out.slices.push_back({.lane = std::string(to_string(operation.lane)),
                          .name = describe(operation, workload),
                          .start = start,
                          .duration = std::llround((one.span.end - origin) * 1e9) - start,
                          .step = one.step,
                          .bytes = operation.bytes,
                          .after = one.after});
  }
  return out;
}

Json timeline_json(const LaneTimeline& timeline) {
  const std::vector<bool> critical = critical_slices(timeline.slices);
  const std::vector<std::size_t> drawn = drawn_slices(timeline);
  std::map<std::string, std::size_t> numbers;
  Json names = Json::array();
  Json out = Json::object({{"predicted", timeline.predicted},
                           {"source", timeline.source},
                           {"left_out", timeline.slices.size() - drawn.size()}});
  Json lane = Json::array();
  Json name = Json::array();
  Json start = Json::array();
  Json duration = Json::array();
  Json step = Json::array();
  Json bytes = Json::array();
  Json on_path = Json::array();
  const auto number_of = [&](const std::string& text) {
    const auto [found, added] = numbers.try_emplace(text, numbers.size());
    if (added) names.push_back(text);
    return found->second;
  };
  for (const std::size_t i : drawn) {
    const Slice& slice = timeline.slices[i];
    lane.push_back(number_of(slice.lane));
    name.push_back(number_of(slice.name));
    start.push_back(slice.start);
    duration.push_back(slice.duration);
    step.push_back(slice.step);
    bytes.push_back(slice.bytes);
    on_path.push_back(critical[i] ? 1 : 0);
  }
  for (auto& [key, column] :
       {std::pair("names", &names), std::pair("lane", &lane), std::pair("name", &name),
        std::pair("start", &start), std::pair("duration", &duration), std::pair("step", &step),
        std::pair("bytes", &bytes), std::pair("critical", &on_path)}) {
    out.add(key, std::move(*column));
  }
  return out;
}

}  // namespace ballast::tools
