#include "src/calibrate/machine_share.h"

#include <algorithm>
#include <barrier>
#include <bit>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <limits>
#include <string_view>
#include <thread>
#include <vector>

#include <sched.h>
#include <unistd.h>

#include "ballast/comm/agreement.h"
#include "ballast/core/machine.h"
#include "ballast/core/units.h"
#include "ballast/memory/machine.h"

namespace ballast::calibrate {

double estimate_exchange(std::uint32_t ranks) {
  using Clock = std::chrono::steady_clock;
  constexpr std::uint32_t kMaxThreads = 64;
  constexpr int kTries = 4;  // the first one maps the memory
  constexpr Bytes kCopied = 64 * kMiB;
  const std::uint32_t threads = std::clamp(ranks, 2U, kMaxThreads);
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

namespace {

constexpr std::size_t kBits = 64;

bool overlap(const RankPlace& a, const RankPlace& b) {
  for (std::size_t w = 0; w < RankPlace::kWords; ++w) {
    if ((a.cpus[w] & b.cpus[w]) != 0) return true;
  }
  return false;
}

/// Numbers of ranks on the machine of `place`, and of those that share some of its CPUs.
struct Neighbours {
  std::uint64_t machine = 0;
  std::uint64_t cpus = 0;
};

Neighbours neighbours(const std::vector<RankPlace>& places, const RankPlace& place) {
  Neighbours found;
  for (const auto& other : places) {
    if (other.host != place.host) continue;
    ++found.machine;
    if (&other == &place || overlap(other, place)) ++found.cpus;
  }
  return found;
}

int cpus_of(const RankPlace& place, const Neighbours& around) {
  return static_cast<int>(std::max<std::uint64_t>(1, place.usable_cpus / around.cpus));
}

}  // namespace

bool RankPlace::bound() const {
  std::uint64_t count = 0;
  for (const std::uint64_t word : cpus) count += static_cast<std::uint64_t>(std::popcount(word));
  return count < online_cpus;
}

RankPlace read_place(const comm::Launch& launch, Bytes device_memory) {
  RankPlace place;
  const std::string host = comm::host_name();
  std::copy_n(host.begin(), std::min(host.size(), place.host.size()), place.host.begin());
  place.available = memory::available_memory();
  place.usable_cpus = static_cast<std::uint64_t>(usable_cpus());
  place.online_cpus = static_cast<std::uint64_t>(std::max(1L, sysconf(_SC_NPROCESSORS_ONLN)));
  place.local_rank = launch.local_rank;
  place.numa_nodes = static_cast<std::uint64_t>(std::max(1, memory::read_topology().numa_nodes));
  place.device_memory = device_memory;
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) != 0) return place;
  for (std::size_t cpu = 0; cpu < RankPlace::kWords * kBits; ++cpu) {
    if (CPU_ISSET(cpu, &set)) place.cpus[cpu / kBits] |= std::uint64_t{1} << (cpu % kBits);
  }
  return place;
}

MachineShare share_of(const std::vector<RankPlace>& places, std::size_t rank) {
  MachineShare share;
  share.world = static_cast<std::uint32_t>(places.size());
  share.memory = std::numeric_limits<Bytes>::max();
  share.device_memory = std::numeric_limits<Bytes>::max();
  share.compute_threads = std::numeric_limits<int>::max();
  for (const auto& place : places) {
    const Neighbours around = neighbours(places, place);
    share.memory = std::min(share.memory, place.available / around.machine);
    share.device_memory = std::min<Bytes>(share.device_memory, place.device_memory);
    share.compute_threads = std::min(share.compute_threads, cpus_of(place, around));
  }
  const RankPlace& own = places.at(rank);
  const Neighbours around = neighbours(places, own);
  share.cpus = cpus_of(own, around);
  share.sharing = static_cast<int>(around.cpus);
  if (own.numa_nodes > 1 && around.machine > 1 && !own.bound()) {
    share.numa_node = static_cast<int>(own.local_rank * own.numa_nodes / around.machine);
  }
  return share;
}

void share_out(plan::Rates& rates, const PeerRanks& peers) {
  if (rates.shared_cores > 0) {
    rates.shared_cores = std::max(1U, rates.shared_cores / peers.sharing);
  }
  for (double* rate : {&rates.read_per_second, &rates.write_per_second, &rates.mixed_per_second}) {
    *rate /= peers.local_world;
  }
  rates.fabric_per_second = peers.received_per_second;
  rates.network_per_second = peers.received_per_second;
  rates.ranks_per_node = peers.local_world;
}

}  // namespace ballast::calibrate
