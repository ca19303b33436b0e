#pragma once

#include "ballast/device/host_stream.h"

namespace ballast::comm {

/// `stream` as one on which functions can be enqueued. Throws Error(state) when it is not the host
/// device's.
device::HostStream& as_host(device::Stream& stream);

/// Throws Error(comm) unless `device` is the host device.
void check_host_device(const device::Device& device);

}  // namespace ballast::comm
