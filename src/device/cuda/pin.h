#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <string_view>

#include "ballast/device/device.h"

namespace ballast::device {

/// Implements Device::pin for GPU `ordinal`. Pages that do not exist yet are placed on the GPU's
/// NUMA node if it is known and has room. `interrupted`: as in DeviceOptions.
std::unique_ptr<Pin> make_cuda_pin(int ordinal, HostBytes memory, std::string_view setting,
                                   const std::atomic<bool>* interrupted);

/// Returns how many of the `bytes` at `start` precede the next multiple of 1 GiB. Each such part is
/// one CUDA registration, and CUDA copies only ranges within one registration or outside all.
Bytes pinned_part(const std::byte* start, Bytes bytes);

}  // namespace ballast::device
