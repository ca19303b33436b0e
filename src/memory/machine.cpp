#include "ballast/memory/machine.h"

#include <algorithm>
#include <fstream>
#include <memory>
#include <string>

#include <fmt/format.h>
#include <hwloc.h>
#include <unistd.h>

#include "ballast/core/machine.h"

namespace ballast::memory {

namespace {

/// Returns the value of a line "Key:   123 kB" in a /proc file, in bytes; `fallback` if there is
/// none.
Bytes read_kib_line(const char* path, const std::string& key, Bytes fallback) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (line.rfind(key + ":", 0) == 0) return std::stoull(line.substr(key.size() + 1)) * kKiB;
  }
  return fallback;
}

constexpr Bytes kUsualReserve = 1536 * kMiB;

Bytes reserve(Bytes libraries, OwnDeviceMemory device) {
  return std::min(libraries, device.free / 4) + channel_reserve(device.free, device.channels);
}

/// Reserve of an automatic budget: larger than needed on large GPUs, against fragmentation.
Bytes ample_reserve(OwnDeviceMemory device) {
  return reserve(std::max(device.free / 20, kUsualReserve), device);
}

}  // namespace

Bytes available_memory() {
  const Bytes machine =
      static_cast<Bytes>(sysconf(_SC_PHYS_PAGES)) * static_cast<Bytes>(sysconf(_SC_PAGESIZE));
  const Bytes available = read_kib_line("/proc/meminfo", "MemAvailable", machine);
  return std::min(available, read_cgroup_limits().memory);
}

Bytes peak_resident_bytes() {
  return read_kib_line("/proc/self/status", "VmHWM", 0);
}

Bytes channel_reserve(Bytes free, std::uint32_t channels) {
  return std::min(channels * kChannelBytes, free / 4);
}

Bytes library_reserve(Bytes free, std::uint32_t channels) {
  return reserve(kUsualReserve, {.free = free, .channels = channels});
}

Budgets resolve_budgets(Budgets wanted, Bytes available, OwnDeviceMemory on_device,
                        std::uint32_t devices) {
  const Bytes usable = available / 5 * 4;
  if (on_device.free > 0) {
    return {wanted.device > 0 ? wanted.device : on_device.free - ample_reserve(on_device),
            wanted.host > 0 ? wanted.host : usable};
  }
  const auto rest = [&](Bytes named) { return usable > named ? usable - named : 0; };
  if (wanted.device == 0 && wanted.host == 0) return {usable / 2 / devices, usable / 2};
  if (wanted.device == 0) return {rest(wanted.host) / devices, wanted.host};
  if (wanted.host == 0) return {wanted.device, rest(wanted.device * devices)};
  return wanted;
}

Topology read_topology() {
  Topology topology;
  hwloc_topology_t raw = nullptr;
  if (hwloc_topology_init(&raw) != 0) return topology;
  const std::unique_ptr<hwloc_topology, decltype(&hwloc_topology_destroy)> handle(
      raw, &hwloc_topology_destroy);
  if (hwloc_topology_load(raw) != 0) return topology;
  const auto count = [&](hwloc_obj_type_t type) {
    return std::max(0, hwloc_get_nbobjs_by_type(handle.get(), type));
  };
  topology.packages = count(HWLOC_OBJ_PACKAGE);
  topology.numa_nodes = count(HWLOC_OBJ_NUMANODE);
  topology.cores = count(HWLOC_OBJ_CORE);
  if (const hwloc_obj_t cache = hwloc_get_obj_by_type(handle.get(), HWLOC_OBJ_L3CACHE, 0)) {
    topology.last_level_cache = cache->attr->cache.size;
  }
  return topology;
}

std::string describe(const Topology& topology) {
  return fmt::format("{} core{}, {} NUMA node{}, {} L3", topology.cores,
                     topology.cores == 1 ? "" : "s", topology.numa_nodes,
                     topology.numa_nodes == 1 ? "" : "s", format_bytes(topology.last_level_cache));
}

}  // namespace ballast::memory
