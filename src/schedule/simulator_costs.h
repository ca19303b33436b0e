#pragma once

#include "ballast/schedule/plan.h"
#include "ballast/schedule/rates.h"

namespace ballast::schedule {

/// Seconds of an operation that has everything to itself.
struct Cost {
  double lead = 0.0;  ///< before it uses anything shared: launch and latency
  double work = 0.0;  ///< at full speed
  [[nodiscard]] double seconds() const { return lead + work; }
  /// Where `lane` has no time to lose.
  [[nodiscard]] double seconds_in_turn(Lane lane) const {
    return is_queued(lane) ? work : seconds();
  }
};

/// Throws Error(config) naming the rate that `operation` needs and `rates` lacks.
Cost cost_of(const Operation& operation, const Workload& workload, const Rates& rates);

/// Throws Error(config) when `rates` cannot tell how the lanes of `schedule` share disk and cores.
void check_sharing(const Schedule& schedule, const Rates& rates);

}  // namespace ballast::schedule
