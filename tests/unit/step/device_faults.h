#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "ballast/step/labels.h"

namespace ballast::step {

/// An operation runs on the device of its block, unless devices share its lane, and uses the memory
/// of that device. A copy between devices writes to another one. Values may move on any device.
/// `dealt`: the device of each block. Returns what is wrong, if anything.
inline std::optional<std::string> find_device_fault(const Operation& operation,
                                                    const Schedule& schedule,
                                                    const std::vector<std::uint8_t>& dealt) {
  const bool shared = !plan::is_per_device(operation.lane);
  const bool moves_value =
      operation.payload == Payload::value && operation.action != Action::compute;
  const std::uint8_t own = shared ? std::uint8_t{0} : dealt[operation.block];
  if (operation.device >= schedule.devices ||
      ((shared || !moves_value) && operation.device != own)) {
    return "runs on another device than its block";
  }
  for (const Use& use : operation.uses) {
    const Buffer& buffer = schedule.buffers[use.buffer];
    const bool leaves = operation.action == Action::transfer && use.role == Role::target;
    if (buffer.tier == Tier::device && (buffer.device == operation.device) == leaves) {
      return fmt::format("uses '{}' of another device", buffer.name);
    }
  }
  return std::nullopt;
}

}  // namespace ballast::step
