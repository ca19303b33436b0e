#include "ballast/train/trace.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "ballast/text/files.h"
#include "ballast/text/json.h"

namespace ballast::train {
namespace {

using schedule::Lane;
using schedule::Operation;
using schedule::OpId;
using schedule::Plan;
using schedule::Span;
using text::Json;

// Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU, of which
// Perfetto reads https://perfetto.dev/docs/getting-started/other-formats. Times are in
// microseconds.

constexpr std::size_t kFlushBytes = std::size_t{1} << 20;

/// Tracks from top to bottom, in the order in which a parameter passes the lanes.
constexpr std::array<Lane, schedule::kLaneCount> kTracks = {
    Lane::fetch,  Lane::upload,  Lane::gather, Lane::compute,
    Lane::reduce, Lane::offload, Lane::update, Lane::writeback};

std::size_t track(Lane lane) {
  return static_cast<std::size_t>(std::find(kTracks.begin(), kTracks.end(), lane) -
                                  kTracks.begin()) +
         1;
}

bool trains(const Plan& plan) {
  return std::any_of(plan.operations.begin(), plan.operations.end(), [](const Operation& o) {
    return o.action == schedule::Action::pack_gradient;
  });
}

/// One submitted plan of the timeline and the spans of its operations.
struct Submission {
  static constexpr std::size_t kMissing = ~std::size_t{0};

  const Plan* plan = nullptr;
  std::vector<std::size_t> span_of;  ///< by operation: index into the spans, or kMissing
  bool trains = false;
  std::uint64_t step = 0;  ///< training steps up to this run; 0: none yet
};

class TraceWriter {
 public:
  TraceWriter(const std::filesystem::path& file, std::string_view process,
              const schedule::Timeline& timeline, const schedule::Workload& workload)
      : file_(file), process_(process), workload_(workload), spans_(timeline.spans) {
    std::stable_sort(spans_.begin(), spans_.end(),
                     [](const Span& a, const Span& b) { return a.start < b.start; });
    if (!spans_.empty()) origin_ = spans_.front().start;
    collect_runs();
  }

  void write() {
    text_ = R"({"displayTimeUnit":"ns","traceEvents":[)";
    metadata();
    collect_arrows();
    for (std::size_t i = 0; i < spans_.size(); ++i) {
      slice(spans_[i]);
      for (const std::uint64_t id : arrivals_[i]) arrow(id, spans_[i], 'f');
      for (const std::uint64_t id : departures_[i]) arrow(id, spans_[i], 's');
    }
    text_ += "\n]}\n";
    file_.write(text_);
    file_.commit();
  }

 private:
  void collect_runs() {
    for (std::size_t i = 0; i < spans_.size(); ++i) {
      Submission& run = runs_[spans_[i].run];
      if (run.plan == nullptr) {
        run.plan = spans_[i].plan;
        run.span_of.assign(run.plan->operations.size(), Submission::kMissing);
      }
      run.span_of[spans_[i].op] = i;
    }
    std::uint64_t steps = 0;
    for (auto& [number, run] : runs_) {
      run.trains = trains(*run.plan);
      steps += run.trains ? 1 : 0;
      run.step = steps;
    }
  }

  /// Arrows along the edges with spans at both ends.
  void collect_arrows() {
    arrivals_.resize(spans_.size());
    departures_.resize(spans_.size());
    for (const auto& [number, run] : runs_) {
      for (OpId id = 0; id < run.plan->operations.size(); ++id) {
        for (const OpId from : run.plan->operations[id].after) add_arrow(run, from, run, id);
      }
      // A seam joins only consecutive runs.
      const auto before = runs_.find(number - 1);
      if (before == runs_.end()) continue;
      const auto seam = schedule::seam(*before->second.plan, *run.plan);
      for (OpId id = 0; id < seam.size(); ++id) {
        for (const OpId from : seam[id]) add_arrow(before->second, from, run, id);
      }
    }
  }

  void add_arrow(const Submission& from_run, OpId from, const Submission& to_run, OpId to) {
    const std::size_t start = from_run.span_of[from];
    const std::size_t end = to_run.span_of[to];
    if (start == Submission::kMissing || end == Submission::kMissing) return;
    ++arrows_;
    departures_[start].push_back(arrows_);
    arrivals_[end].push_back(arrows_);
  }

