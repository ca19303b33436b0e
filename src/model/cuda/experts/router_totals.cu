#include "src/device/cuda/eight_values.h"
#include "src/model/cuda/experts/experts.h"
#include "src/model/cuda/rows/row_threads.h"

namespace ballast::model::cuda {
namespace {

// Sums over all routers, and the router losses.

/// Threads that share a column; each takes every kRouterStrands-th row or group.
constexpr unsigned kRouterStrands = kRouterThreads / kWarp;

/// Sums the strands' values for the lane's column. The result is in the threads of the first
/// strand.
__device__ double sum_of_strands(double value) {
  __shared__ double strands[kRouterStrands][kWarp];
  const unsigned lane = threadIdx.x % kWarp;
  strands[threadIdx.x / kWarp][lane] = value;
  __syncthreads();
  double sum = 0.0;
  for (unsigned i = 0; i < kRouterStrands; ++i) sum += strands[i][lane];
  return sum;
}

/// Writes sums [groups, experts] of the probabilities, with one block per kWarp experts (x) and
/// group (y). `divisors` [rows]: sums of the rows' sigmoids, 0 for padding; null: 1.
__global__ void __launch_bounds__(kRouterThreads)
    sum_probabilities(const float* probabilities, const float* divisors, std::size_t rows,
                      std::size_t experts, std::size_t of_group, double* sums) {
  const std::size_t expert = std::size_t{blockIdx.x} * kWarp + threadIdx.x % kWarp;
  const std::size_t begin = blockIdx.y * of_group;
  const std::size_t end = begin + of_group < rows ? begin + of_group : rows;
  double sum = 0.0;
  if (expert < experts) {
    for (std::size_t row = begin + threadIdx.x / kWarp; row < end; row += kRouterStrands) {
      const double divisor = divisors == nullptr ? 1.0 : static_cast<double>(divisors[row]);
      if (divisor == 0.0) continue;
      sum += static_cast<double>(probabilities[row * experts + expert]) / divisor;
    }
  }
  sum = sum_of_strands(sum);
  if (threadIdx.x < kWarp && expert < experts) sums[blockIdx.y * experts + expert] = sum;
}

/// Returns the number of choices of experts below `expert`. Choices are sorted by expert.
__device__ unsigned choices_below(const Routing& routing, unsigned choices, std::size_t expert) {
  unsigned begin = 0;
  unsigned end = choices;
  while (begin < end) {
    const unsigned middle = begin + (end - begin) / 2;
    const std::int32_t place = routing.places[middle];
    if (place >= 0 && static_cast<std::size_t>(routing.chosen[place]) < expert) {
      begin = middle + 1;
    } else {
      end = middle;
    }
  }
  return begin;
}

/// There is one block per kWarp experts.
__global__ void __launch_bounds__(kRouterThreads)
    add_groups(const double* sums, std::size_t groups, std::size_t experts, Routing routing,
               unsigned choices, bool first, RouterTotals totals) {
  const std::size_t expert = std::size_t{blockIdx.x} * kWarp + threadIdx.x % kWarp;
  double sum = 0.0;
  if (expert < experts) {
    for (std::size_t group = threadIdx.x / kWarp; group < groups; group += kRouterStrands) {
      sum += sums[group * experts + expert];
    }
  }
  sum = sum_of_strands(sum);
  if (threadIdx.x >= kWarp || expert >= experts) return;
  const double count =
      choices_below(routing, choices, expert + 1) - choices_below(routing, choices, expert);
  totals.probabilities[expert] = (first ? 0.0 : totals.probabilities[expert]) + sum;
  totals.choices[expert] = (first ? 0.0 : totals.choices[expert]) + count;
}

/// There is one block; each thread adds a part.
__global__ void __launch_bounds__(kRouterThreads)
    add_squares(const float* log_sums, std::size_t rows, bool first, double* squares) {
  __shared__ double shared[kWarp];
  double sum[1] = {};
#pragma unroll 8
  for (std::size_t row = threadIdx.x; row < rows; row += kRouterThreads) {
    const auto value = static_cast<double>(log_sums[row]);
    sum[0] += value * value;
  }
  device::block_sum(sum, shared);
  if (threadIdx.x == 0) *squares = (first ? 0.0 : *squares) + sum[0];
}

/// There is one block.
__global__ void __launch_bounds__(kRouterThreads)
    find_router_losses(RouterTotals totals, std::size_t experts, std::size_t per_token,
                       double* losses) {
  __shared__ double counts[kWarp];
  __shared__ double shared[kWarp];
  double choices[1] = {};
  for (std::size_t e = threadIdx.x; e < experts; e += kRouterThreads)
    choices[0] += totals.choices[e];
  device::block_sum(choices, counts);
  // Number of rows of all routers; all rows may be padding.
  const double rows = choices[0] > 0.0 ? choices[0] / static_cast<double>(per_token) : 1.0;
  double balance[1] = {};
  for (std::size_t e = threadIdx.x; e < experts; e += kRouterThreads) {
    balance[0] += totals.choices[e] / rows * (totals.probabilities[e] / rows);
  }
  device::block_sum(balance, shared);
  if (threadIdx.x != 0) return;
  losses[0] = balance[0] * static_cast<double>(experts);
  losses[1] = *totals.squares / rows;
}

}  // namespace

cudaError_t add_router_totals(cudaStream_t stream, const RouterShape& shape, const Routing& routing,
                              bool first, const RouterTotals& totals, float* partials) {
  auto* const sums = reinterpret_cast<double*>(partials);
  const RowGroups groups(shape.rows);
  const unsigned columns = blocks_for(shape.experts, kWarp);
  if (groups.count > 0) {
    const cudaError_t code = device::launch(
        {.stream = stream,
         .blocks = {columns, static_cast<unsigned>(groups.count)},
         .threads = kRouterThreads},
        &sum_probabilities, routing.probabilities, shape.sigmoid ? routing.log_sums : nullptr,
        shape.rows, shape.experts, groups.rows, sums);
    if (code != cudaSuccess) return code;
  }
  const cudaError_t code = device::launch(
      {.stream = stream, .blocks = columns, .threads = kRouterThreads}, &add_groups, sums,
      groups.count, shape.experts, routing, static_cast<unsigned>(shape.choices()), first, totals);
  if (code != cudaSuccess) return code;
  return device::launch({.stream = stream, .threads = kRouterThreads}, &add_squares,
                        routing.log_sums, shape.sigmoid ? 0 : shape.rows, first, totals.squares);
}

cudaError_t router_losses(cudaStream_t stream, const RouterShape& shape, const RouterTotals& totals,
                          double* losses) {
  return device::launch({.stream = stream, .threads = kRouterThreads}, &find_router_losses, totals,
                        shape.experts, shape.per_token, losses);
}

}  // namespace ballast::model::cuda
