#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "ballast/schedule/plan.h"
#include "ballast/schedule/rates.h"
#include "ballast/schedule/timeline.h"

namespace ballast::schedule {

/// What a run of training steps will be like once it has settled.
struct Prediction {
  double step_seconds = 0.0;                         ///< from gate to gate
  std::array<double, kLaneCount> busy_seconds{};     ///< per step
  std::array<double, kLaneCount> stalled_seconds{};  ///< per step: waiting for inputs
  std::array<Bytes, kLaneCount> bytes{};             ///< per step
  /// Lanes by the time that a step would take if only they mattered, the largest first: the first
  /// is the bottleneck. Lanes that share a resource (reads and writes a disk, compute and update
  /// cores) count with what they take of it together.
  struct Bound {
    Lane lane = Lane::compute;
    double seconds = 0.0;
  };
  std::vector<Bound> bounds;
  Timeline timeline;  ///< of the measured steps, when asked for
};

struct SimulationOptions {
  std::uint32_t warm_up = 2;   ///< steps before those that count
  std::uint32_t measured = 3;  ///< steps that count, at least 1
  bool timeline = false;       ///< keep every operation's span
};

/// A discrete-event run of `schedule` (first, then steady steps) on a machine of those rates. The
/// executor's rules hold: one operation per lane at a time in plan order, none before what it
/// follows. Running operations share resources fairly. Throws Error(config) naming the rate that
/// the schedule needs and `rates` lacks.
Prediction simulate(const Schedule& schedule, const Workload& workload, const Rates& rates,
                    const SimulationOptions& options = {});

/// Seconds that `operation` takes when nothing else runs.
double seconds_alone(const Operation& operation, const Workload& workload, const Rates& rates);
/// The same where its lane has no time to lose: a queued one has the operation enqueued by then.
double seconds_in_turn(const Operation& operation, const Workload& workload, const Rates& rates);

}  // namespace ballast::schedule
