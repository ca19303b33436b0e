#include <algorithm>

#include "src/comm/nccl_sum.h"
#include "src/device/cuda/kernel_language.h"

namespace ballast::comm {
namespace {

constexpr unsigned kThreads = 256;
/// Enough blocks for any GPU; each goes on to the next part of the buffer.
constexpr Bytes kMostBlocks = 1024;

/// What one thread reads and writes at once.
template <class T>
struct alignas(16) Pack {
  static constexpr int kCount = 16 / sizeof(T);
  T values[kCount];
};

__device__ float widen(float value) {
  return value;
}
__device__ float widen(Bf16 value) {
  return to_float(value);
}
__device__ void narrow(float from, float& to) {
  to = from;
}
__device__ void narrow(float from, Bf16& to) {
  to = to_bf16(from);
}

template <class T>
__device__ const Pack<T>* packs_of(const SumTerms& terms, std::uint32_t turn) {
  const std::byte* start =
      turn == terms.turn ? terms.own : terms.others + turn * terms.distance;
  return reinterpret_cast<const Pack<T>*>(start);
}

/// One thread reads all terms of its elements before it writes them, so `out` may be a term.
template <class T>
__global__ void sum_terms(SumTerms terms, Pack<T>* out, Bytes packs) {
  const Bytes step = Bytes{gridDim.x} * blockDim.x;
  for (Bytes at = Bytes{blockIdx.x} * blockDim.x + threadIdx.x; at < packs; at += step) {
    Pack<T> term = packs_of<T>(terms, 0)[at];
    float sums[Pack<T>::kCount];
    for (int i = 0; i < Pack<T>::kCount; ++i) sums[i] = widen(term.values[i]);
    for (std::uint32_t turn = 1; turn < terms.count; ++turn) {
      term = packs_of<T>(terms, turn)[at];
      for (int i = 0; i < Pack<T>::kCount; ++i) sums[i] += widen(term.values[i]);
    }
    for (int i = 0; i < Pack<T>::kCount; ++i) narrow(sums[i], term.values[i]);
    out[at] = term;
  }
}

template <class T>
cudaError_t enqueue(cudaStream_t stream, const SumTerms& terms, std::byte* out, Bytes bytes) {
  const Bytes packs = bytes / sizeof(Pack<T>);
  const Bytes blocks = std::min((packs + kThreads - 1) / kThreads, kMostBlocks);
  return device::launch(
      {.stream = stream, .blocks = static_cast<unsigned>(blocks), .threads = kThreads},
      &sum_terms<T>, terms, reinterpret_cast<Pack<T>*>(out), packs);
}

}  // namespace

int load_sum() {
  const cudaError_t code = device::load(&sum_terms<float>);
  return code != cudaSuccess ? code : device::load(&sum_terms<Bf16>);
}

int enqueue_sum(CUstream_st* stream, const SumTerms& terms, std::byte* out, Bytes bytes,
                DType type) {
  if (bytes == 0) return cudaSuccess;
  return type == DType::f32 ? enqueue<float>(stream, terms, out, bytes)
                            : enqueue<Bf16>(stream, terms, out, bytes);
}

}  // namespace ballast::comm
