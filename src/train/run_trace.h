#pragma once

#include <string_view>
#include <utility>

#include "ballast/engine/engine.h"
#include "ballast/plan/timeline.h"
#include "ballast/text/output_file.h"
#include "ballast/train/run_options.h"

#include "src/train/run_end.h"

namespace ballast::train {

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
