#include "src/calibrate/exchange_estimate.h"

#include <algorithm>
#include <barrier>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <limits>
#include <thread>
#include <vector>

#include "ballast/core/units.h"

namespace ballast::calibrate {

double estimate_exchange(std::uint32_t ranks) {
  using Clock = std::chrono::steady_clock;
  constexpr std::uint32_t kMostThreads = 64;
  constexpr int kTries = 4;  // the first one maps the memory
  constexpr Bytes kCopied = 64 * kMiB;
  const std::uint32_t threads = std::clamp(ranks, 2U, kMostThreads);
  const Bytes part = kCopied / threads;
  Clock::time_point start;
  double best = std::numeric_limits<double>::max();
  bool starts = false;
  std::barrier together(threads, [&]() noexcept {
    const auto now = Clock::now();
    starts = !starts;
    if (starts) {
      start = now;
    } else {
      best = std::min(best, std::chrono::duration<double>(now - start).count());
    }
  });
  std::vector<std::jthread> workers;
  for (std::uint32_t t = 0; t < threads; ++t) {
    workers.emplace_back([&together, part] {
      const std::vector<std::byte> from(part, std::byte{1});
      std::vector<std::byte> to(part);
      for (int i = 0; i < kTries; ++i) {
        together.arrive_and_wait();
        std::memcpy(to.data(), from.data(), part);
        together.arrive_and_wait();
      }
    });
  }
  workers.clear();  // joins them
  // With more ranks than threads, they share what the threads reach.
  const double all = static_cast<double>(part) * threads / std::max(best, 1e-9);
  return all / std::max(ranks, 2U) / 2.0;
}

}  // namespace ballast::calibrate
