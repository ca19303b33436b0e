#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "ballast/plan/plan.h"
#include "ballast/plan/rates.h"
#include "ballast/plan/timeline.h"

namespace ballast::plan {

/// Predicted behaviour of training steps in steady state.
struct Prediction {
  double step_seconds = 0.0;  ///< from gate to gate
  // Lanes that each device of a rank has count with the mean of the devices.
  std::array<double, kLaneCount> busy_seconds{};     ///< per step
  std::array<double, kLaneCount> stalled_seconds{};  ///< per step: waiting for inputs
  std::vector<double> busy_seconds_by_number;        ///< per step, by lane_number()
  std::array<Bytes, kLaneCount> bytes{};             ///< per step
  /// Lower bound of each lane on the step's time, largest first: the first lane is the bottleneck.
  /// The use of a shared resource (disk, cores) is summed over its lanes.
  struct Bound {
    Lane lane = Lane::compute;
    double seconds = 0.0;
  };
  std::vector<Bound> bounds;
  Timeline timeline;  ///< timeline of the measured steps, if requested
};

struct SimulationOptions {
  std::uint32_t warm_up = 2;   ///< steps before the measured ones
  std::uint32_t measured = 3;  ///< measured steps, at least 1
  bool timeline = false;       ///< record every operation's span
};

/// Simulates `schedule` (first, then steady steps) by discrete events on a machine with `rates`. It
/// follows the executor's rules: one operation per lane at a time in plan order, each after its
/// inputs. Running operations share resources fairly. Throws MissingRate.
Prediction simulate(const Schedule& schedule, const Rates& rates,
                    const SimulationOptions& options = {});

/// Returns the seconds that `operation` of `schedule` takes if nothing else runs.
double seconds_alone(const Operation& operation, const Schedule& schedule, const Rates& rates);
/// Like seconds_alone(), if its lane is never idle: on a queued lane, launch and latency are then
/// hidden.
double seconds_in_turn(const Operation& operation, const Schedule& schedule, const Rates& rates);

}  // namespace ballast::plan
