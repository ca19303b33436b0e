#include "ballast/plan/timeline.h"

#include <fmt/format.h>

namespace ballast::plan {

std::vector<StreamId> drawn_lanes(std::uint32_t devices) {
  std::vector<StreamId> lanes;
  for (const Lane lane : kDrawnLanes) {
    if (lane == Lane::pass && devices == 1) continue;
    const std::uint32_t count = is_per_device(lane) ? devices : 1;
    for (std::uint32_t d = 0; d < count; ++d) lanes.push_back({lane, static_cast<std::uint8_t>(d)});
  }
  return lanes;
}

std::string name_of(const StreamId& lane, std::uint32_t devices) {
  if (devices == 1 || !is_per_device(lane.lane)) return std::string(to_string(lane.lane));
  return fmt::format("{}, device {}", to_string(lane.lane), lane.device);
}

}  // namespace ballast::plan
