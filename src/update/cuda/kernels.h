#pragma once

#include <cuda_runtime_api.h>

#include "cpu_adam/variant.h"

namespace ballast::update::cuda {

/// Storage formats of the arrays of cpu_adam::Streams.
struct Formats {
  cpu_adam::Weights::Format weights;
  DType gradient;
  cpu_adam::Moments::Format moments;
};

/// Enqueues one update of `streams`, which are in device memory, aligned to their elements. With
/// 8-bit moments they start at a multiple of Codes::kBlock elements. Returns the launch's result.
cudaError_t update(cudaStream_t stream, cpu_adam::Optimizer optimizer, const Formats& formats,
                   const cpu_adam::Coefficients& coefficients, const cpu_adam::Streams& streams);

/// Loads the kernels onto the GPU. Otherwise the first launch does, and may wait for other streams.
cudaError_t load_updates();

}  // namespace ballast::update::cuda
