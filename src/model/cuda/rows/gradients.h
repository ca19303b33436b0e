#pragma once

#include <cstddef>
#include <cstdint>

#include <cuda_runtime_api.h>

#include "ballast/model/gradient_stats.h"

namespace ballast::model::cuda {

// Kernels behind Compute's calls of the same names, where the arguments are described. Conventions:
// rows.h, but sizes may be any. `partial`: scratch memory, a GradientStats per kStatsChunk values.

/// packed = gradient + tied (its first `tied_size` elements), rounded to T; stats of the packed
/// values unless null (then `partial` is not used). No array may be another's.
template <class T>
cudaError_t pack_gradient(cudaStream_t stream, const float* gradient, const float* tied,
                          std::size_t tied_size, T* packed, std::size_t size,
                          GradientStats* partial, GradientStats* stats);

template <class T>
cudaError_t measure_gradient(cudaStream_t stream, const T* packed, std::size_t size,
                             GradientStats* partial, GradientStats* stats);

/// The same bits as the host device's (ballast/core/weight_codes.h).
template <class T>
cudaError_t encode_weights(cudaStream_t stream, const T* weights, std::size_t blocks,
                           std::int8_t* codes, float* scales);
template <class T>
cudaError_t decode_weights(cudaStream_t stream, const std::int8_t* codes, const float* scales,
                           std::size_t blocks, T* weights);

}  // namespace ballast::model::cuda
