#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "ballast/comm/communicator.h"
#include "ballast/core/units.h"
#include "ballast/plan/rates.h"

namespace ballast::calibrate {

/// Estimates the bytes per second that each of `ranks` processes of this machine receives when all
/// exchange data over shared memory. Every byte is copied into a shared segment and out of it, so
/// the result is half the speed of copies by one thread per rank at the same time. Takes a few
/// hundredths of a second.
double estimate_exchange(std::uint32_t ranks);

/// Resources of its machine that one rank sees before it allocates.
struct RankPlace {
  static constexpr std::size_t kWords = 16;
  std::array<char, 64> host{};
  std::uint64_t available = 0;               ///< memory::available_memory()
  std::uint64_t usable_cpus = 1;             ///< usable_cpus()
  std::uint64_t online_cpus = 1;             ///< CPUs of the machine
  std::uint64_t local_rank = 0;              ///< see Launch
  std::uint64_t numa_nodes = 1;              ///< NUMA nodes of the machine
  std::uint64_t device_memory = 0;           ///< separate memory of its device
  std::array<std::uint64_t, kWords> cpus{};  ///< affinity mask: bit b of word w is CPU 64 w + b

  /// Returns whether the rank is bound to some of the machine's CPUs.
  [[nodiscard]] bool bound() const;
  friend bool operator==(const RankPlace&, const RankPlace&) = default;
};

/// `device_memory`: setup::own_device_memory().
RankPlace read_place(const comm::Launch& launch, Bytes device_memory);

/// A rank's share of its machine.
struct MachineShare {
  std::uint32_t world = 1;  ///< ranks of the run
  Bytes memory = 0;         ///< available host memory: the smallest share of all ranks
  Bytes device_memory = 0;  ///< the device's separate memory: the least of all ranks
  int compute_threads = 1;  ///< the fewest CPUs of all ranks, so that all need the same workspace
  int cpus = 1;             ///< this rank's CPUs, divided evenly among the ranks that share them
  int sharing = 1;          ///< ranks on this rank's CPUs, including itself
  int numa_node = -1;       ///< for updates of unbound ranks; -1: any
};

/// Returns the share of rank `rank`. `places`: resources of all ranks.
MachineShare share_of(const std::vector<RankPlace>& places, std::size_t rank);

/// Properties of the other ranks that decisions depend on.
struct PeerRanks {
  std::uint32_t world = 1;
  std::uint32_t local_world = 1;     ///< ranks on this machine, which share its swap paths
  std::uint32_t sharing = 1;         ///< ranks on the CPUs of this rank, including itself
  double received_per_second = 0.0;  ///< bytes that a rank receives in a collective
};

/// Scales the rates of an idle machine to one rank's share. Copies and updates are not scaled,
/// because the division of the memory bandwidth is unknown. `shared_cores` of 0 (a GPU) stays 0.
void share_out(plan::Rates& rates, const PeerRanks& peers);

}  // namespace ballast::calibrate
