#include <cmath>

#include "ballast/core/dtype.h"

#include "src/device/cuda/eight_values.h"
#include "src/device/cuda/kernel_language.h"
#include "src/model/cuda/attention/attention_places.h"
#include "src/model/cuda/rows/row_threads.h"

namespace ballast::model::cuda {

namespace {

constexpr unsigned kRowThreads = 128;

/// 8 elements, which one thread reads at once.
template <class T>
struct alignas(16) Part {
  T values[8];
};

/// `lanes` threads, a power of two, share a row. Blocks are x: tokens, y: heads, z: sequences.
template <class T>
__global__ void __launch_bounds__(kRowThreads)
    gather_rows(AttentionShape shape, unsigned lanes, const T* out, const float* log_sums,
                const T* dout, QueryRow* rows) {
  const HeadPlace place = place_of(shape, blockIdx.z, blockIdx.y);
  const std::size_t position =
      std::size_t{blockIdx.x} * (kRowThreads / lanes) + threadIdx.x / lanes;
  const std::size_t end = position < shape.length ? shape.value_columns() : 0;
  float sum = 0.0F;
  for (std::size_t column = threadIdx.x % lanes * 8; column < end; column += lanes * 8) {
    const std::size_t at = place.out + position * shape.width() + column;
    const auto a = *reinterpret_cast<const Part<T>*>(out + at);
    const auto b = *reinterpret_cast<const Part<T>*>(dout + at);
    for (int i = 0; i < 8; ++i) {
      sum = __fmaf_rn(device::widen(a.values[i]), device::widen(b.values[i]), sum);
    }
  }
  for (unsigned step = lanes / 2; step > 0; step /= 2) {
    sum += __shfl_xor_sync(device::kAllLanes, sum, static_cast<int>(step));
  }
  if (threadIdx.x % lanes != 0) return;
  const std::size_t row = (blockIdx.z * shape.heads + blockIdx.y) * padded_length(shape) + position;
  rows[row].log_sum = position < shape.length ? log_sums[place.row + position] * kLog2E : 0.0F;
  rows[row].delta = sum;
}

}  // namespace

std::size_t attention_scratch_bytes(const AttentionShape& shape, std::size_t /*element_bytes*/) {
  return shape.sequences * shape.heads * padded_length(shape) * sizeof(QueryRow);
}

template <class T>
cudaError_t gather_query_rows(cudaStream_t stream, const AttentionShape& shape, const T* out,
                              const float* log_sums, const T* dout, QueryRow* rows) {
  return device::launch(by_query_rows(stream, shape, kRowThreads), &gather_rows<T>, shape,
                        lanes_of_row(shape), out, log_sums, dout, rows);
}

template cudaError_t gather_query_rows(cudaStream_t, const AttentionShape&, const float*,
                                       const float*, const float*, QueryRow*);
template cudaError_t gather_query_rows(cudaStream_t, const AttentionShape&, const Bf16*,
                                       const float*, const Bf16*, QueryRow*);
template cudaError_t gather_query_rows(cudaStream_t, const AttentionShape&, const F16*,
                                       const float*, const F16*, QueryRow*);

namespace {

// A sink adds to the sum of a softmax but has no value, so it scales the result of attention by a
// factor below 1. So sinks need no other attention kernels and also work with cuDNN's.

constexpr unsigned kSinkThreads = 128;

/// `lanes` threads, a power of two, share a row. Blocks are x: tokens, y:
/// heads, z: sequences.
template <class T>
__global__ void __launch_bounds__(kSinkThreads)
    add_sink(AttentionShape shape, unsigned lanes, const T* sinks, T* out, float* log_sums) {
  const HeadPlace place = place_of(shape, blockIdx.z, blockIdx.y);
  const std::size_t position =
      std::size_t{blockIdx.x} * (kSinkThreads / lanes) + threadIdx.x / lanes;
  const unsigned lane = threadIdx.x % lanes;
  const bool here = position < shape.length;
  const float sink = device::widen(sinks[blockIdx.y]);
  const float log_sum = here ? log_sums[place.row + position] : 0.0F;
  const float above = log_sum - sink;
  const float share = 1.0F / (1.0F + expf(-above));
  const std::size_t end = here ? shape.head_dim : 0;
  for (std::size_t i = std::size_t{lane} * device::kEight; i < end; i += lanes * device::kEight) {
    T* const row = out + place.out + position * shape.width() + i;
    float values[device::kEight];
    device::read(row, values);
    for (float& value : values) value *= share;
    device::write(values, row);
  }
  __syncwarp();  // all lanes have read the sum
  if (!here || lane != 0) return;
  log_sums[place.row + position] = fmaxf(log_sum, sink) + log1pf(expf(-fabsf(above)));
}

/// There is one block per head.
template <class T>
__global__ void __launch_bounds__(kSinkThreads)
    differentiate_sinks(AttentionShape shape, const T* sinks, const QueryRow* rows,
                        float* gradient) {
  __shared__ double shared[device::kWarp];
  const float sink = device::widen(sinks[blockIdx.x]) * kLog2E;
  double sum[1] = {};
  for (std::size_t sequence = 0; sequence < shape.sequences; ++sequence) {
    const QueryRow* const own = rows + (sequence * shape.heads + blockIdx.x) * padded_length(shape);
    for (std::size_t i = threadIdx.x; i < shape.length; i += kSinkThreads) {
      sum[0] -= static_cast<double>(exp2f(sink - own[i].log_sum) * own[i].delta);
    }
  }
  device::block_sum(sum, shared);
  if (threadIdx.x == 0) gradient[blockIdx.x] += static_cast<float>(sum[0]);
}

}  // namespace

template <class T>
cudaError_t add_sinks(cudaStream_t stream, const AttentionShape& shape, const T* sinks, T* out,
                      float* log_sums) {
  if (shape.log_sums() == 0) return cudaSuccess;
  if (!has_kernels(shape)) return cudaErrorInvalidValue;
  return device::launch(by_query_rows(stream, shape, kSinkThreads), &add_sink<T>, shape,
                        lanes_of_row(shape), sinks, out, log_sums);
}

template <class T>
cudaError_t add_sink_gradients(cudaStream_t stream, const AttentionShape& shape, const T* sinks,
                               const void* scratch, float* gradient) {
  if (shape.log_sums() == 0) return cudaSuccess;
  return device::launch(
      {.stream = stream, .blocks = static_cast<unsigned>(shape.heads), .threads = kSinkThreads},
      &differentiate_sinks<T>, shape, sinks, static_cast<const QueryRow*>(scratch), gradient);
}

template cudaError_t add_sinks(cudaStream_t, const AttentionShape&, const float*, float*, float*);
template cudaError_t add_sinks(cudaStream_t, const AttentionShape&, const Bf16*, Bf16*, float*);
template cudaError_t add_sinks(cudaStream_t, const AttentionShape&, const F16*, F16*, float*);
template cudaError_t add_sink_gradients(cudaStream_t, const AttentionShape&, const float*,
                                        const void*, float*);
template cudaError_t add_sink_gradients(cudaStream_t, const AttentionShape&, const Bf16*,
                                        const void*, float*);
template cudaError_t add_sink_gradients(cudaStream_t, const AttentionShape&, const F16*,
                                        const void*, float*);

}  // namespace ballast::model::cuda
