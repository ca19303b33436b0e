#include "src/planning/advice.h"

#include <algorithm>

#include <fmt/format.h>

namespace ballast::planning {
namespace {

using schedule::Lane;

double busy(const schedule::LaneTotals& lanes, Lane lane) {
  return lanes.busy_seconds[static_cast<std::size_t>(lane)];
}

std::string remedy(Lane lane) {
  switch (lane) {
    case Lane::fetch:
    case Lane::writeback:
      return "raise ballast.host_bytes so that more blocks stay off the disk, or use a faster "
             "drive";
    case Lane::upload:
    case Lane::offload:
      return "raise ballast.device_bytes so that more weights stay on the device";
    case Lane::update:
      return "raise ballast.update_threads, or keep more states on the device";
    default:
      return "check the lane times in metrics.jsonl";
  }
}

}  // namespace

std::string advise(const engine::Blueprint& blueprint, const schedule::LaneTotals& lanes,
                   double seconds) {
  if (seconds <= 0.0) return "no step was run";
  const double compute = busy(lanes, Lane::compute);
  const double share = compute / seconds;
  Lane slowest = Lane::upload;
  for (const Lane lane : schedule::kLanes) {
    if (lane != Lane::compute && busy(lanes, lane) > busy(lanes, slowest)) slowest = lane;
  }
  const std::uint64_t tokens = blueprint.workload.tokens_per_step();
  const double waiting = std::max(0.0, 1.0 - share);
  if (waiting < 0.1) {
    return fmt::format(
        "At {} tokens per step the run is bound by compute ({:.0f}% of the time): "
        "transfers are hidden.",
        tokens, 100.0 * share);
  }
  if (busy(lanes, slowest) < 0.3 * waiting * seconds) {
    return fmt::format(
        "At {} tokens per step no lane is busy for long (compute {:.0f}% of the time): the "
        "operations are too short. Larger micro-batches would help.",
        tokens, 100.0 * share);
  }
  return fmt::format(
      "At {} tokens per step compute waits {:.0f}% of the time; the busiest other lane is {} "
      "({:.0f}% of the time). More tokens per step (gradient_accumulation_steps) spread its cost; "
      "or {}.",
      tokens, 100.0 * waiting, to_string(slowest), 100.0 * busy(lanes, slowest) / seconds,
      remedy(slowest));
}

}  // namespace ballast::planning
