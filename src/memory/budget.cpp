#include "ballast/memory/budget.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <limits>
#include <string>

#include <unistd.h>

namespace ballast::memory {
namespace {

constexpr Bytes kUnlimited = std::numeric_limits<Bytes>::max();

/// The number in a cgroup file; kUnlimited when there is none ("max", or no such file).
Bytes read_number(const std::filesystem::path& path) {
  std::ifstream file(path);
  Bytes value = 0;
  return file >> value ? value : kUnlimited;
}

/// A line "Key:   123 kB" of a /proc file, in bytes; `fallback` when it is not there.
Bytes read_kib_line(const char* path, const std::string& key, Bytes fallback) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (line.rfind(key + ":", 0) == 0) return std::stoull(line.substr(key.size() + 1)) * kKiB;
  }
  return fallback;
}

/// Path of this process's group under `root`, "" when /proc/self/cgroup does not tell.
std::filesystem::path own_group(const std::filesystem::path& root, const std::string& controller) {
  std::ifstream file("/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    const auto first = line.find(':');
    const auto second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    if (line.substr(first + 1, second - first - 1) == controller) {
      return root / line.substr(second + 2);
    }
  }
  return root;
}

/// Bytes left in the tightest group from this process's own up to the root.
Bytes cgroup_room(const std::filesystem::path& root, const std::string& controller,
                  const char* limit_file, const char* usage_file) {
  Bytes room = kUnlimited;
  auto group = own_group(root, controller);
  while (true) {
    const Bytes limit = read_number(group / limit_file);
    const Bytes usage = read_number(group / usage_file);
    if (limit != kUnlimited && usage != kUnlimited) {
      room = std::min(room, limit > usage ? limit - usage : 0);
    }
    if (group == root || group == group.parent_path()) return room;
    group = group.parent_path();
  }
}

/// Of a device's own memory, for what is loaded there besides: contexts, kernels of cuBLASLt and
/// cuDNN, the buffers of NCCL.
Bytes for_libraries(Bytes free) {
  constexpr Bytes kUsual = 1536 * kMiB;
  return std::max(free / 20, std::min(kUsual, free / 4));
}

}  // namespace

Bytes available_memory() {
  const Bytes machine =
      static_cast<Bytes>(sysconf(_SC_PHYS_PAGES)) * static_cast<Bytes>(sysconf(_SC_PAGESIZE));
  const Bytes available = read_kib_line("/proc/meminfo", "MemAvailable", machine);
  const Bytes v2 = cgroup_room("/sys/fs/cgroup", "", "memory.max", "memory.current");
  const Bytes v1 = cgroup_room("/sys/fs/cgroup/memory", "memory", "memory.limit_in_bytes",
                               "memory.usage_in_bytes");
  return std::min({available, v1, v2});
}

Bytes peak_resident_bytes() {
  return read_kib_line("/proc/self/status", "VmHWM", 0);
}

Budgets resolve_budgets(Budgets wanted, Bytes available, Bytes on_device) {
  const Bytes usable = available / 5 * 4;
  if (on_device > 0) {
    return {wanted.device > 0 ? wanted.device : on_device - for_libraries(on_device),
            wanted.host > 0 ? wanted.host : usable};
  }
  const auto rest = [&](Bytes named) { return usable > named ? usable - named : 0; };
  if (wanted.device == 0 && wanted.host == 0) return {usable / 2, usable / 2};
  if (wanted.device == 0) return {rest(wanted.host), wanted.host};
  if (wanted.host == 0) return {wanted.device, rest(wanted.device)};
  return wanted;
}

}  // namespace ballast::memory
