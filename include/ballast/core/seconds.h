#pragma once

#include <chrono>
#include <ctime>

namespace ballast {

inline double seconds_between(std::chrono::steady_clock::time_point start,
                              std::chrono::steady_clock::time_point end) {
  return std::chrono::duration<double>(end - start).count();
}
inline double seconds_since(std::chrono::steady_clock::time_point start) {
  return seconds_between(start, std::chrono::steady_clock::now());
}

/// CPU time of all threads of this process so far.
inline double process_cpu_seconds() {
  timespec now{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

}  // namespace ballast
