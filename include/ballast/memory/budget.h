#pragma once

#include <cstdint>

#include "ballast/core/units.h"

namespace ballast::memory {

/// Returns the bytes that this process may still allocate: the smaller of the machine's available
/// memory and the rest of the process's cgroup limit (v1 or v2, CgroupLimits::memory).
Bytes available_memory();

/// Returns the peak resident size of this process (VmHWM) in bytes; 0 if /proc has no value.
Bytes peak_resident_bytes();

/// Returns the bytes of a device with separate memory, of which `free` are free, that libraries
/// need in addition to the budget: for contexts, kernels of cuBLASLt and cuDNN, and buffers of
/// NCCL. 1.5 GiB, but at most a quarter.
Bytes library_reserve(Bytes free);

struct Budgets {
  Bytes device = 0;  ///< budget of each device
  Bytes host = 0;
};

/// Fills in budgets that are 0 ("auto"). A device with separate memory, of which `on_device` bytes
/// are free, gets these minus library_reserve(), or minus 5% if that is more.
/// The host tier gets 80% of `available`. On the host device (`on_device` is 0) both tiers share
/// this 80%: an explicit budget is deducted first; two automatic ones get half each. Several host
/// devices (`devices`) divide the part of the device tier.
Budgets resolve_budgets(Budgets wanted, Bytes available, Bytes on_device = 0,
                        std::uint32_t devices = 1);

}  // namespace ballast::memory
