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

/// Returns the index of the fastest of `count` ways to do the same work on `stream`, the first one
/// on a tie; empty if none can be used. `enqueue(i)` enqueues way i, or returns false without
/// enqueuing anything. The ways take turns, and the shortest time of each counts. Waits for the
/// stream. Throws Error(device), and exceptions of `enqueue`.
std::optional<std::size_t> fastest_way(cudaStream_t stream, std::size_t count,
                                       const std::function<bool(std::size_t)>& enqueue);

/// Temporary device memory outside the budget.
using TrialMemory = std::unique_ptr<void, device::CudaEnd<cudaFree>>;
/// Allocates the memory, or returns null if there is not enough.
TrialMemory take_trial_memory(Bytes bytes);

/// Returns the name of the calling thread's current GPU. Throws Error(device).
std::string current_gpu();

}  // namespace ballast::model::cuda
