#include <algorithm>

#include "src/device/cuda/eight.h"
#include "src/device/cuda/kernel_language.h"
#include "src/model/cuda/rows/rows.h"

namespace ballast::model::cuda {
namespace {

using device::kEight;
using device::kWarp;

/// Threads that share a column; each takes every kStrands-th row of the group.
constexpr unsigned kStrands = 8;
constexpr unsigned kColumnThreads = kStrands * kWarp;
/// Number of rows from which groups are faster.
constexpr std::size_t kLeastRows = 64;

/// There is one block per 256 columns (x) and group of rows (y), the rows r with r % groups ==
/// group. Sums x or, with `products`, x y times the columns' factors.
template <class T, bool products>
__global__ void sum_columns(ColumnProducts<T> c, float* partials) {
  const std::size_t width = c.width;
  constexpr unsigned kColumns = kWarp * kEight;
  alignas(16) __shared__ float strands[kStrands][kColumns];
  const unsigned lane = threadIdx.x % kWarp;
  const unsigned strand = threadIdx.x / kWarp;
  const std::size_t column = std::size_t{blockIdx.x} * kColumns + lane * kEight;
  float sums[kEight] = {};
  if (column < width) {
    const std::size_t step = std::size_t{gridDim.y} * kStrands;
    for (std::size_t row = blockIdx.y + std::size_t{strand} * gridDim.y; row < c.rows;
         row += step) {
      float values[kEight];
      device::read(c.x + row * c.x_step + column, values);
      if constexpr (products) {
        float others[kEight];
        device::read(c.y + row * c.y_step + column, others);
        for (unsigned i = 0; i < kEight; ++i) values[i] *= others[i];
      }
      for (unsigned i = 0; i < kEight; ++i) sums[i] += values[i];
    }
  }
  device::write(sums, &strands[strand][lane * kEight]);
  __syncthreads();
  const std::size_t mine = std::size_t{blockIdx.x} * kColumns + threadIdx.x;
  if (mine >= width) return;
  float sum = 0.0F;
  for (unsigned i = 0; i < kStrands; ++i) sum += strands[i][threadIdx.x];
  if constexpr (products) sum *= c.factors[mine];
  partials[blockIdx.y * width + mine] = sum;
}

/// There is one block per kWarp columns of the partial sums. The first `width` columns belong to
/// `gradient`, the others to `second`; null: not wanted.
__global__ void sum_partial_groups(const float* partials, std::size_t groups, std::size_t columns,
                                   std::size_t width, float* gradient, float* second) {
  __shared__ float strands[kStrands][kWarp];
  const unsigned lane = threadIdx.x % kWarp;
  const unsigned strand = threadIdx.x / kWarp;
  const std::size_t column = std::size_t{blockIdx.x} * kWarp + lane;
  float sum = 0.0F;
  if (column < columns) {
    for (std::size_t group = strand; group < groups; group += kStrands) {
      sum += partials[group * columns + column];
    }
  }
  strands[strand][lane] = sum;
  __syncthreads();
  if (strand > 0 || column >= columns) return;
  for (unsigned i = 1; i < kStrands; ++i) sum += strands[i][lane];
  float* const to = column < width ? gradient : second;
  if (to != nullptr) to[column < width ? column : column - width] += sum;
}

template <class T, bool products>
cudaError_t add_columns(cudaStream_t stream, const ColumnProducts<T>& c, float* gradient,
                        float* partials) {
  if (c.rows == 0 || c.width == 0) return cudaSuccess;
  constexpr std::size_t kColumns = std::size_t{kWarp} * kEight;
  const std::size_t groups = std::min((c.rows + kLeastRows - 1) / kLeastRows, kMostGroups);
  const cudaError_t code =
      device::launch({.stream = stream,
                      .blocks = {static_cast<unsigned>((c.width + kColumns - 1) / kColumns),
                                 static_cast<unsigned>(groups)},
                      .threads = kColumnThreads},
                     &sum_columns<T, products>, c, partials);
  if (code != cudaSuccess) return code;
  return add_partials(stream, {partials, groups, c.width, false}, gradient, nullptr);
}

}  // namespace

cudaError_t add_partials(cudaStream_t stream, const Partials& partials, float* gradient,
                         float* second) {
  if (gradient == nullptr && second == nullptr) return cudaSuccess;
  const std::size_t columns = partials.two ? 2 * partials.width : partials.width;
  return device::launch({.stream = stream,
                         .blocks = static_cast<unsigned>((columns + kWarp - 1) / kWarp),
                         .threads = kColumnThreads},
                        &sum_partial_groups, partials.sums, partials.groups, columns,
                        partials.width, gradient, second);
}

std::size_t partial_floats(Rows most) {
  return 2 * std::min(most.count, kMostGroups) * most.width;
}

template <class T>
cudaError_t add_column_sums(cudaStream_t stream, const T* x, std::size_t stride, float* gradient,
                            float* partials, Rows rows) {
  return add_columns<T, false>(stream,
                               {.x = x, .x_step = stride, .rows = rows.count, .width = rows.width},
                               gradient, partials);
}

template <class T>
cudaError_t add_column_products(cudaStream_t stream, const ColumnProducts<T>& columns,
                                float* gradient, float* partials) {
  return add_columns<T, true>(stream, columns, gradient, partials);
}

template cudaError_t add_column_products(cudaStream_t, const ColumnProducts<float>&, float*,
                                         float*);
template cudaError_t add_column_products(cudaStream_t, const ColumnProducts<Bf16>&, float*, float*);
template cudaError_t add_column_products(cudaStream_t, const ColumnProducts<F16>&, float*, float*);
template cudaError_t add_column_sums(cudaStream_t, const float*, std::size_t, float*, float*, Rows);
template cudaError_t add_column_sums(cudaStream_t, const Bf16*, std::size_t, float*, float*, Rows);
template cudaError_t add_column_sums(cudaStream_t, const F16*, std::size_t, float*, float*, Rows);

}  // namespace ballast::model::cuda
