#pragma once

#include "ballast/plan/plan.h"
#include "ballast/plan/rates.h"

namespace ballast::plan {

/// Seconds of an operation if nothing else runs.
struct Cost {
  double lead = 0.0;  ///< launch and latency, before it uses a shared resource
  double work = 0.0;  ///< at full speed
  [[nodiscard]] double seconds() const { return lead + work; }
  /// Seconds if `lane` is never idle.
  [[nodiscard]] double seconds_in_turn(Lane lane) const {
    return is_queued(lane) ? work : seconds();
  }
};

/// Returns the cost of `operation`, one of `schedule`. Throws Error(config) with a rate that it
/// needs and `rates` omits.
Cost cost_of(const Operation& operation, const Schedule& schedule, const Rates& rates);

/// Throws Error(config) if `rates` omits how the lanes of `schedule` share disk and cores.
void check_sharing(const Schedule& schedule, const Rates& rates);

}  // namespace ballast::plan
