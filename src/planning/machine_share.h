#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "ballast/comm/communicator.h"
#include "ballast/config/config.h"
#include "ballast/schedule/rates.h"

namespace ballast::planning {

/// What one rank says of itself and of the machine it is on, before it takes anything of it.
struct RankPlace {
  static constexpr std::size_t kWords = 16;
  std::array<char, 64> host{};
  std::uint64_t available = 0;               ///< memory::available_memory()
  std::uint64_t usable_cpus = 1;             ///< usable_cpus()
  std::uint64_t online_cpus = 1;             ///< of the machine
  std::uint64_t local_rank = 0;              ///< of Launch
  std::uint64_t numa_nodes = 1;              ///< of the machine
  std::uint64_t device_memory = 0;           ///< engine::own_device_memory()
  std::array<std::uint64_t, kWords> cpus{};  ///< affinity mask: bit b of word w is CPU 64 w + b

  /// Whether it was started on some of the machine's CPUs only.
  [[nodiscard]] bool bound() const;
  friend bool operator==(const RankPlace&, const RankPlace&) = default;
};

/// This process's.
RankPlace read_place(const comm::Launch& launch, const config::Config& config);

/// What is left to a rank when those of a machine share it.
struct MachineShare {
  Bytes memory = 0;         ///< of what is available: the smallest share of all ranks
  Bytes device_memory = 0;  ///< that devices have of their own: the least of all ranks
  int compute_threads = 1;  ///< the fewest CPUs of all ranks, so that all need the same workspace
  int cpus = 1;        ///< of this rank: its CPUs, shared evenly by the ranks that have them too
  int sharing = 1;     ///< ranks on this rank's CPUs, itself included
  int numa_node = -1;  ///< that ranks without a binding should update on; -1: no matter
};

/// The share of rank `rank`; `places` are those of all ranks.
MachineShare share_of(const std::vector<RankPlace>& places, std::size_t rank);

/// Puts the share of memory and the compute threads into whatever `config` leaves to the program.
/// The same on every rank.
void apply_common_share(config::Config& config, const MachineShare& share);

/// Likewise threads and NUMA node of the update, which may differ between ranks.
void apply_own_share(config::Config& config, const MachineShare& share);

/// The other ranks of a run, as far as a decision must know them.
struct PeerRanks {
  std::uint32_t world = 1;
  std::uint32_t local_world = 1;     ///< on this machine: they share its swap paths
  std::uint32_t sharing = 1;         ///< on the CPUs of this rank, itself included
  double received_per_second = 0.0;  ///< bytes that a rank receives in a collective
};

/// Scales the rates of an idle machine to one rank's share. Copies and updates are not scaled: how
/// much of the memory bandwidth each rank gets is not known. A GPU shares no cores (`shared_cores`
/// 0) with the update, and so it stays.
void share_out(schedule::Rates& rates, const PeerRanks& peers);

}  // namespace ballast::planning
