#include "ballast/core/dtype.h"

#include "src/device/cuda/eight.h"
#include "src/device/cuda/kernel_language.h"
#include "src/model/cuda/attention/attention_places.h"

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

}  // namespace ballast::model::cuda
