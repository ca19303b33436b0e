#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string_view>
#include <utility>
#include <vector>

#include "ballast/engine/engine.h"
#include "ballast/plan/lane_times.h"
#include "ballast/step/plans.h"
#include "ballast/text/output_file.h"
#include "ballast/train/run_options.h"

namespace ballast::train {

/// One operation of a timeline.
struct TracedOperation {
  plan::Span span;
  std::uint64_t step = 0;          ///< training step from the beginning on, from 1; 0: before it
  std::vector<std::size_t> after;  ///< operations that it waited for, as indices into the result
};

/// Returns the operations of `timeline` by start time, with their edges, including edges between
/// plans.
std::vector<TracedOperation> trace_operations(const plan::Timeline& timeline);

/// Returns the output rule for traces of `process`: newer ones replace older ones.
text::OutputRule trace_rule(std::string_view process, bool overwrite,
                            std::vector<std::filesystem::path> inputs);

/// Writes `timeline` as a trace for Perfetto and chrome://tracing (JSON, "Trace Event Format"): one
/// track per lane, one slice per operation with block, micro-batch, step, bytes and FLOPs, and flow
/// arrows along the edges, including edges between plans. `process` names the group of tracks
/// ("ballast train", "simulated"). Steps count from the beginning of the timeline. Writes the file
/// atomically. Throws like text::OutputFile.
void write_trace(const std::filesystem::path& file, const text::OutputRule& rule,
                 std::string_view process, const plan::Timeline& timeline,
                 const step::OperationNames& names);

/// Name of the process in a run's trace: see write_trace().
constexpr std::string_view kTracedProcess = "ballast train";

/// The timeline of a run's first steps (TraceRequest), on rank 0. Write it before the engine is
/// destroyed, because it refers to the engine's plans.
class RunTrace {
 public:
  /// `rule`: rule for the trace file.
  RunTrace(const TraceRequest& request, text::OutputRule rule)
      : request_(request), rule_(std::move(rule)) {}

  /// Makes `engine` record from now on, if a trace is wanted.
  void begin(engine::Engine& engine);
  /// Returns whether the trace ends after step `step` of a run. Equal on all ranks.
  [[nodiscard]] bool ends_after(std::uint64_t step, const RunEnd& end) const;
  /// Ends the recording and writes the file, once. If it cannot be written, only warns, because the
  /// run is worth more than its trace.
  void save(engine::Engine& engine);
  /// Path of the file after it was written; "" before.
  [[nodiscard]] const std::filesystem::path& file() const { return file_; }

 private:
  TraceRequest request_;
  text::OutputRule rule_;
  plan::Timeline timeline_;
  bool written_ = false;
  std::filesystem::path file_;
};

}  // namespace ballast::train
