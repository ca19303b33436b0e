#pragma once

#include <cstddef>

#include <cuda_runtime_api.h>

namespace ballast::device {

/// Shared memory that a block may have without being allowed it.
inline constexpr std::size_t kFreelyShared = std::size_t{48} << 10U;

/// Lets blocks of `kernel` have so many bytes of shared memory on the device at hand. CUDA is asked
/// once per kernel and device (and again for more): every launch comes by here. Thread-safe.
/// Returns what CUDA answered.
cudaError_t allow_shared_memory(const void* kernel, std::size_t bytes);

}  // namespace ballast::device
