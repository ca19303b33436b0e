#pragma once

#include <memory>

#include "ballast/device/device.h"
#include "ballast/device/plain_copies.h"

namespace ballast::device {

/// The host device. Throws Error(memory) when the budget cannot be mapped.
std::unique_ptr<Device> make_host_device(const DeviceOptions& options);

/// Why GPU kernels cannot run on this process's GPU; there is one. One line, or "".
std::string unsuitable_gpu(const DeviceOptions& options);
/// Why a library that every run on a GPU needs cannot be loaded, one line, or "".
std::string missing_gpu_library();

/// own_memory(), gpu_name() and make_device() of the CUDA device. The last two throw Error(device)
/// if there is none.
Bytes free_cuda_memory(const DeviceOptions& options);
std::string cuda_name(const DeviceOptions& options);
std::unique_ptr<Device> make_cuda_device(const DeviceOptions& options);

std::unique_ptr<PlainCopies> make_host_plain_copies(Bytes bytes);
std::unique_ptr<PlainCopies> make_cuda_plain_copies(Device& device, Bytes bytes);

}  // namespace ballast::device
