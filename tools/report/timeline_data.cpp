#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <map>
#include <optional>
#include <tuple>
#include <utility>

#include <fcntl.h>
#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/text/files.h"
#include "ballast/train/trace.h"

#include "tools/report/run_data.h"

namespace ballast::tools {
namespace {

using text::Json;
using Slice = LaneTimeline::Slice;

constexpr std::string_view kTraceHead = R"({"displayTimeUnit":"ns","traceEvents":[)";
constexpr Bytes kLargestTrace = Bytes{1} << 30U;

/// Builds the slices from the events of a trace, in which the ends of an arrow follow their slice.
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
    const Json* plan = args->find("plan");
    const bool trains = plan == nullptr || *plan != "evaluation";
    timeline_.slices.push_back({.lane = lanes_[number(event, "tid").value_or(0)],
                                .name = name == nullptr ? "" : name->text(),
                                .start = nanoseconds(event, "ts"),
                                .duration = nanoseconds(event, "dur"),
                                .step = trains ? number(*args, "step").value_or(0) : 0,
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

/// Begin and end of a step: from the end of the previous computation, of a step or an evaluation,
/// to the end of this one. A metrics row measures the same time. The first step of a
/// timeline begins with its computation.
struct StepWindow {
  std::uint64_t step = 0;
  std::int64_t from = 0;
  std::int64_t to = 0;
  bool whole = false;         ///< there is a computation before it
  std::int64_t computes = 0;  ///< when its computation begins
};

/// Excludes work between two steps, such as writing files, if the metrics have a step's time.
void fit_to(StepWindow& window, const StepSeconds& seconds) {
  const auto found = seconds.find(window.step);
  if (found == seconds.end()) return;
  const std::int64_t from = window.to - std::llround(1e9 * found->second);
  window.from = std::clamp(from, window.from, window.computes);
}

/// Finds the times at which lanes are busy. The slices are in the order of their starts.
class BusyTimes {
 public:
  explicit BusyTimes(const std::vector<Slice>& slices) : slices_(slices) {
    latest_end_.reserve(slices.size());
    for (const Slice& slice : slices) {
      const std::int64_t end = slice.start + slice.duration;
      latest_end_.push_back(latest_end_.empty() ? end : std::max(end, latest_end_.back()));
    }
  }

  /// The first moment from `time` on at which a lane is busy. Between two steps all lanes may be
  /// idle.
  [[nodiscard]] std::int64_t from(std::int64_t time) const {
    const auto later = std::upper_bound(
        slices_.begin(), slices_.end(), time,
        [](std::int64_t moment, const Slice& slice) { return moment < slice.start; });
    const auto before = static_cast<std::size_t>(later - slices_.begin());
    const bool busy = before > 0 && latest_end_[before - 1] > time;
    return busy || later == slices_.end() ? time : later->start;
  }

 private:
  const std::vector<Slice>& slices_;
  std::vector<std::int64_t> latest_end_;  ///< latest end of a slice and those before it
};

bool computes(const Slice& slice) {
  return slice.lane == "compute" || slice.lane.starts_with("compute, device ");
}

std::vector<StepWindow> windows_of(const std::vector<Slice>& slices) {
  const BusyTimes busy(slices);
  std::vector<StepWindow> windows;
  std::optional<std::int64_t> before;  // the end of the computation so far
  for (const Slice& slice : slices) {
    if (!computes(slice)) continue;
    const std::int64_t end = slice.start + slice.duration;
    if (slice.step != 0 && (windows.empty() || windows.back().step < slice.step)) {
      windows.push_back({.step = slice.step,
                         .from = before ? busy.from(*before) : slice.start,
                         .to = end,
                         .whole = before.has_value(),
                         .computes = slice.start});
    }
    if (slice.step != 0 && windows.back().step == slice.step) {
      windows.back().to = std::max(windows.back().to, end);
    }
    before = std::max(before.value_or(end), end);
  }
  return windows;
}

/// A slice that is drawn, or several successive short ones of a lane and step.
struct DrawnSlice {
  std::string lane;
  std::string name;
  std::int64_t start = 0;
  std::int64_t end = 0;
  std::uint64_t step = 0;
  std::uint64_t bytes = 0;
  bool critical = false;
  std::size_t count = 1;
};

/// Joins neighbours in their lane that are shorter than `shortest`, if the gaps between them are,
/// too.
std::vector<DrawnSlice> joined(const std::vector<DrawnSlice>& slices, std::int64_t shortest) {
  std::vector<DrawnSlice> out;
  std::map<std::string, std::size_t> last_of;
  for (const DrawnSlice& slice : slices) {
    const bool is_short = slice.end - slice.start < shortest;
    const auto [last, first] = last_of.try_emplace(slice.lane, out.size());
    if (!first) {
      DrawnSlice& before = out[last->second];
      // Groups stay short, so that the drawing shows where a lane has gaps.
      const bool joins = is_short && before.step == slice.step &&
                         slice.start - before.end < shortest &&
                         slice.end - before.start < 2 * shortest;
      if (joins) {
        before.end = std::max(before.end, slice.end);
        before.bytes += slice.bytes;
        before.critical = before.critical || slice.critical;
        before.count += slice.count;
        continue;
      }
      last->second = out.size();
    }
    out.push_back(slice);
  }
  return out;
}

struct Drawing {
  std::vector<DrawnSlice> slices;
  std::vector<StepWindow> steps;
  std::size_t left_out = 0;  ///< number of slices of other steps
};

/// Returns all slices, or those of the middle step if there are too many. If these are still too
/// many, joins the shortest until they can be drawn.
Drawing draw(const LaneTimeline& timeline, const StepSeconds& seconds) {
  constexpr std::size_t kMax = 20000;
  const std::vector<bool> critical = critical_slices(timeline.slices);
  Drawing drawing;
  drawing.steps = windows_of(timeline.slices);
  for (StepWindow& window : drawing.steps) fit_to(window, seconds);
  std::int64_t from = std::numeric_limits<std::int64_t>::min();
  std::int64_t to = std::numeric_limits<std::int64_t>::max();
  if (timeline.slices.size() > kMax && !drawing.steps.empty()) {
    const StepWindow middle = drawing.steps[drawing.steps.size() / 2];
    drawing.steps = {middle};
    std::tie(from, to) = std::pair(middle.from, middle.to);
  }
  for (std::size_t i = 0; i < timeline.slices.size(); ++i) {
    const Slice& slice = timeline.slices[i];
    const std::int64_t end = slice.start + slice.duration;
    if (end < from || slice.start > to) continue;
    drawing.slices.push_back(
        {slice.lane, slice.name, slice.start, end, slice.step, slice.bytes, critical[i]});
  }
  drawing.left_out = timeline.slices.size() - drawing.slices.size();
  if (drawing.slices.size() <= kMax) return drawing;
  const std::int64_t whole =
      std::max<std::int64_t>(1, drawing.slices.back().end - drawing.slices.front().start);
  for (std::int64_t shortest = whole / static_cast<std::int64_t>(kMax) + 1;
       drawing.slices.size() > kMax && shortest < 4 * whole; shortest *= 2) {
    drawing.slices = joined(drawing.slices, shortest);
  }
  return drawing;
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

LaneTimeline predicted_timeline(const plan::Timeline& timeline, const step::OperationNames& names) {
  LaneTimeline out = {.predicted = true, .source = "the simulator", .slices = {}};
  const auto traced = train::trace_operations(timeline);
  for (const train::TracedOperation& one : traced) {
    const double origin = traced.front().span.start;
    const plan::Operation& operation = one.span.operation();
    const auto start = std::llround((one.span.start - origin) * 1e9);
    const plan::StreamId lane = {operation.lane, operation.device};
    out.slices.push_back({.lane = name_of(lane, names.devices()),
                          .name = names(operation),
                          .start = start,
                          .duration = std::llround((one.span.end - origin) * 1e9) - start,
                          .step = one.step,
                          .bytes = operation.bytes,
                          .after = one.after});
  }
  return out;
}

Json timeline_json(const LaneTimeline& timeline, const StepSeconds& seconds) {
  const Drawing drawing = draw(timeline, timeline.predicted ? StepSeconds() : seconds);
  std::map<std::string, std::size_t> numbers;
  Json names = Json::array();
  Json out = Json::object({{"predicted", timeline.predicted},
                           {"source", timeline.source},
                           {"left_out", drawing.left_out}});
  Json steps = Json::array();
  for (const StepWindow& window : drawing.steps) {
    steps.push_back(Json::object({{"step", window.step},
                                  {"from", window.from},
                                  {"to", window.to},
                                  {"whole", window.whole}}));
  }
  out.add("steps", std::move(steps));
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
  std::size_t joined = 0;
  for (const DrawnSlice& slice : drawing.slices) {
    if (slice.count > 1) joined += slice.count;
    lane.push_back(number_of(slice.lane));
    name.push_back(
        number_of(slice.count > 1 ? fmt::format("{} operations", slice.count) : slice.name));
    start.push_back(slice.start);
    duration.push_back(slice.end - slice.start);
    step.push_back(slice.step);
    bytes.push_back(slice.bytes);
    on_path.push_back(slice.critical ? 1 : 0);
  }
  out.add("joined", joined);
  for (auto& [key, column] :
       {std::pair("names", &names), std::pair("lane", &lane), std::pair("name", &name),
        std::pair("start", &start), std::pair("duration", &duration), std::pair("step", &step),
        std::pair("bytes", &bytes), std::pair("critical", &on_path)}) {
    out.add(key, std::move(*column));
  }
  return out;
}

}  // namespace ballast::tools
