#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include <cuda_runtime_api.h>

#include "src/model/compute/routing.h"

namespace ballast::model::cuda {

// Kernels of routers and experts, documented at the host device's (../../host/ops.h).
// Conventions: rows.h, but the numbers of experts, choices per token and rows are arbitrary.
// `partials`: scratch memory of partial_floats({rows, experts}) floats.

/// The values are arguments of kernels, so they may change when this returns.
cudaError_t put_values(cudaStream_t stream, std::span<const float> values, float* to);

/// The softmax is in fp32, its sums and sigmoids in double. There are at most 256 groups.
template <class T>
cudaError_t route(cudaStream_t stream, const RouterShape& shape, float* logits,
                  const RouterBiases<T>& biases, const std::int32_t* targets, const Routing& to,
                  std::int32_t* starts, float* partials);

/// Sums are in double.
cudaError_t add_router_totals(cudaStream_t stream, const RouterShape& shape, const Routing& routing,
                              bool first, const RouterTotals& totals, float* partials);
cudaError_t router_losses(cudaStream_t stream, const RouterShape& shape, const RouterTotals& totals,
                          double* losses);
/// Computed in double and rounded once.
template <class T>
cudaError_t router_gradient(cudaStream_t stream, const RouterShape& shape, const Routing& routing,
                            const RouterTotals& totals, const RouterLossScales& scales,
                            T* gradients);

template <class T>
cudaError_t gather_rows(cudaStream_t stream, const ExpertRows& rows, const T* x,
                        const float* weights, T* y, std::size_t padded, std::size_t width);
template <class T>
cudaError_t dot_rows(cudaStream_t stream, const ExpertRows& rows, const T* activated,
                     const T* gradients, const float* weights, float* weight_gradients,
                     std::size_t width);
template <class T>
cudaError_t dot_bias(cudaStream_t stream, const ExpertRows& rows, const T* bias, const T* gradients,
                     const float* weights, float* weight_gradients, std::size_t width);
cudaError_t put_quotients(cudaStream_t stream, const ExpertRows& rows, const float* values,
                          const float* weights, float* to);
template <class T>
cudaError_t add_bias(cudaStream_t stream, const T* bias, float* y, std::size_t rows,
                     std::size_t width);
/// The choices must be of different rows, as those of one expert are.
cudaError_t add_rows(cudaStream_t stream, const ExpertRows& rows, const float* y,
                     const float* weights, float* sums, std::size_t width);

}  // namespace ballast::model::cuda
