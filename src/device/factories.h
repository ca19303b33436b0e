#pragma once

#include <memory>
#include <string>

#include "ballast/device/device.h"

namespace ballast::device {

/// The host device. Throws Error(memory) when the budget cannot be mapped.
std::unique_ptr<Device> make_host_device(const DeviceOptions& options);

/// The CUDA device, or Error(device) saying why there is none.
std::unique_ptr<Device> make_cuda_device(const DeviceOptions& options);

/// Empty when make_cuda_device can work; else the reason, one line.
std::string cuda_refusal();

}  // namespace ballast::device
