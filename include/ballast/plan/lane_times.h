#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ballast/plan/plan.h"

namespace ballast::plan {

/// The lanes in the order in which a parameter passes them, for drawings.
inline constexpr std::array<Lane, kLaneCount> kDrawnLanes = {
    Lane::fetch,  Lane::upload,  Lane::gather, Lane::compute,  Lane::peer,
    Lane::reduce, Lane::offload, Lane::update, Lane::writeback};

/// Returns the lanes of `devices` devices in the order of drawings: kind by kind, then by device.
std::vector<StreamId> drawn_lanes(std::uint32_t devices);

/// Returns the name of a lane of a rank with `devices` devices: "fetch", "compute", or
/// "compute, device 1" if there are several.
std::string name_of(const StreamId& lane, std::uint32_t devices);

/// Seconds of each lane of each device, by lane_number().
using LaneSeconds = std::array<double, lane_count(kMaxDevices)>;

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

/// The resource that bounds a step, predicted or measured. All texts about it are made from this.
struct Bottleneck {
  Lane lane = Lane::compute;   ///< the busiest one
  double share = 0.0;          ///< share of the time in which it is busy
  std::optional<Lane> second;  ///< the next busiest; empty if no other lane is used
  double second_share = 0.0;
  double compute = 0.0;  ///< share of the time in which the device computes

  /// Returns whether `lane` is busy for at least nine tenths of the time.
  [[nodiscard]] bool bounds() const;
  /// Returns whether that lane is compute, so that transfers and updates are hidden.
  [[nodiscard]] bool bound_by_compute() const { return bounds() && lane == Lane::compute; }
};

/// Finds the bottleneck of work that took `seconds` (above 0), in which each lane was busy for
/// `busy_seconds`.
Bottleneck find_bottleneck(const std::array<double, kLaneCount>& busy_seconds, double seconds);

/// Returns the resource that a lane uses: "compute", "update", "link", "NVMe", "network"
/// or "copies between devices".
std::string_view resource_of(Lane lane) noexcept;

/// Completes the sentence "the run is": "bound by compute (98% of the time): transfers are hidden".
std::string describe(const Bottleneck& bottleneck);

}  // namespace ballast::plan
