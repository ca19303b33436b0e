#pragma once

#include <filesystem>
#include <limits>

#include "ballast/core/units.h"

namespace ballast {

/// Resource limits that control groups impose on this process.
struct CgroupLimits {
  double cpus = std::numeric_limits<double>::infinity();  ///< CPU seconds per second
  /// Bytes that the process may still allocate. Cached pages of files that need not be written
  /// first count as free, because the kernel reclaims them.
  Bytes memory = std::numeric_limits<Bytes>::max();
};

/// Returns the smallest limits of the process's group and its ancestors, in cgroup v2 and v1. A
/// missing file means no limit. `root`: directory that contains proc and sys.
CgroupLimits read_cgroup_limits(const std::filesystem::path& root = "/");

}  // namespace ballast
