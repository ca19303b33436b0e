#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include <cuda_runtime_api.h>

#include "ballast/core/units.h"

#include "src/device/cuda/errors.h"

namespace ballast::model::cuda {

/// The index of the fastest of `count` ways to do the same work on `stream`, of equally fast ones
/// the first; empty if none can be used. `enqueue(i)` enqueues way i; it returns false if this
/// cannot be done and has enqueued nothing then. The ways take turns, and the shortest time of each
/// counts. Waits for the stream. Throws Error(device), and what `enqueue` throws.
std::optional<std::size_t> fastest_way(cudaStream_t stream, std::size_t count,
                                       const std::function<bool(std::size_t)>& enqueue);

/// Device memory beside the budget, for a short time.
using TrialMemory = std::unique_ptr<void, device::CudaEnd<cudaFree>>;
/// Null if there is not enough.
TrialMemory take_trial_memory(Bytes bytes);

/// The name of the calling thread's current GPU. Throws Error(device).
std::string current_gpu();

}  // namespace ballast::model::cuda
