#include "ballast/train/trace.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/text/json.h"

namespace ballast::train {

namespace {

using plan::Operation;
using plan::OpId;
using plan::Plan;
using plan::Span;
using text::Json;

// Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU; Perfetto
// reads the part in https://perfetto.dev/docs/getting-started/other-formats. Times are in
// microseconds.

constexpr std::size_t kFlushBytes = std::size_t{1} << 20;

bool trains(const Plan& plan) {
  return std::any_of(plan.operations.begin(), plan.operations.end(),
                     [](const Operation& o) { return o.action == plan::Action::pack; });
}

/// One submitted plan of the timeline and the spans of its operations.
struct TracedPlan {
  static constexpr std::size_t kMissing = ~std::size_t{0};

  const Plan* plan = nullptr;
  std::vector<std::size_t> span_of;  ///< index into the spans, or kMissing, by operation
  bool trains = false;
  std::uint64_t step = 0;  ///< training steps up to this run; 0: none yet
};

using Submissions = std::map<std::uint64_t, TracedPlan>;

Submissions collect_submissions(const std::vector<TracedOperation>& traced) {
  Submissions runs;
  for (std::size_t i = 0; i < traced.size(); ++i) {
    const Span& span = traced[i].span;
    TracedPlan& run = runs[span.run];
    if (run.plan == nullptr) {
      run.plan = span.plan;
      run.span_of.assign(run.plan->operations.size(), TracedPlan::kMissing);
    }
    run.span_of[span.op] = i;
  }
  std::uint64_t steps = 0;
  for (auto& [number, run] : runs) {
    run.trains = trains(*run.plan);
    steps += run.trains ? 1 : 0;
    run.step = steps;
  }
  return runs;
}

void add_edge(std::vector<TracedOperation>& traced, const TracedPlan& from_run, OpId from,
              const TracedPlan& to_run, OpId to) {
  const std::size_t start = from_run.span_of[from];
  const std::size_t end = to_run.span_of[to];
  if (start != TracedPlan::kMissing && end != TracedPlan::kMissing) {
    traced[end].after.push_back(start);
  }
}

/// Adds the edges that have spans at both ends.
void collect_edges(std::vector<TracedOperation>& traced, const Submissions& runs) {
  for (const auto& [number, run] : runs) {
    for (OpId id = 0; id < run.plan->operations.size(); ++id) {
      for (const OpId from : run.plan->operations[id].after) add_edge(traced, run, from, run, id);
    }
    // Seams exist only between consecutive runs.
    const auto before = runs.find(number - 1);
    if (before == runs.end()) continue;
    const auto seam = plan::seam(*before->second.plan, *run.plan);
    for (OpId id = 0; id < seam.size(); ++id) {
      for (const OpId from : seam[id]) add_edge(traced, before->second, from, run, id);
    }
  }
}

/// Returns the beginning of a trace of `process`, up to the first event.
std::string head_of(std::string_view process) {
  const Json name = Json::object({{"ph", "M"},
                                  {"pid", 1},
                                  {"name", "process_name"},
                                  {"args", Json::object({{"name", process}})}});
  return R"({"displayTimeUnit":"ns","traceEvents":[)"
         "\n" +
         name.compact();
}

class TraceWriter {
 public:
  TraceWriter(const std::filesystem::path& file, const text::OutputRule& rule,
              std::string_view process, const plan::Timeline& timeline,
              const step::OperationNames& names)
      : file_(file, rule),
        process_(process),
        names_(names),
        lanes_(plan::drawn_lanes(names.devices())),
        traced_(trace_operations(timeline)),
        departures_(traced_.size()) {
    if (!traced_.empty()) origin_ = traced_.front().span.start;
  }

  void write() {
    text_ = head_of(process_);
    metadata();
    number_arrows();
    std::uint64_t arrival = 0;
    for (std::size_t i = 0; i < traced_.size(); ++i) {
      slice(traced_[i]);
      for (std::size_t k = 0; k < traced_[i].after.size(); ++k) {
        arrow(++arrival, traced_[i].span, 'f');
      }
      for (const std::uint64_t id : departures_[i]) arrow(id, traced_[i].span, 's');
    }
    text_ += "\n]}\n";
    file_.write(text_);
    file_.commit();
  }

 private:
  /// Numbers arrows by their end.
  void number_arrows() {
    std::uint64_t arrow = 0;
    for (const TracedOperation& traced : traced_) {
      for (const std::size_t from : traced.after) departures_[from].push_back(++arrow);
    }
  }

  void add(const Json& event) {
    if (text_.size() >= kFlushBytes) {
      file_.write(text_);
      text_.clear();
    }
    text_ += ",\n";
    text_ += event.compact();
  }

  void metadata() {
    const auto name = [this](std::string_view what, Json event, Json args) {
      event["name"] = what;
      event["args"] = std::move(args);
      add(event);
    };
    for (std::size_t track = 1; track <= lanes_.size(); ++track) {
      const bool used = std::any_of(traced_.begin(), traced_.end(), [&](const auto& traced) {
        return track_of(traced.span.operation()) == track;
      });
      if (!used) continue;
      const Json event = Json::object({{"ph", "M"}, {"pid", 1}, {"tid", track}});
      const std::string lane = name_of(lanes_[track - 1], names_.devices());
      name("thread_name", event, Json::object({{"name", lane}}));
      name("thread_sort_index", event, Json::object({{"sort_index", track}}));
    }
  }

