#pragma once

#include <cstdint>

#include "ballast/core/dtype.h"
#include "ballast/core/view.h"

namespace ballast::comm {

// What Communicator asks of its callers; breaches are Error(state).
void check_all_gather(ConstDeviceBytes part, DeviceBytes whole, std::uint32_t world);
void check_reduce_scatter(DeviceBytes whole, DeviceBytes part, DType type, DeviceBytes scratch,
                          std::uint32_t world);
void check_all_reduce(DeviceBytes whole, DType type, DeviceBytes scratch, std::uint32_t world);
void check_broadcast(DeviceBytes data, std::uint32_t root, std::uint32_t world);

}  // namespace ballast::comm
