#pragma once

namespace ballast::model::host {

/// Makes the OpenMP threads of this process sleep soon when they wait for each other, unless
/// OMP_WAIT_POLICY or GOMP_SPINCOUNT is set. By default GCC's threads spin for milliseconds. On a
/// busy CPU, the thread that they wait for cannot run during that time. `team`: number of threads
/// that compute. Only the first call with at least two has an effect.
///
/// GCC has no function for this. But it shortens the spin to 100 rounds when a process has more
/// OpenMP threads than CPUs (libgomp manual, GOMP_SPINCOUNT). So this function starts the missing
/// threads, at least two; they sleep until the process ends.
void keep_waits_short(int team);

}  // namespace ballast::model::host
