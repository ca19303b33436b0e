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

/// Fills in budgets that are 0 ("auto"); named ones are kept as they are. A device with memory of
/// its own, of which `on_device` bytes are free, gets them but for 1.5 GiB, or a twentieth of them,
/// for its libraries (a quarter at most), and the host tier four fifths of `available`. On the host
/// device (0) both tiers share the machine's memory: together they take at most those four fifths,
/// a named budget first, the other half and half.
Budgets resolve_budgets(Budgets wanted, Bytes available, Bytes on_device = 0);

}  // namespace ballast::memory
