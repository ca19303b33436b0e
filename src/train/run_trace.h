#pragma once

#include "ballast/engine/engine.h"
#include "ballast/schedule/timeline.h"
#include "ballast/train/trainer.h"

namespace ballast::train {

/// The timeline of a run's first steps (TraceRequest), on rank 0. It refers to the plans of the
/// engine, which must live until it is written.
class RunTrace {
 public:
  explicit RunTrace(const TraceRequest& request) : request_(request) {}

  /// From now on `engine` records, if a trace is wanted.
  void begin(engine::Engine& engine);
  /// Whether the trace ends after step `step` of a run of `steps`. The same on all ranks.
  [[nodiscard]] bool ends_after(std::uint64_t step, std::uint64_t steps) const;
  /// Ends the recording and writes the file, once. Throws Error(io).
  void write(engine::Engine& engine);
  /// The same for a run that fails or goes back. Only logs its errors.
  void save(engine::Engine& engine);

 private:
  TraceRequest request_;
  schedule::Timeline timeline_;
  bool written_ = false;
};

}  // namespace ballast::train