  /// Returns the number of an operation's track, from 1 at the top.
  [[nodiscard]] std::size_t track_of(const Operation& operation) const {
    const plan::StreamId lane = {operation.lane, operation.device};
    return static_cast<std::size_t>(std::find(lanes_.begin(), lanes_.end(), lane) -
                                    lanes_.begin()) +
           1;
  }

  [[nodiscard]] std::int64_t nanoseconds(double seconds) const {
    return std::llround((seconds - origin_) * 1e9);
  }

  static Json microseconds(std::int64_t nanoseconds) {
    return Json::number_of(fmt::format("{}.{:03}", nanoseconds / 1000, nanoseconds % 1000));
  }

  void slice(const TracedOperation& traced) {
    const Span& span = traced.span;
    const Operation& operation = span.operation();
    const std::int64_t start = nanoseconds(span.start);
    Json args = Json::object({{"block", operation.block},
                              {"block_name", names_.block_of(operation)},
                              {"micro_batch", operation.micro},
                              {"run", span.run}});
    if (traced.step > 0) args.add("step", traced.step);
    args.add("plan", span.plan->name);
    args.add("bytes", operation.bytes);
    args.add("flops", operation.flops);
    args.add("traffic", operation.traffic);
    add(Json::object({{"ph", "X"},
                      {"pid", 1},
                      {"tid", track_of(operation)},
                      {"name", names_(operation)},
                      {"cat", names_.kind_of(operation)},
                      {"ts", microseconds(start)},
                      {"dur", microseconds(nanoseconds(span.end) - start)},
                      {"args", std::move(args)}}));
  }

  /// An arrow starts in the last nanosecond of its slice and ends at the start of the other one,
  /// because viewers bind it to the slice that is open at that time.
  void arrow(std::uint64_t id, const Span& span, char phase) {
    const std::int64_t start = nanoseconds(span.start);
    const bool leaves = phase == 's';
    const std::int64_t end = leaves ? std::max(start, nanoseconds(span.end) - 1) : start;
    Json event = Json::object({{"ph", std::string(1, phase)},
                               {"id", id},
                               {"pid", 1},
                               {"tid", track_of(span.operation())},
                               {"name", "then"},
                               {"cat", process_},
                               {"ts", microseconds(end)}});
    if (!leaves) event.add("bp", "e");
    add(event);
  }

  text::OutputFile file_;
  std::string process_;
  const step::OperationNames& names_;
  std::vector<plan::StreamId> lanes_;  ///< by track
  std::vector<TracedOperation> traced_;
  double origin_ = 0.0;                                 ///< start of the first span
  std::vector<std::vector<std::uint64_t>> departures_;  ///< by operation: arrows that start there
  std::string text_;
};

}  // namespace

std::vector<TracedOperation> trace_operations(const plan::Timeline& timeline) {
  std::vector<TracedOperation> traced;
  traced.reserve(timeline.spans.size());
  for (const Span& span : timeline.spans) traced.push_back({.span = span});
  std::stable_sort(traced.begin(), traced.end(),
                   [](const auto& a, const auto& b) { return a.span.start < b.span.start; });
  const Submissions runs = collect_submissions(traced);
  for (TracedOperation& one : traced) {
    const TracedPlan& run = runs.at(one.span.run);
    // Updates during a step's forward pass belong to the preceding step; flushed ones to the last.
    const std::uint64_t lag = run.trains ? one.span.operation().lag : 0;
    if (run.step > lag) one.step = run.step - lag;
  }
  collect_edges(traced, runs);
  return traced;
}

text::OutputRule trace_rule(std::string_view process, bool overwrite,
                            std::vector<std::filesystem::path> inputs) {
  return {.kind = fmt::format("a trace of {}", process),
          .begins = head_of(process),
          .overwrite = overwrite,
          .inputs = std::move(inputs)};
}

void write_trace(const std::filesystem::path& file, const text::OutputRule& rule,
                 std::string_view process, const plan::Timeline& timeline,
                 const step::OperationNames& names) {
  TraceWriter(file, rule, process, timeline, names).write();
}

void RunTrace::begin(engine::Engine& engine) {
  if (!request_.file.empty()) engine.record(&timeline_);
}

bool RunTrace::ends_after(std::uint64_t step, const RunEnd& end) const {
  return !request_.file.empty() && step == std::min(request_.steps, end.steps());
}

void RunTrace::save(engine::Engine& engine) {
  if (request_.file.empty() || written_) return;
  engine.record(nullptr);
  written_ = true;
  try {
    write_trace(request_.file, rule_, kTracedProcess, timeline_,
                step::OperationNames(engine.blueprint().problem));
    file_ = request_.file;
  } catch (const Error& error) {
    log(LogLevel::warning, fmt::format("there is no trace: {}", error.what()));
  }
  timeline_.spans = {};
}

}  // namespace ballast::train
