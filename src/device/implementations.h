#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <mutex>
#include <string_view>

#include "ballast/core/memory.h"
#include "ballast/device/device.h"

namespace ballast::device {

/// Makes the host device. Throws Error(memory) if the budget cannot be mapped.
std::unique_ptr<Device> make_host_device(const DeviceOptions& options);

/// Returns why GPU kernels cannot run on this process's GPU, in one line, or "". There must be a
/// GPU.
std::string unsuitable_gpu(const DeviceOptions& options);
/// Returns whether this process has a GPU, even if the driver or the GPU's age prevents its use.
bool has_gpu();
/// Returns whether the GPU of this process is too old for any training; false if that is unknown.
bool gpu_is_outdated(const DeviceOptions& options);
/// Returns why a library that every run on a GPU needs cannot be loaded, in one line, or "".
std::string missing_gpu_library();

/// own_memory(), gpu_name() and make_device() for the CUDA device. The last two throw Error(device)
/// if there is none.
Bytes free_cuda_memory(const DeviceOptions& options);
std::string cuda_name(const DeviceOptions& options);
std::unique_ptr<Device> make_cuda_device(const DeviceOptions& options);

std::unique_ptr<PlainCopies> make_host_plain_copies(Bytes bytes);
std::unique_ptr<PlainCopies> make_cuda_plain_copies(Device& device, Bytes bytes);

/// Allocates a device's memory in whole pages, from start to end, without freeing. Does not own the
/// memory. Thread-safe.
class DeviceMemory {
 public:
  /// `memory`: page-aligned, a whole number of pages.
  explicit DeviceMemory(DeviceBytes memory) : budget_(memory.size()), bump_(memory.raw()) {}

  DeviceBytes take(Bytes bytes, std::string_view what);
  [[nodiscard]] Bytes budget() const { return budget_; }
  [[nodiscard]] Bytes taken() const;

 private:
  Bytes budget_;
  mutable std::mutex mutex_;
  Bump bump_;
};

/// Populates the missing pages of `memory` (page-aligned, whole pages) with several threads,
/// because one thread zeroes pages at a fraction of memory's speed. Keeps the contents. If the
/// kernel refuses, pages are created at their first use.
void make_resident(HostBytes memory);

/// Returns the NUMA node of the PCI device at `address` ("0000:3b:00.0", any case); -1 if unknown.
/// `devices`: the kernel's folder of PCI devices.
int numa_node_of(std::string_view address, const std::filesystem::path& devices);

/// Asks the kernel to place the missing pages of `memory` (page-aligned, whole pages) on `node`, or
/// on others when it is full. Returns false if the kernel refuses.
bool prefer_numa_node(HostBytes memory, int node);

/// How the kernel describes NUMA nodes and places memory on them. Tests replace both.
struct NumaNodes {
  std::filesystem::path devices = "/sys/bus/pci/devices";  ///< see numa_node_of()
  std::function<bool(HostBytes memory, int node)> prefer = prefer_numa_node;
};

}  // namespace ballast::device
