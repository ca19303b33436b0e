#include "ballast/plan/lane_times.h"

#include <algorithm>
#include <cstddef>
#include <vector>

#include <fmt/format.h>

#include "ballast/core/error.h"

namespace ballast::plan {

std::vector<StreamId> drawn_lanes(std::uint32_t devices) {
  std::vector<StreamId> lanes;
  for (const Lane lane : kDrawnLanes) {
    if (lane == Lane::peer && devices == 1) continue;
    const std::uint32_t count = is_per_device(lane) ? devices : 1;
    for (std::uint32_t d = 0; d < count; ++d) lanes.push_back({lane, static_cast<std::uint8_t>(d)});
  }
  return lanes;
}

std::string name_of(const StreamId& lane, std::uint32_t devices) {
  if (devices == 1 || !is_per_device(lane.lane)) return std::string(to_string(lane.lane));
  return fmt::format("{}, device {}", to_string(lane.lane), lane.device);
}

namespace {

constexpr double kBound = 0.9;
/// A lane that explains less than this share of compute's waiting does not cause it.
constexpr double kLeastCause = 0.3;

std::string percent(double share) {
  return fmt::format("{:.0f}%", 100.0 * share);
}

}  // namespace

bool Bottleneck::bounds() const {
  return share >= kBound;
}

Bottleneck find_bottleneck(const std::array<double, kLaneCount>& busy_seconds, double seconds) {
  expects(seconds > 0.0, "bottleneck: the time must be above 0");
  const auto busy = [&](Lane lane) { return busy_seconds.at(static_cast<std::size_t>(lane)); };
  std::vector<Lane> lanes;
  for (const Lane lane : kLanes) {
    if (busy(lane) > 0.0) lanes.push_back(lane);
  }
  std::stable_sort(lanes.begin(), lanes.end(), [&](Lane a, Lane b) { return busy(a) > busy(b); });
  Bottleneck found;
  if (!lanes.empty()) found.lane = lanes.front();
  found.share = busy(found.lane) / seconds;
  found.compute = busy(Lane::compute) / seconds;
  if (lanes.size() > 1) found.second = lanes[1];
  if (found.second) found.second_share = busy(*found.second) / seconds;
  return found;
}

std::string_view resource_of(Lane lane) noexcept {
  switch (lane) {
    case Lane::fetch:
    case Lane::writeback:
      return "NVMe";
    case Lane::upload:
    case Lane::offload:
      return "link";
    case Lane::gather:
    case Lane::reduce:
      return "network";
    case Lane::update:
      return "update";
    case Lane::peer:
      return "copies between devices";
    default:
      return "compute";
  }
}

std::string describe(const Bottleneck& b) {
  if (b.bound_by_compute()) {
    return fmt::format("bound by compute ({} of the time): transfers are hidden", percent(b.share));
  }
  const double waits = std::max(0.0, 1.0 - b.compute);
  if (b.bounds()) {
    return fmt::format("bound by {} ({} {} of the time); compute waits {} of the time",
                       resource_of(b.lane), to_string(b.lane), percent(b.share), percent(waits));
  }
  const bool other = b.lane != Lane::compute;
  const double share = other ? b.share : b.second_share;
  if ((!other && !b.second) || share < kLeastCause * waits) {
    return fmt::format(
        "bound by no lane: none is busy for long (compute {} of the time), the operations are too "
        "short",
        percent(b.compute));
  }
  return fmt::format(
      "bound by no lane alone: compute waits {} of the time; the busiest other lane is {} ({} of "
      "the time)",
      percent(waits), to_string(other ? b.lane : *b.second), percent(share));
}

}  // namespace ballast::plan