  void add(const Json& event) {
    if (text_.size() >= kFlushBytes) {
      file_.write(text_);
      text_.clear();
    }
    text_ += first_ ? "\n" : ",\n";
    text_ += event.compact();
    first_ = false;
  }

  void metadata() {
    const auto name = [this](std::string_view what, Json event, Json args) {
      event["name"] = what;
      event["args"] = std::move(args);
      add(event);
    };
    name("process_name", Json::object({{"ph", "M"}, {"pid", 1}}),
         Json::object({{"name", process_}}));
    for (const Lane lane : kTracks) {
      const bool used = std::any_of(spans_.begin(), spans_.end(), [lane](const Span& span) {
        return span.operation().lane == lane;
      });
      if (!used) continue;
      const Json event = Json::object({{"ph", "M"}, {"pid", 1}, {"tid", track(lane)}});
      name("thread_name", event, Json::object({{"name", to_string(lane)}}));
      name("thread_sort_index", event, Json::object({{"sort_index", track(lane)}}));
    }
  }

  [[nodiscard]] std::int64_t nanoseconds(double seconds) const {
    return std::llround((seconds - origin_) * 1e9);
  }

  static Json microseconds(std::int64_t nanoseconds) {
    return Json::number_of(fmt::format("{}.{:03}", nanoseconds / 1000, nanoseconds % 1000));
  }

  void slice(const Span& span) {
    const Operation& operation = span.operation();
    const Submission& run = runs_.at(span.run);
    const std::int64_t start = nanoseconds(span.start);
    Json args = Json::object({{"block", operation.block},
                              {"block_name", workload_.blocks.at(operation.block).name},
                              {"micro_batch", operation.micro},
                              {"run", span.run}});
    // Updates during a step's forward pass belong to the step before; flushed ones to the last.
    const std::uint64_t lag = run.trains ? operation.lag : 0;
    if (run.step > lag) args.add("step", run.step - lag);
    args.add("plan", run.plan->name);
    args.add("bytes", operation.bytes);
    args.add("flops", operation.flops);
    args.add("traffic", operation.traffic);
    add(Json::object({{"ph", "X"},
                      {"pid", 1},
                      {"tid", track(operation.lane)},
                      {"name", describe(operation, workload_)},
                      {"cat", to_string(operation.action)},
                      {"ts", microseconds(start)},
                      {"dur", microseconds(nanoseconds(span.end) - start)},
                      {"args", std::move(args)}}));
  }

  /// An arrow starts in the last nanosecond of its slice and ends at the start of the other one,
  /// since a viewer binds it to the slice that is open at that time.
  void arrow(std::uint64_t id, const Span& span, char phase) {
    const std::int64_t start = nanoseconds(span.start);
    const bool leaves = phase == 's';
    const std::int64_t end = leaves ? std::max(start, nanoseconds(span.end) - 1) : start;
    Json event = Json::object({{"ph", std::string(1, phase)},
                               {"id", id},
                               {"pid", 1},
                               {"tid", track(span.operation().lane)},
                               {"name", "then"},
                               {"cat", process_},
                               {"ts", microseconds(end)}});
    if (!leaves) event.add("bp", "e");
    add(event);
  }

  text::ReplacedFile file_;
  std::string process_;
  const schedule::Workload& workload_;
  std::vector<Span> spans_;  ///< by start
  double origin_ = 0.0;      ///< start of the first span
  std::map<std::uint64_t, Submission> runs_;
  std::vector<std::vector<std::uint64_t>> arrivals_;    ///< by span: arrows that end there
  std::vector<std::vector<std::uint64_t>> departures_;  ///< by span: arrows that start there
  std::uint64_t arrows_ = 0;
  std::string text_;
  bool first_ = true;
};

}  // namespace

void check_trace_file(const std::filesystem::path& file) {
  const text::ReplacedFile probe(file);
}

void write_trace(const std::filesystem::path& file, std::string_view process,
                 const schedule::Timeline& timeline, const schedule::Workload& workload) {
  TraceWriter(file, process, timeline, workload).write();
}

}  // namespace ballast::train
