#include "ballast/core/machine.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <optional>
#include <span>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include <elf.h>
#include <fmt/format.h>
#include <link.h>
#include <sched.h>
#include <sys/resource.h>
#include <unistd.h>

#include "ballast/core/dtype.h"
#include "ballast/core/error.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace ballast {

namespace {

const std::array<std::string, 4>& isa_names() {
  static const std::array<std::string, 4> names = {"scalar", "neon", "avx2", "avx512"};
  return names;
}

}  // namespace

std::string_view to_string(DType type) noexcept {
  constexpr std::array<std::string_view, 3> kNames = {"f32", "bf16", "f16"};
  return kNames[static_cast<std::size_t>(type)];
}

std::string_view to_string(Isa isa) noexcept {
  return isa_names()[static_cast<std::size_t>(isa)];
}

Isa parse_isa(std::string_view name) {
  for (std::size_t i = 0; i < isa_names().size(); ++i) {
    if (isa_names()[i] == name) return static_cast<Isa>(i);
  }
  throw Error(ErrorCategory::usage,
              "'" + std::string(name) +
                  "' is not an instruction set; choose scalar, neon, avx2 or avx512" +
                  did_you_mean(name, isa_names()));
}

bool cpu_supports(Isa isa) noexcept {
#if defined(__x86_64__)
  // __builtin_cpu_supports of clang 14 does not accept "f16c".
  unsigned a = 0, b = 0, c = 0, d = 0;
  const bool f16c = __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
  __builtin_cpu_init();
  switch (isa) {
    case Isa::scalar:
      return true;
    case Isa::neon:
      return false;
    case Isa::avx2:
      return __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0 && f16c;
    case Isa::avx512:
      return __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512bw") != 0 &&
             __builtin_cpu_supports("avx512dq") != 0 && __builtin_cpu_supports("avx512vl") != 0;
  }
#elif defined(__aarch64__)
  return isa == Isa::scalar || isa == Isa::neon;
#endif
  return isa == Isa::scalar;
}

int usable_cpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  const int affinity = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
  const double quota = std::max(1.0, read_cgroup_limits().cpus);
  return std::max(1, static_cast<int>(std::min<double>(affinity, quota)));
}

CpuWatch::Times CpuWatch::read() {
  Times times;
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) != 0) return times;
  const double tick = 1.0 / static_cast<double>(sysconf(_SC_CLK_TCK));
  std::ifstream file("/proc/stat");
  for (std::string line; std::getline(file, line);) {
    // "cpu3 user nice system idle iowait irq softirq steal ..."; proc(5).
    if (line.rfind("cpu", 0) != 0 || line[3] == ' ') continue;
    std::istringstream words(line.substr(3));
    std::size_t cpu = 0;
    std::array<double, 8> ticks{};
    words >> cpu;
    for (double& count : ticks) words >> count;
    if (cpu >= CPU_SETSIZE || !CPU_ISSET(cpu, &set)) continue;
    const double idle = ticks[3] + ticks[4];
    times.cpus += 1.0;
    times.idle += idle * tick;
    times.busy += (std::accumulate(ticks.begin(), ticks.end(), 0.0) - idle) * tick;
  }
  rusage own{};
  getrusage(RUSAGE_SELF, &own);
  for (const timeval& part : {own.ru_utime, own.ru_stime}) {
    times.own += static_cast<double>(part.tv_sec) + 1e-6 * static_cast<double>(part.tv_usec);
  }
  return times;
}

double CpuWatch::others_share() const {
  const Times now = read();
  const double busy = now.busy - start_.busy;
  const double idle = now.idle - start_.idle;
  const double others = busy - (now.own - start_.own);
  return others > idle ? others / (busy + idle) : 0.0;
}

double CpuWatch::others_cpus() const {
  const Times now = read();
  const double busy = now.busy - start_.busy;
  const double all = busy + now.idle - start_.idle;
  const double others = std::max(0.0, busy - (now.own - start_.own));
  return all > 0.0 ? now.cpus * std::min(1.0, others / all) : 0.0;
}

std::string cpu_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("model name", 0) == 0) {
      const auto colon = line.find(':');
      if (colon != std::string::npos && colon + 2 < line.size()) return line.substr(colon + 2);
    }
  }
  return "unknown CPU";
}

bool may_run(Isa isa) {
  const char* const name = std::getenv("BALLAST_ISA_MASK");
  if (name == nullptr || *name == '\0') return cpu_supports(isa);
  try {
    return isa <= parse_isa(name) && cpu_supports(isa);
  } catch (const Error& error) {
    throw error.with_context("BALLAST_ISA_MASK");
  }
}

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

CgroupLimits read_cgroup_limits(std::string_view root_path) {
  const fs::path root(root_path);
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

namespace {

/// Returns the build id among the notes of a segment, or "".
std::string id_among(std::span<const std::byte> notes) {
  const auto aligned = [](std::size_t size) { return (size + 3) / 4 * 4; };
  while (notes.size() >= sizeof(ElfW(Nhdr))) {
    ElfW(Nhdr) head;
    std::memcpy(&head, notes.data(), sizeof head);
    notes = notes.subspan(sizeof head);
    const std::size_t name = aligned(head.n_namesz);
    const std::size_t whole = name + aligned(head.n_descsz);
    if (whole > notes.size()) break;
    const bool gnu = head.n_namesz == sizeof ELF_NOTE_GNU &&
                     std::memcmp(notes.data(), ELF_NOTE_GNU, sizeof ELF_NOTE_GNU) == 0;
    if (gnu && head.n_type == NT_GNU_BUILD_ID) {
      std::string id;
      for (const std::byte byte : notes.subspan(name, head.n_descsz)) {
        id += fmt::format("{:02x}", std::to_integer<unsigned>(byte));
      }
      return id;
    }
    notes = notes.subspan(whole);
  }
  return "";
}

/// Finds the loaded file that has this function, and its build id.
int visit(dl_phdr_info* info, std::size_t /*size*/, void* id) {
  const std::span segments(info->dlpi_phdr, info->dlpi_phnum);
  const auto here = reinterpret_cast<std::uintptr_t>(&visit);
  const bool own = std::any_of(segments.begin(), segments.end(), [&](const ElfW(Phdr) & one) {
    const std::uintptr_t begin = info->dlpi_addr + one.p_vaddr;
    return one.p_type == PT_LOAD && here >= begin && here - begin < one.p_memsz;
  });
  if (!own) return 0;
  for (const ElfW(Phdr) & one : segments) {
    if (one.p_type != PT_NOTE) continue;
    const auto* const begin = reinterpret_cast<const std::byte*>(info->dlpi_addr + one.p_vaddr);
    std::string found = id_among({begin, one.p_memsz});
    if (!found.empty()) *static_cast<std::string*>(id) = std::move(found);
  }
  return 1;
}

}  // namespace

std::string build_id() {
  std::string id;
  dl_iterate_phdr(visit, &id);
  return id;
}

std::string_view version() noexcept {
  return BALLAST_VERSION;
}

}  // namespace ballast
