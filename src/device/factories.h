#pragma once

#include <memory>

#include "ballast/device/device.h"

namespace ballast::device {

/// The host device. Throws Error(memory) when the budget cannot be mapped.
std::unique_ptr<Device> make_host_device(const DeviceOptions& options);

/// The CUDA device, or Error(device) saying why there is none.
std::unique_ptr<Device> make_cuda_device(const DeviceOptions& options);

}  // namespace ballast::device
