#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include <cuda_runtime_api.h>

#include "src/model/compute/routing.h"
#include "src/model/cuda/rows/rows.h"

namespace ballast::model::cuda {

/// Groups of neighbouring rows of a router, which are counted and added up separately. There are at
/// most as many as rows, and at most kMostGroups.
struct RowGroups {
  std::size_t rows = 0;  ///< of a group; the last one may have fewer
  std::size_t count = 0;

  explicit RowGroups(std::size_t of_all)
      : rows(std::max((of_all + kMostGroups - 1) / kMostGroups, kLeastRows)),
        count((of_all + rows - 1) / rows) {}

 private:
  static constexpr std::size_t kLeastRows = 32;
};

/// A counting sort of the choices by expert: `places` and `starts` (null: not wanted) of a router.
/// `counts`: scratch memory [groups, experts].
cudaError_t sort_choices(cudaStream_t stream, const RouterShape& shape, const Routing& routing,
                         std::int32_t* starts, std::int32_t* counts);

}  // namespace ballast::model::cuda
