#pragma once

#include <cstddef>

#include <cuda_runtime_api.h>

namespace ballast::device {

/// Shared memory per block that needs no attribute.
inline constexpr std::size_t kFreelyShared = std::size_t{48} << 10U;

/// Allows blocks of `kernel` to use `bytes` of shared memory on the current device. Every launch
/// calls this; CUDA is called only when the limit of a kernel and device rises. Thread-safe.
cudaError_t allow_shared_memory(const void* kernel, std::size_t bytes);

}  // namespace ballast::device
