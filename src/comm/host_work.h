#pragma once

#include "ballast/device/host_stream.h"

namespace ballast::comm {

using device::as_host;

/// Throws Error(comm) unless `device` is the host device.
void check_host_device(const device::Device& device);

}  // namespace ballast::comm
