#include <algorithm>

#include "src/comm/sum.h"
#include "src/device/cuda/eight.h"
#include "src/device/cuda/kernel_language.h"

namespace ballast::comm {
namespace {

using device::kEight;

constexpr unsigned kThreads = 256;
/// Enough blocks for any GPU; each loops over the buffer.
constexpr Bytes kMostBlocks = 512;

template <class T>
__device__ const T* elements_of(const SumTerms& terms, std::uint32_t turn) {
  const std::byte* start = turn == terms.turn ? terms.own : terms.others + turn * terms.distance;
  return reinterpret_cast<const T*>(start);
}

/// Each thread reads all terms of its elements before it writes, so `out` may be a term.
template <class T>
__global__ void sum_terms(SumTerms terms, T* out, Bytes size) {
  const Bytes step = Bytes{gridDim.x} * kThreads * kEight;
  for (Bytes at = (Bytes{blockIdx.x} * kThreads + threadIdx.x) * kEight; at < size; at += step) {
    float sums[kEight];
    device::read(elements_of<T>(terms, 0) + at, sums);
    for (std::uint32_t turn = 1; turn < terms.count; ++turn) {
      float term[kEight];
      device::read(elements_of<T>(terms, turn) + at, term);
      for (unsigned i = 0; i < kEight; ++i) sums[i] += term[i];
    }
    device::write(sums, out + at);
  }
}

template <class T>
cudaError_t enqueue(cudaStream_t stream, const SumTerms& terms, std::byte* out, Bytes bytes) {
  constexpr Bytes kTogether = Bytes{kThreads} * kEight;
  const Bytes size = bytes / sizeof(T);
  const Bytes blocks = std::min((size + kTogether - 1) / kTogether, kMostBlocks);
  return device::launch(
      {.stream = stream, .blocks = static_cast<unsigned>(blocks), .threads = kThreads},
      &sum_terms<T>, terms, reinterpret_cast<T*>(out), size);
}

}  // namespace

int load_sum() {
  for (const cudaError_t code : {device::load(&sum_terms<float>), device::load(&sum_terms<Bf16>),
                                 device::load(&sum_terms<F16>)}) {
    if (code != cudaSuccess) return code;
  }
  return cudaSuccess;
}

int enqueue_sum(CUstream_st* stream, const SumTerms& terms, std::byte* out, Bytes bytes,
                DType type) {
  if (bytes == 0) return cudaSuccess;
  return with_training_type(
      type, [&](auto value) { return enqueue<decltype(value)>(stream, terms, out, bytes); });
}

}  // namespace ballast::comm
