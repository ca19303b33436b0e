#include <cfloat>
#include <cmath>

#include "src/device/cuda/eight_values.h"
#include "src/model/compute/formulas.h"
#include "src/model/cuda/tokens/tokens.h"

namespace ballast::model::cuda {
namespace {

constexpr unsigned kEntropyThreads = 512;
constexpr unsigned kWarps = kEntropyThreads / device::kWarp;
/// Parts of a row that a thread keeps in registers at once.
constexpr unsigned kPieces = 2;
constexpr unsigned kEntropyEach = device::kOneAccess<float>;
/// Logits that the block keeps in registers at once.
constexpr unsigned kChunk = kEntropyThreads * kPieces * kEntropyEach;

/// Returns the first element of the thread's part `i` of a chunk.
__device__ unsigned place_of(unsigned chunk, unsigned i) {
  return chunk + (i * kEntropyThreads + threadIdx.x) * kEntropyEach;
}

/// Loads the thread's part of a chunk, padded with -infinity, whose exponential is 0.
__device__ void load_chunk(const float* row, unsigned chunk, unsigned vocabulary,
                           float (&x)[kPieces][kEntropyEach]) {
  for (unsigned i = 0; i < kPieces; ++i) {
    const unsigned at = place_of(chunk, i);
    if (at < vocabulary) device::read(row + at, x[i]);
    for (unsigned j = 0; j < kEntropyEach; ++j) {
      if (at + j >= vocabulary) x[i][j] = -HUGE_VALF;
    }
  }
}

/// exp(x - largest)
__device__ float exponential(float x, float largest) {
  return formulas::probability(x, 1.0F, largest);
}

/// Sum of exp(x - largest) over a part of a row. `largest` starts at the smallest finite number,
/// because -infinity - -infinity would be NaN.
struct PartialSum {
  float largest = -FLT_MAX;
  float sum = 0.0F;

