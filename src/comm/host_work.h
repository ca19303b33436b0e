#pragma once

#include <cstdint>
#include <span>

#include "ballast/core/dtype.h"
#include "ballast/core/view.h"
#include "ballast/device/host_stream.h"

namespace ballast::comm {

/// `stream` as one on which functions can be enqueued. Throws Error(state) when it is not the host
/// device's.
device::HostStream& as_host(device::Stream& stream);

/// Throws Error(comm) unless `device` is the host device.
void check_host_device(const device::Device& device);

/// Throws Error(state) unless `members` are distinct ranks of `world`, `rank` among them, or none.
void check_members(std::span<const std::uint32_t> members, std::uint32_t rank, std::uint32_t world);

// What Communicator asks of its callers; breaches are Error(state).
void check_all_gather(ConstDeviceBytes part, DeviceBytes whole, std::uint32_t world);
void check_reduce_scatter(DeviceBytes whole, DeviceBytes part, DType type, DeviceBytes scratch,
                          std::uint32_t world);
void check_all_reduce(DeviceBytes whole, DType type, DeviceBytes scratch, std::uint32_t world);
void check_broadcast(DeviceBytes data, std::uint32_t root, std::uint32_t world);

}  // namespace ballast::comm
