#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "ballast/plan/lane_times.h"
#include "ballast/plan/plan.h"
#include "ballast/plan/rates.h"

namespace ballast::plan {

/// Work of a training step with recomputation: 2 FLOP per parameter and token in the forward pass,
/// 2 in its repetition, 4 in the backward pass.
inline constexpr double kFlopsPerParameterAndToken = 8.0;

/// NVMe traffic per parameter and step if the AdamW states of bf16 training are there: remainder (2
/// bytes) and two fp32 moments are read and written back.
inline constexpr double kNvmeStateBytesPerParameter = 20.0;

/// Returns T*, the minimum number of tokens per step at which computation hides moving
/// `bytes_per_parameter` per step: bytes / 8 x F / B, for every model size. `flops_per_second` (F):
/// achieved by the computation. `bytes_per_second` (B): bandwidth of the tier; counts both
/// directions if `bytes_per_parameter` does. All must be above 0, else throws Error(state).
double tokens_to_hide(double bytes_per_parameter, double flops_per_second, double bytes_per_second);

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
