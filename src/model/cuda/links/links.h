#pragma once

#include <cstddef>
#include <cstdint>

#include <cuda_runtime_api.h>

#include "src/model/compute/token_rows.h"
#include "src/model/cuda/rows/rows.h"

namespace ballast::model::cuda {

// Kernels of values that layers share besides the residual stream, documented at host::LinkOps.
// Conventions: rows.h. A token outside a table causes no access outside the arrays: its gradient is
// dropped.

template <class T>
cudaError_t put_sums(cudaStream_t stream, const T* x, std::size_t step, Rows rows, bool adds,
                     float* sums);
template <class T>
cudaError_t add_sums(cudaStream_t stream, const float* sums, Rows rows, T* x, std::size_t step);
template <class T>
cudaError_t mix_rows(cudaStream_t stream, const TokenRows<const T>& rows, const TokenMix& how,
                     const T* x, std::size_t step, T* y);
/// `links`: scratch memory for 2 * rows values, see scatter().
template <class T>
cudaError_t mix_rows_backward(cudaStream_t stream, const TokenRows<float>& table,
                              const TokenMix& how, const std::int32_t* tokens, std::size_t rows,
                              const T* dy, T* dx, std::size_t step, std::uint32_t* links);

}  // namespace ballast::model::cuda
