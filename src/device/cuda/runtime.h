#pragma once

#include <atomic>
#include <cstddef>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>

#include <cuda_runtime_api.h>

#include "ballast/core/error.h"
#include "ballast/device/device.h"
#include "ballast/device/streams.h"

#include "src/device/implementations.h"

namespace ballast::device {

/// Throws Error(device) "OPERATION: CUDA: TEXT (NAME)" unless `code` is cudaSuccess. Clears the
/// runtime's last error, so that the next call does not report it again; an error that destroyed
/// the context returns anyway. Kernels run later than their launch, so an error of a running kernel
/// may be reported by any later call; the text then says how to find the kernel.
void check_cuda(cudaError_t code, std::string_view operation);

/// Returns advice for errors of a library that an earlier fault of a kernel may have caused, "; a
/// kernel ...". Empty if all work is awaited.
std::string_view fault_advice();

/// While one exists, all work of this process is awaited operation by operation (model::GpuChecks),
/// so that check_cuda() does not blame others.
class WorkIsAwaited {
 public:
  WorkIsAwaited();
  ~WorkIsAwaited();
  WorkIsAwaited(const WorkIsAwaited&) = delete;
  WorkIsAwaited& operator=(const WorkIsAwaited&) = delete;
};

/// Deleter of a CUDA object. Ignores errors: at program exit the driver may already be unloaded.
template <auto end>
struct CudaEnd {
  template <class T>
  void operator()(T* object) const noexcept {
    if (end(object) != cudaSuccess) static_cast<void>(cudaGetLastError());
  }
};

/// Sets CUDA_DEVICE_MAX_CONNECTIONS to 32, unless the environment has a value. Must precede the
/// first CUDA call of the process. The default of 8 hardware queues is less than the streams of
/// Ballast and NCCL together. Streams that share a queue wait for each other, so a copy could wait
/// for a collective that waits for another rank.
void raise_connections();

/// Makes a GPU the current one of the calling thread. Throws Error(device).
void select_gpu(int ordinal);

/// Makes a stream of GPU `ordinal`, not ordered with others. `name`: for messages. Throws
/// Error(device).
std::unique_ptr<CudaStream> make_cuda_stream(int ordinal, std::string_view name);

/// Makes an event of GPU `ordinal`. record() takes the stream's watches and verdicts, which the
/// event's synchronize() then calls.
std::unique_ptr<Event> make_cuda_event(int ordinal);

/// Implements Device::pin for GPU `ordinal`. Pages that do not exist yet are placed on the GPU's
/// NUMA node if it is known and has room. `interrupted`: as in DeviceOptions.
std::unique_ptr<Pin> make_cuda_pin(int ordinal, HostBytes memory, std::string_view setting,
                                   const std::atomic<bool>* interrupted,
                                   const NumaNodes& nodes = {});

/// Returns how many of the `bytes` at `start` precede the next multiple of 1 GiB. Each such part is
/// one CUDA registration, and CUDA copies only ranges within one registration or outside all.
Bytes pinned_part(const std::byte* start, Bytes bytes);

/// Enables direct copies between two GPUs, both ways, and copies a pattern to see whether they
/// arrive: behind some IOMMUs and PCIe switches (ACS), the driver allows them and they are lost.
/// Returns whether they are direct. Otherwise they pass through host memory, and a warning says why
/// if the driver had allowed them. Throws Error(device).
/// Source: CUDA Runtime API, "Peer Device Memory Access"; NCCL, "Troubleshooting", "PCI Access
/// Control Services".
bool enable_peer_access(int one, int other);

/// Returns the root folder of the files below, "/". Tests replace it.
std::filesystem::path driver_root();

/// Returns the version of the NVIDIA kernel driver, "580.95.05"; "" if it is unknown. The CUDA
/// runtime only reports the CUDA version that a driver supports.
std::string driver_version(const std::filesystem::path& root = driver_root());

/// Returns whether the kernel offers an NVIDIA GPU to this process (/dev/nvidia0, and /dev/dxg in
/// WSL). Unlike the CUDA runtime, this also finds GPUs whose driver is too old for the program.
bool has_gpu_file(const std::filesystem::path& root = driver_root());

/// Formats a version of CUDA: 13000 is "13.0".
std::string cuda_version_text(int version);

/// Returns the properties of the calling thread's current GPU that the bits of kernels may depend
/// on: "NVIDIA H100 80GB HBM3 with 132 multiprocessors, driver 580.95.05, CUDA 13.0". CUDA is the
/// toolkit of this program. Throws Error(device).
std::string gpu_facts();

/// GPUs for which this program has machine code, as compute capabilities times ten: "80, 89, 90".
/// Empty if the build chose them itself (-Dgpu_architectures=native).
extern const char* const kMachineCode;

/// Returns whether the driver compiles kernels for a GPU of compute capability `capability` (times
/// ten) when they are first used, if a program has machine code for `codes` and PTX of the lowest
/// from 8.0 on. Machine code runs on GPUs of the same major number and the same or a larger minor
/// one. Source: NVIDIA, "CUDA C++ Programming Guide", section 3.1.2.
bool compiles_kernels(std::string_view codes, int capability);

/// Formats `codes`: "8.0, 8.9, 9.0".
std::string describe_codes(std::string_view codes);

/// Logs, once per process and kind of GPU, that the driver compiles the kernels for the GPU `name`.
void log_compilation(const std::string& name, int capability);

}  // namespace ballast::device
