#pragma once

#include <memory>

#include "ballast/update/device_update.h"

namespace ballast::update {

/// Makes updates by kernels on a CUDA device. Throws Error(device).
std::unique_ptr<DeviceUpdate> make_cuda_update(device::Device& device);

}  // namespace ballast::update
