#pragma once

#include <cstddef>
#include <cstdint>

#include <cuda_runtime_api.h>

#include "ballast/core/gradient_stats.h"
#include "ballast/model/kernel_sizes.h"

#include "src/model/compute/embedding.h"

namespace ballast::model::cuda {

// Kernels for the calls of Compute with the same names, which document the arguments. Conventions:
// rows.h, but sizes are arbitrary. `partial`: scratch memory, one GradientStats per kStatsChunk
// values.

/// Packs a gradient. Writes the statistics of the packed values to `stats` unless it is null; then
/// `partial` is not used. The arrays must not overlap. If there is a table, its width is a multiple
/// of 8, and so is its size.
template <class T>
cudaError_t pack_gradient(cudaStream_t stream, const UnpackedGradient& from, T* packed,
                          std::size_t size, GradientStats* partial, GradientStats* stats);

template <class T>
cudaError_t measure_gradient(cudaStream_t stream, const T* packed, std::size_t size,
                             GradientStats* partial, GradientStats* stats);

/// The bits equal the host device's (ballast/core/weight_codes.h).
template <class T>
cudaError_t encode_weights(cudaStream_t stream, const T* weights, std::size_t blocks,
                           std::int8_t* codes, float* scales);
template <class T>
cudaError_t decode_weights(cudaStream_t stream, const std::int8_t* codes, const float* scales,
                           std::size_t blocks, T* weights);

}  // namespace ballast::model::cuda
