#include "ballast/core/cpu.h"

#include <algorithm>
#include <array>
#include <fstream>
#include <numeric>
#include <sstream>

#include <sched.h>
#include <sys/resource.h>
#include <unistd.h>

#include "ballast/core/cgroup.h"
#include "ballast/core/dtype.h"
#include "ballast/core/error.h"
#include "ballast/core/suggest.h"

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

}  // namespace ballast
