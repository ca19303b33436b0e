#pragma once

namespace ballast::model::host {

/// Makes the OpenMP threads of this process sleep soon when they wait for each other, unless
/// OMP_WAIT_POLICY or GOMP_SPINCOUNT says how they wait. By default those of GCC spin for
/// milliseconds, and on a CPU that others use, the thread they wait for cannot run meanwhile.
/// `team`: threads of the team that computes. Only the first call with at least two has an effect.
///
/// GCC has no function for this, but it shortens the spin to 100 rounds when a process has more
/// OpenMP threads than CPUs (libgomp manual, GOMP_SPINCOUNT). So this starts as many threads as are
/// missing, at least two; they sleep until the process ends.
void keep_waits_short(int team);

}  // namespace ballast::model::host
