#pragma once

#include <memory>

#include "ballast/device/device.h"
#include "ballast/device/plain_copies.h"

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

}  // namespace ballast::device
