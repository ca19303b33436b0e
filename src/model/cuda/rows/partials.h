#pragma once

#include <cstddef>

#include <cuda_runtime_api.h>

namespace ballast::model::cuda {

/// Groups of rows whose columns are summed up by themselves, at most: enough for the largest GPUs,
/// and few enough that their sums are little beside the rows. How many there are and which rows
/// they have follows from the extents alone, and so does the order of the whole sum.
inline constexpr std::size_t kMostGroups = 256;

/// Sums of columns, by group of rows: [groups, width] or, with two gradients, [groups, 2, width].
struct Partials {
  const float* sums = nullptr;
  std::size_t groups = 0;
  std::size_t width = 0;
};

/// Adds the sums over the groups to `gradient` [width] and, unless it is null, `second` [width].
cudaError_t add_partials(cudaStream_t stream, const Partials& partials, float* gradient,
                         float* second);

}  // namespace ballast::model::cuda
