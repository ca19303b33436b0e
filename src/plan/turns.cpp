#include "src/plan/turns.h"

#include <algorithm>
#include <cstdint>

namespace ballast::plan {

Turns turns_of(const Plan& plan, const std::function<bool(const Operation&)>& takes_turn) {
  std::vector<std::uint64_t> begins;
  begins.reserve(plan.operations.size());
  std::vector<std::uint64_t> free(lane_count(kMostDevices), 0);
  Turns turns;
  for (const Operation& operation : plan.operations) {
    std::uint64_t& lane_free = free[lane_number(operation)];
    std::uint64_t begin = lane_free;
    for (const OpId before : operation.after) begin = std::max(begin, begins[before] + 1);
    lane_free = begin + 1;
    const bool taken = takes_turn(operation);
    if (taken) turns.order[operation.device].push_back(static_cast<OpId>(begins.size()));
    turns.taken.push_back(taken);
    begins.push_back(begin);
  }
  for (std::vector<OpId>& order : turns.order) {
    std::stable_sort(order.begin(), order.end(),
                     [&](OpId a, OpId b) { return begins[a] < begins[b]; });
  }
  return turns;
}

}  // namespace ballast::plan
