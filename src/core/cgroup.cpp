#include "ballast/core/cgroup.h"

#include <algorithm>
#include <fstream>
#include <optional>
#include <string>

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

void limit_memory(CgroupLimits& limits, const fs::path& limit, const fs::path& usage) {
  const auto most = read_number(limit);
  const auto used = read_number(usage);
  if (!most || !used || *most >= 0x1p63) return;  // version 1 writes a huge number for no limit
  limits.memory = std::min(limits.memory, static_cast<Bytes>(std::max(0.0, *most - *used)));
}

}  // namespace

CgroupLimits read_cgroup_limits(const fs::path& root) {
  CgroupLimits limits;
  visit_groups(root, "", [&](const fs::path& group) {
    std::ifstream file(group / "cpu.max");  // QUOTA PERIOD, or "max" PERIOD
    double quota = 0.0;
    double period = 0.0;
    if (file >> quota >> period) limit_cpus(limits, quota, period);
    limit_memory(limits, group / "memory.max", group / "memory.current");
  });
  visit_groups(root, "cpu", [&](const fs::path& group) {
    limit_cpus(limits, read_number(group / "cpu.cfs_quota_us"),
               read_number(group / "cpu.cfs_period_us"));
  });
  visit_groups(root, "memory", [&](const fs::path& group) {
    limit_memory(limits, group / "memory.limit_in_bytes", group / "memory.usage_in_bytes");
  });
  return limits;
}

}  // namespace ballast
