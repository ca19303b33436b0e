#pragma once

#include <array>
#include <functional>
#include <vector>

#include "ballast/plan/plan.h"

namespace ballast::plan {

/// The order in which some operations of a plan start, across all lanes of a device.
struct Turns {
  std::array<std::vector<OpId>, kMostDevices> order;  ///< by device
  std::vector<bool> taken;                            ///< by operation: whether it is in an order
};

/// Returns the turns of the operations that `takes_turn` selects. They have the order in which the
/// operations would start if each operation of the plan took the same time. So they depend on the
/// plan alone, the turns of a lane are in plan order, an operation comes after all operations that
/// it needs, and operations of different lanes alternate as they do in a run.
Turns turns_of(const Plan& plan, const std::function<bool(const Operation&)>& takes_turn);

}  // namespace ballast::plan
