#pragma once

#include <memory>

#include "ballast/device/device.h"
#include "ballast/device/plain_copies.h"

namespace ballast::device {

/// The host device. Throws Error(memory) when the budget cannot be mapped.
std::unique_ptr<Device> make_host_device(const DeviceOptions& options);

/// own_memory() of the CUDA device, where there is one.
Bytes free_cuda_memory(const DeviceOptions& options);

/// gpu_name() of the CUDA device, or Error(device) saying why there is none.
std::string cuda_name(const DeviceOptions& options);

/// The CUDA device, or Error(device) saying why there is none.
std::unique_ptr<Device> make_cuda_device(const DeviceOptions& options);

/// make_plain_copies for the two kinds of devices.
std::unique_ptr<PlainCopies> make_host_plain_copies(Bytes bytes);
std::unique_ptr<PlainCopies> make_cuda_plain_copies(Device& device, Bytes bytes);

}  // namespace ballast::device
