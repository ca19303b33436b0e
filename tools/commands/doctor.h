#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "ballast/config/config.h"
#include "ballast/core/units.h"
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

/// Effort of examine_gpu().
struct GpuEffort {
  Bytes pinned = 1 * kGiB;    ///< host memory to pin, half of it for each direction of copies
  double seconds = 0.5;       ///< time of each measurement
  std::uint64_t rows = 8192;  ///< maximum length of the sequence for the model's kernels
};

/// Compares every kind of pass of the config's model on the GPU with the host device on 64 rows and
/// with the plain kernels on a whole sequence, and each matrix product with the plain kernel. Pins
/// memory, measures copies, matrix products and attention, and reports the memory that remains. The
/// device of `config` is a usable GPU. Failed checks are faults.
std::vector<Finding> examine_gpu(const config::Config& config, const GpuEffort& effort = {});

/// Speeds of a kind of GPU in configs/rates.
struct KnownGpu {
  std::string_view name;   ///< part of the GPU's name
  std::string_view rates;  ///< file in configs/rates
  double tflops = 0.0;
  double upload_gbps = 0.0;
  double offload_gbps = 0.0;
};
const std::vector<KnownGpu>& known_gpus();

/// Returns the CPU's flags among `wanted`, in that order: "avx512f amx_bf16". `root`: folder that
/// contains proc.
std::string cpu_flags(const std::vector<std::string_view>& wanted,
                      const std::filesystem::path& root = "/");

}  // namespace ballast::tools
