#pragma once

#include "ballast/core/units.h"

namespace ballast::memory {

/// Memory that this process may still take: the smallest of the machine's available memory and the
/// room left in the process's cgroup (v1 or v2), in bytes.
Bytes available_memory();

/// Largest resident size of this process so far (VmHWM), in bytes; 0 if /proc does not tell.
Bytes peak_resident_bytes();

/// How much each memory tier may hold.
struct Budgets {
  Bytes device = 0;
  Bytes host = 0;
};

/// Fills in budgets that are 0 ("auto"). On the host device both tiers share the machine's memory:
/// together they take at most four fifths of `available`, a named budget first, the other half and
/// half. A named budget is kept as it is.
Budgets resolve_budgets(Budgets wanted, Bytes available);

}  // namespace ballast::memory
