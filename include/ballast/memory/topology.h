#pragma once

#include <string>

#include "ballast/core/units.h"

namespace ballast::memory {

/// The machine as hwloc sees it. Members are 0 where it does not tell.
struct Topology {
  int packages = 0;
  int numa_nodes = 0;
  int cores = 0;
  Bytes last_level_cache = 0;  ///< of one cache of the last level
};

Topology read_topology();

/// "2 cores, 1 NUMA node, 32.0 MiB L3": for reports beside figures.
std::string describe(const Topology& topology);

}  // namespace ballast::memory
