#pragma once

#include <string>

#include "ballast/core/units.h"

namespace ballast::memory {

/// The machine's topology from hwloc; unknown members are 0.
struct Topology {
  int packages = 0;
  int numa_nodes = 0;
  int cores = 0;
  Bytes last_level_cache = 0;  ///< of one L3 cache
};

Topology read_topology();

/// "2 cores, 1 NUMA node, 32.0 MiB L3": for reports beside figures.
std::string describe(const Topology& topology);

}  // namespace ballast::memory
