#pragma once

#include <string>

#include "ballast/core/units.h"

namespace ballast::memory {

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
