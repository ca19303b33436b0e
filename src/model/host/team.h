#pragma once

#include <algorithm>
#include <cstddef>
#include <exception>
#include <utility>

#include <omp.h>

#include "ballast/core/clocks.h"

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

/// Number of threads in the calling thread's next parallel region.
inline std::size_t team_size() {
  return static_cast<std::size_t>(omp_get_max_threads());
}

/// Part `index` of [0, size) cut into `parts` nearly equal ranges.
struct Range {
  std::size_t begin = 0;
  std::size_t end = 0;
  [[nodiscard]] std::size_t size() const { return end - begin; }
};
inline Range range_of(std::size_t size, std::size_t parts, std::size_t index) {
  return {size * index / parts, size * (index + 1) / parts};
}

/// Part `index` of [0, size) if all parts start at multiples of `step`.
inline Range range_in_steps(std::size_t size, std::size_t step, std::size_t parts,
                            std::size_t index) {
  const Range steps = range_of((size + step - 1) / step, parts, index);
  return {steps.begin * step, std::min(steps.end * step, size)};
}

/// Calls body(part) for part in [0, parts). Part p always runs on thread p, so results that depend
/// on the split do not depend on timing. Rethrows the first exception.
template <class Body>
void on_team(std::size_t parts, const Body& body) {
  keep_waits_short(static_cast<int>(parts));
  std::exception_ptr failure;
#pragma omp parallel for schedule(static, 1) num_threads(static_cast <int>(parts))
  for (std::size_t part = 0; part < parts; ++part) {
    try {
      body(part);
    } catch (...) {
#pragma omp critical(ballast_on_team)
      if (!failure) failure = std::current_exception();
    }
  }
  if (failure) std::rethrow_exception(failure);
}

/// Calls body(Range) for one range of [0, size) per thread; ranges start at multiples of `step`.
template <class Body>
void split(std::size_t size, std::size_t step, const Body& body) {
  const std::size_t parts = team_size();
  on_team(parts, [&](std::size_t part) {
    const Range here = range_in_steps(size, step, parts, part);
    if (here.begin < here.end) body(here);
  });
}

/// Calls split() as a kernel of `group`.
template <class Body>
void split(KernelGroup group, std::size_t size, std::size_t step, const Body& body) {
  const KernelClock clock(group);
  split(size, step, body);
}

/// Makes parallel regions of this thread single-threaded during its lifetime.
class SingleThreaded {
 public:
  SingleThreaded() : before_(omp_get_max_threads()) { omp_set_num_threads(1); }
  ~SingleThreaded() { omp_set_num_threads(before_); }
  SingleThreaded(const SingleThreaded&) = delete;
  SingleThreaded& operator=(const SingleThreaded&) = delete;

 private:
  int before_;
};

}  // namespace ballast::model::host
