#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <functional>
#include <thread>
#include <vector>

namespace ballast {

/// Calls task(i) for each i below `count` with at most `threads` threads, one of which is the
/// caller's. Each thread takes the smallest index that is left. `task` must not throw.
inline void run_in_parallel(std::size_t count, std::size_t threads,
                            const std::function<void(std::size_t)>& task) {
  std::atomic<std::size_t> next = 0;
  const auto work = [&] {
    for (std::size_t i = next++; i < count; i = next++) task(i);
  };
  std::vector<std::jthread> others;
  for (std::size_t t = 1; t < std::min(threads, count); ++t) others.emplace_back(work);
  work();
}

}  // namespace ballast
