#include "ballast/memory/budget.h"

#include <algorithm>
#include <fstream>
#include <string>

#include <unistd.h>

#include "ballast/core/cgroup.h"

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

}  // namespace ballast::memory
