#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "ballast/device/device.h"

namespace ballast::tools {

/// Result of a check of `ballast doctor`. A hint is about speed. A fault prevents a run.
enum class Severity { good, hint, fault };

/// Result of one check, in one line.
struct Finding {
  Severity severity = Severity::good;
  std::string name;  ///< "huge pages"
  std::string text;  ///< state of the part and, unless it is good, the remedy
};

/// Parts of a machine that a run uses.
struct MachineUse {
  device::DeviceOptions device;
  /// Existing folders for states on NVMe.
  std::vector<std::filesystem::path> swap_folders;
  /// Whether unsuited file systems, such as tmpfs, are allowed (aio.any_file_system).
  bool any_file_system = false;
};

/// Checks CPU, memory, limits, I/O backends, kind and free space of the folders, MPI, and the GPU
/// with its libraries. Takes a second, or a few with a GPU, and changes nothing.
std::vector<Finding> examine_machine(const MachineUse& use);

/// Returns the CPU's flags among `wanted`, in that order: "avx512f amx_bf16". `root`: folder that
/// contains proc.
std::string cpu_flags(const std::vector<std::string_view>& wanted,
                      const std::filesystem::path& root = "/");

}  // namespace ballast::tools
