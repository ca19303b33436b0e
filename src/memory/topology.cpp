#include "ballast/memory/topology.h"

#include <algorithm>
#include <memory>

#include <fmt/format.h>
#include <hwloc.h>

namespace ballast::memory {

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
