#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include <cuda_runtime_api.h>

#include "src/model/compute/routing.h"
#include "src/model/cuda/rows/rows.h"

namespace ballast::model::cuda {

// Kernels of routers and experts, documented at RouterOps and ExpertOps.
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

/// Threads per block of the kernels of routers.
inline constexpr unsigned kRouterThreads = 256;

/// Groups of neighbouring rows of a router that are counted and summed separately. There are at
/// most kMaxGroups, and at most one per row.
struct RowGroups {
  std::size_t rows = 0;  ///< rows per group; the last one may have fewer
  std::size_t count = 0;

  explicit RowGroups(std::size_t of_all)
      : rows(std::max((of_all + kMaxGroups - 1) / kMaxGroups, kLeastRows)),
        count((of_all + rows - 1) / rows) {}

 private:
  static constexpr std::size_t kLeastRows = 32;
};

/// Counting sort of the choices by expert: writes `places` and `starts` (null: not wanted) of a
/// router. `counts`: scratch memory [groups, experts].
cudaError_t sort_choices(cudaStream_t stream, const RouterShape& shape, const Routing& routing,
                         std::int32_t* starts, std::int32_t* counts);

}  // namespace ballast::model::cuda
