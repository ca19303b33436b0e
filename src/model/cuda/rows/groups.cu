#include <algorithm>

#include "src/device/cuda/eight.h"
#include "src/device/cuda/kernel_language.h"
#include "src/model/cuda/rows/rows.h"

namespace ballast::model::cuda {
namespace {

using device::kWarp;

constexpr unsigned kMostGroupThreads = 256;

/// There is one block per row.
template <class T>
__global__ void copy_columns(CopiedGroups groups, const T* from, StepsOfGroups from_steps, T* to,
                             StepsOfGroups to_steps) {
  const std::size_t wide = groups.width + groups.zeros;
  from += blockIdx.x * from_steps.row;
  to += blockIdx.x * to_steps.row;
  for (std::size_t at = threadIdx.x; at < groups.count * wide; at += blockDim.x) {
    const std::size_t group = at / wide;
    const std::size_t column = at % wide;
    to[group * to_steps.group + column] =
        column < groups.width ? from[group * from_steps.group + column] : T{};
  }
}

/// There is one block per row.
template <class T>
__global__ void sum_group_columns(CopiedGroups groups, const T* from, StepsOfGroups steps, T* to,
                                  std::size_t to_row) {
  from += blockIdx.x * steps.row;
  for (std::size_t column = threadIdx.x; column < groups.width; column += blockDim.x) {
    float sum = 0.0F;
    for (std::size_t group = 0; group < groups.count; ++group) {
      sum += device::widen(from[group * steps.group + column]);
    }
    device::narrow(sum, to[blockIdx.x * to_row + column]);
  }
}

device::LaunchConfig by_row(cudaStream_t stream, std::size_t rows, std::size_t columns) {
  const std::size_t warps =
      std::min<std::size_t>((columns + kWarp - 1) / kWarp, kMostGroupThreads / kWarp);
  return {.stream = stream,
          .blocks = static_cast<unsigned>(rows),
          .threads = static_cast<unsigned>(warps * kWarp)};
}

}  // namespace

template <class T>
cudaError_t copy_groups(cudaStream_t stream, const CopiedGroups& groups, const T* from,
                        const StepsOfGroups& from_steps, T* to, const StepsOfGroups& to_steps) {
  const std::size_t columns = groups.count * (groups.width + groups.zeros);
  if (groups.rows == 0 || columns == 0) return cudaSuccess;
  return device::launch(by_row(stream, groups.rows, columns), &copy_columns<T>, groups, from,
                        from_steps, to, to_steps);
}

template <class T>
cudaError_t sum_groups(cudaStream_t stream, const CopiedGroups& groups, const T* from,
                       const StepsOfGroups& steps, T* to, std::size_t to_row) {
  if (groups.rows == 0 || groups.width == 0) return cudaSuccess;
  return device::launch(by_row(stream, groups.rows, groups.width), &sum_group_columns<T>, groups,
                        from, steps, to, to_row);
}

#define BALLAST_GROUPS(T)                                                           \
  template cudaError_t copy_groups(cudaStream_t, const CopiedGroups&, const T*,     \
                                   const StepsOfGroups&, T*, const StepsOfGroups&); \
  template cudaError_t sum_groups(cudaStream_t, const CopiedGroups&, const T*,      \
                                  const StepsOfGroups&, T*, std::size_t);
BALLAST_GROUPS(float)
BALLAST_GROUPS(Bf16)
BALLAST_GROUPS(F16)
#undef BALLAST_GROUPS

}  // namespace ballast::model::cuda
