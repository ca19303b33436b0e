#include <cfloat>
#include <cmath>

#include "src/device/cuda/eight.h"
#include "src/model/cuda/tokens/tokens.h"
#include "src/model/formulas.h"

namespace ballast::model::cuda {
namespace {

constexpr unsigned kThreads = 512;
constexpr unsigned kWarps = kThreads / device::kWarp;
/// Parts of a row that a thread holds in registers at once.
constexpr unsigned kPieces = 2;
constexpr unsigned kEach = device::kOneAccess<float>;
/// Logits that the block holds in registers at once.
constexpr unsigned kChunk = kThreads * kPieces * kEach;

/// First element of the thread's part `i` of a chunk.
__device__ unsigned place_of(unsigned chunk, unsigned i) {
  return chunk + (i * kThreads + threadIdx.x) * kEach;
}

/// The thread's part of a chunk, padded with -infinity, whose exponential is 0.
__device__ void load_chunk(const float* row, unsigned chunk, unsigned vocabulary,
                           float (&x)[kPieces][kEach]) {
  for (unsigned i = 0; i < kPieces; ++i) {
    const unsigned at = place_of(chunk, i);
    if (at < vocabulary) device::read(row + at, x[i]);
    for (unsigned j = 0; j < kEach; ++j) {
      if (at + j >= vocabulary) x[i][j] = -HUGE_VALF;
    }
  }
}

/// exp(x - largest)
__device__ float exponential(float x, float largest) {
  return formulas::probability(x, 1.0F, largest);
}

/// Sum of exp(x - largest) over a part of a row. Starts at the smallest finite number: with
/// -infinity the difference of two infinities would be NaN.
struct PartialSum {
  float largest = -FLT_MAX;
  float sum = 0.0F;

  __device__ void add(const float (&x)[kEach]) {
    float most = largest;
    for (unsigned j = 0; j < kEach; ++j) most = x[j] > most ? x[j] : most;
    if (most > largest) sum *= exponential(largest, most);
    largest = most;
    for (unsigned j = 0; j < kEach; ++j) sum += exponential(x[j], largest);
  }
};

/// Largest value of all threads. `shared`: kWarps values that no other function uses.
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

/// Sum over all threads, the same in each thread: lanes in pairs, then the warps in order.
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
};

/// Overwrites the row with its gradient. Gradients are narrower than logits, so those of a chunk
/// never lie after the chunk.
template <class T>
__device__ void replace_by_gradient(float* row, unsigned vocabulary, const RowGradient& gradient) {
  T* const out = reinterpret_cast<T*>(row);
  struct alignas(kEach * sizeof(T)) Narrow {
    T values[kEach];
  };
  for (unsigned chunk = 0; chunk < vocabulary; chunk += kChunk) {
    float x[kPieces][kEach];
    load_chunk(row, chunk, vocabulary, x);
    // Other threads must have read their logits before they are overwritten.
    if constexpr (sizeof(T) < sizeof(float)) __syncthreads();
    for (unsigned i = 0; i < kPieces; ++i) {
      const unsigned at = place_of(chunk, i);
      if (at >= vocabulary) continue;
      Narrow narrowed;
      for (unsigned j = 0; j < kEach; ++j) {
        float e = exponential(x[i][j], gradient.largest);
        // Subtracts the one-hot before rounding, so that p - 1 keeps its precision near p = 1.
        if (at + j == gradient.target) {
          e = static_cast<float>(static_cast<double>(e) - gradient.total);
        }
        device::narrow(e * gradient.factor, narrowed.values[j]);
      }
      *reinterpret_cast<Narrow*>(out + at) = narrowed;
    }
  }
}

template <class T>
__device__ void clear_row(T* row, unsigned vocabulary) {
  for (unsigned i = threadIdx.x; i < vocabulary; i += kThreads) device::narrow(0.0F, row[i]);
}

/// One block per row.
template <class T>
__global__ void __launch_bounds__(kThreads)
    losses_and_gradients(float* logits, std::size_t stride, unsigned vocabulary,
                         const std::int32_t* targets, float scale, double* losses) {
  __shared__ float largest_of[kWarps];
  __shared__ double sum_of[kWarps];
  __shared__ float shared_factor;
  float* const row = logits + blockIdx.x * stride;
  const std::int32_t target = targets[blockIdx.x];
  if (target < 0) {
    if (threadIdx.x == 0) losses[blockIdx.x] = 0.0;
    if (scale != 0.0F) clear_row(reinterpret_cast<T*>(row), vocabulary);
    return;
  }
  PartialSum partial;
  for (unsigned chunk = 0; chunk < vocabulary; chunk += kChunk) {
    float x[kPieces][kEach];
    load_chunk(row, chunk, vocabulary, x);
    for (unsigned i = 0; i < kPieces; ++i) partial.add(x[i]);
  }
  const float largest = block_max(partial.largest, largest_of);
  const float sum = partial.sum * exponential(partial.largest, largest);
  const double total = block_sum(static_cast<double>(sum), sum_of);
  const auto column = static_cast<unsigned>(target);
  if (threadIdx.x == 0) {
    const float wanted = column < vocabulary ? row[column] : NAN;
    losses[blockIdx.x] = ::log(total) + static_cast<double>(largest) - static_cast<double>(wanted);
    shared_factor = static_cast<float>(static_cast<double>(scale) / total);
  }
  if (scale == 0.0F) return;
  __syncthreads();
  replace_by_gradient<T>(
      row, vocabulary,
      {.largest = largest, .total = total, .factor = shared_factor, .target = column});
}

/// One block: each thread sums a part, then the parts are added.
__global__ void __launch_bounds__(kThreads)
    add_losses(const double* losses, std::size_t count, double* sum) {
  __shared__ double sum_of[kWarps];
  double partial = 0.0;
#pragma unroll 8
  for (std::size_t i = threadIdx.x; i < count; i += kThreads) partial += losses[i];
  const double total = block_sum(partial, sum_of);
  if (threadIdx.x == 0) *sum = total;
}

}  // namespace

template <class T>
cudaError_t cross_entropy(cudaStream_t stream, float* logits, std::size_t rows, std::size_t stride,
                          std::size_t vocabulary, const std::int32_t* targets, float scale,
                          double* losses) {
  if (rows == 0) return cudaSuccess;
  return device::launch(
      {.stream = stream, .blocks = static_cast<unsigned>(rows), .threads = kThreads},
      &losses_and_gradients<T>, logits, stride, vocabulary, targets, scale, losses);
}

cudaError_t sum_losses(cudaStream_t stream, const double* losses, std::size_t count, double* sum) {
  return device::launch({.stream = stream, .blocks = 1, .threads = kThreads}, &add_losses, losses,
                        count, sum);
}

template cudaError_t cross_entropy<float>(cudaStream_t, float*, std::size_t, std::size_t,
                                          std::size_t, const std::int32_t*, float, double*);
template cudaError_t cross_entropy<Bf16>(cudaStream_t, float*, std::size_t, std::size_t,
                                         std::size_t, const std::int32_t*, float, double*);

}  // namespace ballast::model::cuda
