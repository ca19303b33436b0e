#pragma once

#include <cstddef>
#include <cstdint>

#include <cuda_runtime_api.h>

#include "src/model/compute/token_rows.h"
#include "src/model/cuda/rows/rows.h"

namespace ballast::model::cuda {

// Kernels of values that layers share besides the residual stream, documented at host::LinkOps.
// Conventions: rows.h.

template <class T>
cudaError_t put_sums(cudaStream_t stream, const T* x, std::size_t step, Rows rows, bool adds,
                     float* sums);
template <class T>
cudaError_t add_sums(cudaStream_t stream, const float* sums, Rows rows, T* x, std::size_t step);
template <class T>
cudaError_t mix_rows(cudaStream_t stream, const TokenRows<const T>& rows, const TokenMix& how,
                     const T* x, std::size_t step, T* y);
template <class T>
cudaError_t mix_rows_backward(cudaStream_t stream, const TokenRows<const T>& dy,
                              const TokenMix& how, float* of_rows, T* dx, std::size_t step);

}  // namespace ballast::model::cuda
