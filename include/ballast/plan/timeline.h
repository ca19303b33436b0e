#pragma once

#include <cstdint>
#include <vector>

#include "ballast/plan/plan.h"

namespace ballast::plan {

/// Start and end of one operation, measured by the executor or predicted by the simulator, in
/// seconds since the executor or the simulation began.
struct Span {
  const Plan* plan = nullptr;
  OpId op = kNoOp;
  std::uint64_t run = 0;  ///< runs are numbered in the order of submission
  double start = 0.0;
  double end = 0.0;

  [[nodiscard]] const Operation& operation() const { return plan->operations[op]; }
};

/// Operations in order of completion. The plans must outlive it.
struct Timeline {
  std::vector<Span> spans;
};

}  // namespace ballast::plan
