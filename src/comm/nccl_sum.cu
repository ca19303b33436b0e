#include <algorithm>

#include <cuda_runtime.h>

#include "src/comm/nccl_sum.h"

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
cudaError_t launch(cudaStream_t stream, const SumTerms& terms, std::byte* out, Bytes bytes) {
  const Bytes packs = bytes / sizeof(Pack<T>);
  const Bytes blocks = std::min((packs + kThreads - 1) / kThreads, kMostBlocks);
  sum_terms<T><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(
      terms, reinterpret_cast<Pack<T>*>(out), packs);
  return cudaGetLastError();
}

}  // namespace

int load_sum() {
  cudaFuncAttributes attributes = {};
  const cudaError_t code = cudaFuncGetAttributes(&attributes, sum_terms<float>);
  return code != cudaSuccess ? code : cudaFuncGetAttributes(&attributes, sum_terms<Bf16>);
}

int enqueue_sum(CUstream_st* stream, const SumTerms& terms, std::byte* out, Bytes bytes,
                DType type) {
  if (bytes == 0) return cudaSuccess;
  return type == DType::f32 ? launch<float>(stream, terms, out, bytes)
                            : launch<Bf16>(stream, terms, out, bytes);
}

}  // namespace ballast::comm
