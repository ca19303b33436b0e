#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "ballast/plan/plan.h"

namespace ballast::plan {

/// The lanes in the order in which a parameter passes them, for drawings.
inline constexpr std::array<Lane, kLaneCount> kDrawnLanes = {
    Lane::fetch,  Lane::upload,  Lane::gather, Lane::compute,  Lane::pass,
    Lane::reduce, Lane::offload, Lane::update, Lane::writeback};

/// Returns the lanes of `devices` devices in the order of drawings: kind by kind, then by device.
std::vector<StreamId> drawn_lanes(std::uint32_t devices);

/// Returns the name of a lane of a rank with `devices` devices: "fetch", "compute", or
/// "compute, device 1" if there are several.
std::string name_of(const StreamId& lane, std::uint32_t devices);

/// Seconds of each lane of each device, by lane_number().
using LaneSeconds = std::array<double, lane_count(kMostDevices)>;

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