  __device__ void add(const float (&x)[kEntropyEach]) {
    float most = largest;
    for (unsigned j = 0; j < kEntropyEach; ++j) most = x[j] > most ? x[j] : most;
    if (most > largest) sum *= exponential(largest, most);
    largest = most;
    for (unsigned j = 0; j < kEntropyEach; ++j) sum += exponential(x[j], largest);
  }
};

/// Returns the largest value of all threads. `shared`: kWarps values that no other function uses.
__device__ float block_max(float value, float* shared) {
  for (unsigned step = device::kWarp / 2; step > 0; step /= 2) {
    const float other = __shfl_xor_sync(device::kAllLanes, value, static_cast<int>(step));
    value = other > value ? other : value;
  }
  if (threadIdx.x % device::kWarp == 0) shared[threadIdx.x / device::kWarp] = value;
  __syncthreads();
  for (unsigned warp = 0; warp < kWarps; ++warp) {
    value = shared[warp] > value ? shared[warp] : value;
  }
  return value;
}

/// Returns the sum over all threads, in each thread: lanes in pairs, then the warps in order.
__device__ double block_sum(double value, double* shared) {
  for (unsigned step = device::kWarp / 2; step > 0; step /= 2) {
    value += __shfl_xor_sync(device::kAllLanes, value, static_cast<int>(step));
  }
  if (threadIdx.x % device::kWarp == 0) shared[threadIdx.x / device::kWarp] = value;
  __syncthreads();
  double sum = 0.0;
  for (unsigned warp = 0; warp < kWarps; ++warp) sum += shared[warp];
  return sum;
}

/// The gradient of a row: (exp(logit - largest) - (total at the target)) * factor.
struct RowGradient {
  float largest;
  double total;
  float factor;
  unsigned target;
  float cap;  ///< LogitTile::cap
};

/// Overwrites the row with its gradient. Gradients are narrower than logits, so a chunk's gradients
/// never extend beyond the chunk.
template <class T>
__device__ void replace_by_gradient(float* row, unsigned vocabulary, const RowGradient& gradient) {
  T* const out = reinterpret_cast<T*>(row);
  struct alignas(kEntropyEach * sizeof(T)) Narrow {
    T values[kEntropyEach];
  };
  for (unsigned chunk = 0; chunk < vocabulary; chunk += kChunk) {
    float x[kPieces][kEntropyEach];
    load_chunk(row, chunk, vocabulary, x);
    // All threads must have read their logits before they are overwritten.
    if constexpr (sizeof(T) < sizeof(float)) __syncthreads();
    for (unsigned i = 0; i < kPieces; ++i) {
      const unsigned at = place_of(chunk, i);
      if (at >= vocabulary) continue;
      Narrow narrowed;
      for (unsigned j = 0; j < kEntropyEach; ++j) {
        float e = exponential(x[i][j], gradient.largest);
        // The one-hot is subtracted before rounding, so that p - 1 keeps its precision near p = 1.
        if (at + j == gradient.target) {
          e = static_cast<float>(static_cast<double>(e) - gradient.total);
        }
        if (gradient.cap > 0.0F) e *= formulas::soft_cap_derivative(x[i][j], gradient.cap);
        device::narrow(e * gradient.factor, narrowed.values[j]);
      }
      *reinterpret_cast<Narrow*>(out + at) = narrowed;
    }
  }
}

template <class T>
__device__ void clear_row(T* row, unsigned vocabulary) {
  for (unsigned i = threadIdx.x; i < vocabulary; i += kEntropyThreads) device::narrow(0.0F, row[i]);
}

/// Column of the target in the tile. It is at least the tile's width if the target is in another
/// tile.
__device__ unsigned column_of(const LogitTile& tile, std::int32_t target) {
  return static_cast<unsigned>(target) - static_cast<unsigned>(tile.first);
}

/// There is one block per row.
__global__ void __launch_bounds__(kEntropyThreads) cap_row(LogitTile tile) {
  float* const row = tile.logits + blockIdx.x * tile.stride;
  for (std::size_t i = threadIdx.x; i < tile.width; i += kEntropyThreads) {
    const float logit = device::rounded_product(row[i], tile.factor);
    row[i] = tile.cap > 0.0F ? formulas::soft_cap(logit, tile.cap) : logit;
  }
}

/// There is one block per row.
__global__ void __launch_bounds__(kEntropyThreads)
    add_to_sums(LogitTile tile, const std::int32_t* targets, bool first, RowSum<float>* sums) {
  __shared__ float largest_of[kWarps];
  __shared__ double sum_of[kWarps];
  const float* const row = tile.logits + blockIdx.x * tile.stride;
  const std::int32_t target = targets[blockIdx.x];
  if (target < 0) {
    if (first && threadIdx.x == 0) sums[blockIdx.x] = {};
    return;
  }
  const auto width = static_cast<unsigned>(tile.width);
  PartialSum partial;
  for (unsigned chunk = 0; chunk < width; chunk += kChunk) {
    float x[kPieces][kEntropyEach];
    load_chunk(row, chunk, width, x);
    for (unsigned i = 0; i < kPieces; ++i) partial.add(x[i]);
  }
  const float largest = block_max(partial.largest, largest_of);
  const float part = partial.sum * exponential(partial.largest, largest);
  const double total = block_sum(static_cast<double>(part), sum_of);
  if (threadIdx.x != 0) return;
  const unsigned column = column_of(tile, target);
  const RowSum<float> own = {largest, column < width ? row[column] : NAN, total};
  sums[blockIdx.x] = first ? own : merged(sums[blockIdx.x], own);
}

__global__ void merge_sums(RowSumsOfTiles tiles, RowSum<float>* sums) {
  const std::size_t row = std::size_t{blockIdx.x} * kEntropyThreads + threadIdx.x;
  if (row < tiles.rows) sums[row] = tiles.merged_row(row);
}

/// There is one block per row.
template <class T>
__global__ void __launch_bounds__(kEntropyThreads)
    replace_by_gradients(LogitTile tile, const std::int32_t* targets, float scale,
                         const float* weights, const RowSum<float>* sums) {
  float* const row = tile.logits + blockIdx.x * tile.stride;
  const std::int32_t target = targets[blockIdx.x];
  const auto width = static_cast<unsigned>(tile.width);
  if (target < 0) return clear_row(reinterpret_cast<T*>(row), width);
  const RowSum<float> sum = sums[blockIdx.x];
  if (weights != nullptr) scale *= weights[blockIdx.x];
  replace_by_gradient<T>(row, width,
                         {.largest = sum.largest,
                          .total = sum.total,
                          .factor = static_cast<float>(static_cast<double>(scale) / sum.total),
                          .target = column_of(tile, target),
                          .cap = tile.cap});
}

__global__ void find_losses(const RowSum<float>* sums, const std::int32_t* targets,
                            std::size_t rows, double* losses) {
  const std::size_t i = std::size_t{blockIdx.x} * kEntropyThreads + threadIdx.x;
  if (i >= rows) return;
  const RowSum<float> sum = sums[i];
  losses[i] = targets[i] < 0 ? 0.0
                             : ::log(sum.total) + static_cast<double>(sum.largest) -
                                   static_cast<double>(sum.wanted);
}

/// Sums `count` losses with a block: each thread sums a part, then the parts are added.
__device__ double sum_of_losses(const double* losses, std::size_t count, double* shared) {
  double partial = 0.0;
#pragma unroll 8
  for (std::size_t i = threadIdx.x; i < count; i += kEntropyThreads) partial += losses[i];
  return block_sum(partial, shared);
}

/// There is one block per part.
__global__ void __launch_bounds__(kEntropyThreads)
    add_losses(const double* losses, std::size_t count, double* sums) {
  __shared__ double sum_of[kWarps];
  const double total = sum_of_losses(losses + blockIdx.x * count, count, sum_of);
  if (threadIdx.x == 0) sums[blockIdx.x] = total;
}

/// There is one block per pair.
__global__ void __launch_bounds__(kEntropyThreads)
    find_pairs(PairRows rows, Preference how, PairResult* results) {
  __shared__ double chosen_of[kWarps];
  __shared__ double rejected_of[kWarps];
  __shared__ double counted_of[kWarps];
  const std::size_t first = 2 * blockIdx.x * rows.length;
  const std::size_t second = first + rows.length;
  const double chosen = sum_of_losses(rows.losses + first, rows.length, chosen_of);
  const double rejected = sum_of_losses(rows.losses + second, rows.length, rejected_of);
  double counted = 0.0;
  for (std::size_t i = threadIdx.x; i < 2 * rows.length; i += kEntropyThreads) {
    counted += rows.targets[first + i] >= 0 ? 1.0 : 0.0;
  }
  WeighedPair found;
  if (block_sum(counted, counted_of) > 0.0) {
    const double* const own = rows.reference + std::size_t{2} * blockIdx.x;
    found = weigh_pair(how, {chosen, own[0]}, {rejected, own[1]});
  }
  for (std::size_t i = threadIdx.x; i < rows.length; i += kEntropyThreads) {
    rows.weights[first + i] = found.weight;
    rows.weights[second + i] = -found.weight;
  }
  if (threadIdx.x == 0) results[blockIdx.x] = found.result;
}

}  // namespace

cudaError_t cap_logits(cudaStream_t stream, const LogitTile& tile) {
  if (tile.rows == 0) return cudaSuccess;
  return device::launch(
      {.stream = stream, .blocks = static_cast<unsigned>(tile.rows), .threads = kEntropyThreads},
      &cap_row, tile);
}

cudaError_t sum_logits(cudaStream_t stream, const LogitTile& tile, const std::int32_t* targets,
                       bool first, RowSum<float>* sums) {
  if (tile.rows == 0) return cudaSuccess;
  return device::launch(
      {.stream = stream, .blocks = static_cast<unsigned>(tile.rows), .threads = kEntropyThreads},
      &add_to_sums, tile, targets, first, sums);
}

cudaError_t merge_row_sums(cudaStream_t stream, const RowSumsOfTiles& tiles, RowSum<float>* sums) {
  if (tiles.rows == 0) return cudaSuccess;
  const auto blocks = static_cast<unsigned>((tiles.rows + kEntropyThreads - 1) / kEntropyThreads);
  return device::launch({.stream = stream, .blocks = blocks, .threads = kEntropyThreads},
                        &merge_sums, tiles, sums);
}

template <class T>
cudaError_t logit_gradients(cudaStream_t stream, const LogitTile& tile, const std::int32_t* targets,
                            float scale, const float* weights, const RowSum<float>* sums) {
  if (tile.rows == 0) return cudaSuccess;
  return device::launch(
      {.stream = stream, .blocks = static_cast<unsigned>(tile.rows), .threads = kEntropyThreads},
      &replace_by_gradients<T>, tile, targets, scale, weights, sums);
}

cudaError_t row_losses(cudaStream_t stream, const RowSum<float>* sums, const std::int32_t* targets,
                       std::size_t rows, double* losses) {
  if (rows == 0) return cudaSuccess;
  const auto blocks = static_cast<unsigned>((rows + kEntropyThreads - 1) / kEntropyThreads);
  return device::launch({.stream = stream, .blocks = blocks, .threads = kEntropyThreads},
                        &find_losses, sums, targets, rows, losses);
}

cudaError_t sum_losses(cudaStream_t stream, const double* losses, std::size_t count,
                       std::size_t parts, double* sums) {
  return device::launch(
      {.stream = stream, .blocks = static_cast<unsigned>(parts), .threads = kEntropyThreads},
      &add_losses, losses, count, sums);
}

cudaError_t dpo_loss(cudaStream_t stream, const PairRows& rows, const Preference& how,
                     PairResult* results) {
  return device::launch(
      {.stream = stream, .blocks = static_cast<unsigned>(rows.pairs), .threads = kEntropyThreads},
      &find_pairs, rows, how, results);
}

template cudaError_t logit_gradients<float>(cudaStream_t, const LogitTile&, const std::int32_t*,
                                            float, const float*, const RowSum<float>*);
template cudaError_t logit_gradients<Bf16>(cudaStream_t, const LogitTile&, const std::int32_t*,
                                           float, const float*, const RowSum<float>*);
template cudaError_t logit_gradients<F16>(cudaStream_t, const LogitTile&, const std::int32_t*,
                                          float, const float*, const RowSum<float>*);

}  // namespace ballast::model::cuda
