#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "ballast/config/config.h"
#include "ballast/core/units.h"
#include "ballast/device/device.h"
#include "ballast/state/swap_plan.h"

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
  state::SwapOptions swap;              ///< folders for states on NVMe
  std::filesystem::path run_directory;  ///< "": a new one
  Bytes largest_file = 0;               ///< about the size of the largest file of a run
  int threads = 0;                      ///< threads for passes and updates; 0: two per CPU
};

/// Checks CPU, memory, limits, I/O backends, folders, MPI, and the GPU with its libraries. Takes a
/// second, or a few with a GPU, and leaves nothing.
std::vector<Finding> examine_machine(const MachineUse& use);

// Parts of examine_machine().

/// Checks limits of the process: locked memory, sizes and number of files, threads, and the memory
/// that ranks share.
std::vector<Finding> examine_limits(const MachineUse& use);
/// Writes 1 MiB to every swap folder, as a run does, and reads it again. Checks that the run
/// directory and the cache of measured rates can be written to. The files have no names.
std::vector<Finding> examine_folders(const MachineUse& use);

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
