#include <algorithm>
#include <array>
#include <chrono>
#include <numeric>
#include <vector>

#include "ballast/core/seconds.h"
#include "ballast/device/host_stream.h"

#include "src/model/host/factories.h"
#include "src/model/host/products.h"
#include "src/model/host/team.h"

namespace ballast::model::host {
namespace {

using Clock = std::chrono::steady_clock;

/// CPU seconds used by a thread of the team, on average. Each thread reads its own clock: the clock
/// of the process includes other running threads only up to the kernel's last tick, which is too
/// coarse for a short product.
double team_cpu_seconds() {
  std::vector<double> used(team_size());
  on_team(used.size(), [&used](std::size_t part) { used[part] = thread_cpu_seconds(); });
  return std::accumulate(used.begin(), used.end(), 0.0) / static_cast<double>(used.size());
}

/// Best rate of products of n x n matrices, repeated for about `seconds` but at least twice. The
/// first product, not counted, warms up caches and makes the primitive.
template <class T>
double best_rate(Products& products, std::size_t n, double seconds) {
  // Any normal number. Zeros could be faster.
  const auto one = from_float<T>(0.5F);
  const std::vector<T> a(n * n, one);
  const std::vector<T> b(n * n, one);
  std::vector<T> c(n * n);
  const auto multiply = [&] {
    products.multiply({n, n, n}, matrix(a.data(), n), matrix(b.data(), n), matrix(c.data(), n));
  };
  multiply();
  double fastest = 1e30;
  double least_busy = 1e30;  // CPU seconds per thread
  const auto start = Clock::now();
  for (int runs = 0; runs < 2 || seconds_since(start) < seconds; ++runs) {
    const double cpu = team_cpu_seconds();
    const auto before = Clock::now();
    multiply();
    fastest = std::min(fastest, seconds_since(before));
    least_busy = std::min(least_busy, team_cpu_seconds() - cpu);
  }
  // Wall time above this multiple of CPU time: the threads always waited for CPUs that other work
  // used.
  constexpr double kDisturbed = 1.2;
  if (fastest > kDisturbed * least_busy) fastest = least_busy;
  const auto size = static_cast<double>(n);
  return 2.0 * size * size * size / std::max(fastest, 1e-9);
}

/// Measures growing sizes within `seconds`. Slow processors reach their peak with smaller ones and
/// skip the rest.
template <class T>
double best_of_sizes(double seconds) {
  constexpr std::array<std::size_t, 3> kSizes = {768, 1536, 2304};
  Products products;
  double best = 0.0;
  const auto start = Clock::now();
  for (const std::size_t n : kSizes) {
    if (n > kSizes.front() && seconds_since(start) >= seconds) break;
    best = std::max(best, best_rate<T>(products, n, seconds / kSizes.size()));
  }
  return best;
}

}  // namespace

double measure_host_gemm_peak(device::Device& device, DType type, double seconds) {
  const auto stream = device.make_stream("gemm peak");
  device::HostStream& host = device::as_host(*stream);
  double best = 0.0;
  with_training_type(type, [&](auto value) {
    host.enqueue([&] { best = best_of_sizes<decltype(value)>(seconds); });
    host.synchronize();
  });
  return best;
}

}  // namespace ballast::model::host
