#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "ballast/cpu_adam/updater.h"

namespace ballast::engine {

/// Calls `work(from, to)` for the parts of [0, count) in ascending order on all threads of `team`,
/// so that the threads work on neighbouring parts.
template <class Work>
void in_units(const cpu_adam::Updater& team, std::uint64_t count, std::uint64_t unit, Work work) {
  std::atomic<std::uint64_t> next = 0;
  team.for_ranges(static_cast<Elems>(team.threads()), [&](Elems, Elems) {
    for (auto from = next.fetch_add(unit); from < count; from = next.fetch_add(unit)) {
      work(from, std::min(count, from + unit));
    }
  });
}

}  // namespace ballast::engine
