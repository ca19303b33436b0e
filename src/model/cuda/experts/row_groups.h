#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include <cuda_runtime_api.h>

#include "src/model/compute/routing.h"
#include "src/model/cuda/rows/rows.h"

namespace ballast::model::cuda {

/// Threads per block of the kernels of routers.
inline constexpr unsigned kRouterThreads = 256;

/// Groups of neighbouring rows of a router that are counted and summed separately. There are at
/// most kMostGroups, and at most one per row.
struct RowGroups {
  std::size_t rows = 0;  ///< rows per group; the last one may have fewer
  std::size_t count = 0;

  explicit RowGroups(std::size_t of_all)
      : rows(std::max((of_all + kMostGroups - 1) / kMostGroups, kLeastRows)),
        count((of_all + rows - 1) / rows) {}

 private:
  static constexpr std::size_t kLeastRows = 32;
};

/// Counting sort of the choices by expert: writes `places` and `starts` (null: not wanted) of a
/// router. `counts`: scratch memory [groups, experts].
cudaError_t sort_choices(cudaStream_t stream, const RouterShape& shape, const Routing& routing,
                         std::int32_t* starts, std::int32_t* counts);

}  // namespace ballast::model::cuda
