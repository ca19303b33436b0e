#pragma once

#include <limits>
#include <string>
#include <string_view>

#include "ballast/core/units.h"

namespace ballast {

/// Instruction sets that kernels are compiled for, in order of preference (last is best).
enum class Isa { scalar, neon, avx2, avx512 };

/// Returns "scalar", "neon", "avx2" or "avx512".
std::string_view to_string(Isa isa) noexcept;

/// Inverse of to_string. Throws Error(usage) with the choices.
Isa parse_isa(std::string_view name);

/// Returns whether this CPU and its operating system support `isa` (CPUID and XCR0). neon: every
/// 64-bit Arm CPU; avx2: AVX2, FMA and F16C; avx512: F, BW, DQ and VL.
bool cpu_supports(Isa isa) noexcept;

/// Number of CPUs this process may run on (affinity mask and cgroup quota), at least 1.
int usable_cpus();

/// Watches for other work on the CPUs that this process may use.
class CpuWatch {
 public:
  CpuWatch() : start_(read()) {}

  /// Share of these CPUs' time since the construction that other processes used or the hypervisor
  /// took away. 0 if the CPUs were idle for longer than that, because there was room for both then.
  /// Also 0 if /proc/stat cannot be read. The kernel counts in ticks (10 ms per CPU).
  [[nodiscard]] double others_share() const;

  /// Average number of these CPUs that other processes and the hypervisor kept busy since the
  /// construction. 0 if /proc/stat cannot be read.
  [[nodiscard]] double others_cpus() const;

 private:
  /// Seconds of CPU time.
  struct Times {
    double busy = 0.0;  ///< all processes and the hypervisor
    double idle = 0.0;
    double own = 0.0;
    double cpus = 0.0;  ///< number of CPUs
  };
  static Times read();

  Times start_;
};

/// Model name of the CPU for reports; "unknown CPU" if /proc/cpuinfo has none.
std::string cpu_name();

/// Returns whether kernels for `isa` may run: the CPU supports it, and BALLAST_ISA_MASK (a name;
/// unset or empty: no mask) does not select a slower one. Throws Error(usage) for an invalid mask.
bool may_run(Isa isa);

/// Resource limits that control groups impose on this process.
struct CgroupLimits {
  double cpus = std::numeric_limits<double>::infinity();  ///< CPU seconds per second
  /// Bytes that the process may still allocate. Cached pages of files that need not be written
  /// first count as free, because the kernel reclaims them.
  Bytes memory = std::numeric_limits<Bytes>::max();
};

/// Returns the smallest limits of the process's group and its ancestors, in cgroup v2 and v1. A
/// missing file means no limit. `root`: directory that contains proc and sys.
CgroupLimits read_cgroup_limits(std::string_view root = "/");

/// Version of this build, "major.minor.patch".
std::string_view version() noexcept;

/// Build id that the linker wrote into the program or library with this code, in hexadecimal
/// digits: equal for copies of a build, also stripped ones. "" if it wrote none.
std::string build_id();

}  // namespace ballast
