#pragma once

#include <cstdint>
#include <string>

#include "ballast/core/units.h"

namespace ballast::memory {

/// Returns the bytes that this process may still allocate: the smaller of the machine's available
/// memory and the rest of the process's cgroup limit (v1 or v2, CgroupLimits::memory).
Bytes available_memory();

/// Returns the peak resident size of this process (VmHWM) in bytes; 0 if /proc has no value.
Bytes peak_resident_bytes();

/// Device memory that NCCL takes for the buffers of one channel between ranks.
inline constexpr Bytes kChannelBytes = 307 * kMiB;

/// Returns the part of `free` device memory that the device's `channels` between ranks need:
/// kChannelBytes each, but at most a quarter.
Bytes channel_reserve(Bytes free, std::uint32_t channels);

/// Returns the bytes of a device with separate memory, of which `free` are free, that libraries
/// need in addition to the budget: 1.5 GiB, but at most a quarter, for contexts and for kernels of
/// cuBLASLt and cuDNN, and channel_reserve().
Bytes library_reserve(Bytes free, std::uint32_t channels = 0);

/// Separate memory of each device of a rank.
struct OwnDeviceMemory {
  Bytes free = 0;              ///< 0 on the host device
  std::uint32_t channels = 0;  ///< channels between ranks that will be made
};

struct Budgets {
  Bytes device = 0;  ///< budget of each device
  Bytes host = 0;
};

/// Fills in budgets that are 0 ("auto"). A device with separate memory gets its free bytes minus
/// library_reserve(), in which 5% replace the 1.5 GiB if that is more.
/// The host tier gets 80% of `available`. On the host device both tiers share this 80%: an explicit
/// budget is deducted first; two automatic ones get half each. Several host devices (`devices`)
/// divide the part of the device tier.
Budgets resolve_budgets(Budgets wanted, Bytes available, OwnDeviceMemory on_device = {},
                        std::uint32_t devices = 1);

/// The machine's topology from hwloc; unknown members are 0.
struct Topology {
  int packages = 0;
  int numa_nodes = 0;
  int cores = 0;
  Bytes last_level_cache = 0;  ///< size of one L3 cache
};

Topology read_topology();

/// Returns "2 cores, 1 NUMA node, 32.0 MiB L3", to accompany figures in reports.
std::string describe(const Topology& topology);

}  // namespace ballast::memory
