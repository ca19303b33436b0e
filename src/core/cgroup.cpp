#include "ballast/core/cgroup.h"

#include <algorithm>
#include <fstream>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <fmt/format.h>

namespace ballast {
namespace {

namespace fs = std::filesystem;

/// Returns the number at the start of a file; empty for "max", for -1 (version 1: no quota) and if
/// the file does not exist.
std::optional<double> read_number(const fs::path& path) {
  std::ifstream file(path);
  double value = 0.0;
  return file >> value && value >= 0.0 ? std::optional(value) : std::nullopt;
}

/// Returns the group of this process relative to the mount point of its hierarchy; "" if
/// /proc/self/cgroup does not list it. `controller` is "" for version 2.
fs::path own_group(const fs::path& root, const std::string& controller) {
  std::ifstream file(root / "proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {  // NUMBER:CONTROLLER,CONTROLLER:/PATH
    const auto first = line.find(':');
    const auto second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string names = fmt::format(",{},", line.substr(first + 1, second - first - 1));
    if (names.find(fmt::format(",{},", controller)) != std::string::npos) {
      return fs::path(line.substr(second + 1)).relative_path();
    }
  }
  return {};
}

/// Calls `visit` with the directory of each group, from the process's group to the root.
template <class Visit>
void visit_groups(const fs::path& root, const std::string& controller, Visit&& visit) {
  const fs::path mount = root / "sys/fs/cgroup" / controller;
  fs::path group = own_group(root, controller);
  for (; !group.empty(); group = group.parent_path()) visit(mount / group);
  visit(mount);
}

void limit_cpus(CgroupLimits& limits, std::optional<double> quota, std::optional<double> period) {
  if (quota && period && *period > 0.0) limits.cpus = std::min(limits.cpus, *quota / *period);
}

/// Returns the sum of the values in `stat`, a file of lines "NAME VALUE", whose names are in
/// `names`.
double sum_of_lines(const fs::path& stat, const std::vector<std::string_view>& names) {
  std::ifstream file(stat);
  std::string name;
  double sum = 0.0;
  for (double value = 0.0; file >> name >> value;) {
    if (std::find(names.begin(), names.end(), name) != names.end()) sum += value;
  }
  return sum;
}

/// Files with the limits and the usage of a group's memory, and the lines of its statistics.
struct MemoryFiles {
  std::vector<std::string_view> limits;
  std::string_view usage;
  /// File pages in the lists of the kernel, which it reclaims before it kills a process. Shared
  /// memory, tmpfs and locked pages are in other lists.
  std::vector<std::string_view> cached;
  /// The part of these pages that must be written first.
  std::vector<std::string_view> unwritten;
};

/// Above memory.high the kernel throttles the processes of a group.
const MemoryFiles kVersion2 = {{"memory.max", "memory.high"},
                               "memory.current",
                               {"inactive_file", "active_file"},
                               {"file_dirty", "file_writeback"}};
/// Only the lines with "total_" include the groups inside a group.
const MemoryFiles kVersion1 = {{"memory.limit_in_bytes"},
                               "memory.usage_in_bytes",
                               {"total_inactive_file", "total_active_file"},
                               {"total_dirty", "total_writeback"}};

void limit_memory(CgroupLimits& limits, const fs::path& group, const MemoryFiles& files) {
  const auto used = read_number(group / files.usage);
  if (!used) return;
  for (const std::string_view limit : files.limits) {
    const auto most = read_number(group / limit);
    if (!most || *most >= 0x1p62) continue;  // version 1 writes a huge number for no limit
    const fs::path stat = group / "memory.stat";
    const double cached = sum_of_lines(stat, files.cached);
    const double reclaimable = std::max(0.0, cached - sum_of_lines(stat, files.unwritten));
    const double occupied = std::max(0.0, *used - reclaimable);
    limits.memory = std::min(limits.memory, static_cast<Bytes>(std::max(0.0, *most - occupied)));
  }
}

}  // namespace

CgroupLimits read_cgroup_limits(const fs::path& root) {
  CgroupLimits limits;
  visit_groups(root, "", [&](const fs::path& group) {
    std::ifstream file(group / "cpu.max");  // QUOTA PERIOD, or "max" PERIOD
    double quota = 0.0;
    double period = 0.0;
    if (file >> quota >> period) limit_cpus(limits, quota, period);
    limit_memory(limits, group, kVersion2);
  });
  visit_groups(root, "cpu", [&](const fs::path& group) {
    limit_cpus(limits, read_number(group / "cpu.cfs_quota_us"),
               read_number(group / "cpu.cfs_period_us"));
  });
  visit_groups(root, "memory",
               [&](const fs::path& group) { limit_memory(limits, group, kVersion1); });
  return limits;
}

}  // namespace ballast
