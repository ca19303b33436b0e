#pragma once

#include <filesystem>
#include <limits>

#include "ballast/core/units.h"

namespace ballast {

/// How much the control groups of this process let it use.
struct CgroupLimits {
  double cpus = std::numeric_limits<double>::infinity();  ///< CPU time per time
  Bytes memory = std::numeric_limits<Bytes>::max();       ///< bytes that it may still take
};

/// The smallest limits of the process's own group and of all groups around it, of cgroup v2 and v1.
/// A missing file limits nothing. `root` stands for "/": the folder of proc and sys.
CgroupLimits read_cgroup_limits(const std::filesystem::path& root = "/");

}  // namespace ballast
