#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <string_view>

#include "ballast/device/device.h"

namespace ballast::device {

/// Device::pin for GPU number `ordinal`. Memory whose pages do not exist yet gets them on the NUMA
/// node next to that GPU, if the machine tells which one that is and has room there. `interrupted`
/// as in DeviceOptions.
std::unique_ptr<Pin> make_cuda_pin(int ordinal, HostBytes memory, std::string_view setting,
                                   const std::atomic<bool>* interrupted);

/// Memory is pinned in parts, each a registration of CUDA's, which end where the address is a
/// multiple of 1 GiB. CUDA promises to copy a range that lies in one registration or in none, so no
/// copy may cross such an address: this many of the `bytes` at `start` do not.
Bytes pinned_part(const std::byte* start, Bytes bytes);

}  // namespace ballast::device
