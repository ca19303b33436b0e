#pragma once

#include <cuda_runtime_api.h>

#include "cpu_adam/variant.h"

namespace ballast::update::cuda {

/// How the arrays of cpu_adam::Streams are stored.
struct Formats {
  cpu_adam::Weights::Format weights;
  DType gradient;
  cpu_adam::Moments::Format moments;  ///< of those that the optimizer keeps
};

/// Enqueues one update of `streams`, which lie in device memory, each aligned to its element; with
/// 8-bit moments they start at a multiple of Codes::kBlock elements. Elements are independent but
/// for the shared exponents of such moments. Returns what the launch was answered.
cudaError_t update(cudaStream_t stream, cpu_adam::Optimizer optimizer, const Formats& formats,
                   const cpu_adam::Coefficients& coefficients, const cpu_adam::Streams& streams);

/// Brings the kernels onto the GPU: a first launch that does it may wait for what other streams do.
cudaError_t load_updates();

}  // namespace ballast::update::cuda
