#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <numeric>
#include <thread>
#include <vector>

#include <omp.h>
#include <pthread.h>
#include <unistd.h>

#include "ballast/core/clocks.h"
#include "ballast/device/streams.h"

#include "src/model/compute/factories.h"
#include "src/model/host/ops.h"
#include "src/model/host/products.h"
#include "src/model/host/team.h"

namespace ballast::model::host {

namespace {

/// Number of kernel threads for `device`'s streams.
std::size_t threads_of(device::Device& device) {
  std::size_t threads = 1;
  const auto stream = device.make_stream("threads");
  device::as_host(*stream).enqueue([&] { threads = team_size(); });
  stream->synchronize();
  return threads;
}

}  // namespace

std::unique_ptr<Compute> make_host_compute(const Architecture& model, DType type,
                                           MicroBatchShape shape, std::size_t threads,
                                           const MlpRule& mlp_rule) {
  return with_training_type(type, [&](auto value) -> std::unique_ptr<Compute> {
    return make_device_compute(
        model, shape, make_ops<decltype(value)>(kernel_extents(model, shape), threads, mlp_rule));
  });
}

std::unique_ptr<Compute> make_host_compute(device::Device& device, const Architecture& model,
                                           DType type, MicroBatchShape shape) {
  return make_host_compute(model, type, shape, threads_of(device));
}

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

namespace {

/// Makes an OpenMP team and sleeps forever. The team lives as long as its first thread.
void keep_a_team(int threads) {
  omp_set_dynamic(0);
  // The compiler would remove an empty region.
  std::atomic<int> started = 0;
#pragma omp parallel num_threads(threads)
  started.fetch_add(1, std::memory_order_relaxed);
  while (true) pause();
}

void start_sleeping_team(int threads) {
  // These threads must not receive the signals of the process.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread sleeper(keep_a_team, threads);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  pthread_setname_np(sleeper.native_handle(), "short waits");
  sleeper.detach();
}

}  // namespace

void keep_waits_short(int team) {
  if (team < 2) return;
  static std::once_flag once;
  std::call_once(once, [team] {
    const bool chosen =
        std::getenv("OMP_WAIT_POLICY") != nullptr || std::getenv("GOMP_SPINCOUNT") != nullptr;
    if (!chosen) start_sleeping_team(std::max(2, omp_get_num_procs() - team + 2));
  });
}

}  // namespace ballast::model::host
