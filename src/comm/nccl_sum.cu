#include <algorithm>

#include "src/comm/sum.h"
#include "src/device/cuda/eight_values.h"
#include "src/device/cuda/kernel_language.h"

namespace ballast::comm {
namespace {

using device::kEight;

constexpr unsigned kThreads = 256;
/// Enough blocks for any GPU; each loops over the buffer.
constexpr Bytes kMaxBlocks = 512;

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

/// Adds one element per thread, so parts may begin and end anywhere.
template <class A, class T>
__global__ void add_ordered_terms(OrderedTerms terms, T* out, std::uint64_t elements) {
  const std::uint64_t step = std::uint64_t{gridDim.x} * kThreads;
  const std::uint32_t count = terms.members * terms.per_member;
  const auto* const own = reinterpret_cast<const A*>(terms.own);
  const auto* const received = reinterpret_cast<const A*>(terms.received);
  const auto* const first = reinterpret_cast<const T*>(terms.first);
  for (std::uint64_t at = std::uint64_t{blockIdx.x} * kThreads + threadIdx.x; at < elements;
       at += step) {
    float sum = first == nullptr ? 0.0F : device::widen(first[at]);
    for (std::uint32_t i = 0; i < count; ++i) {
      const std::uint32_t number = terms.descending ? count - 1 - i : i;
      const bool is_own = number / terms.per_member == terms.member;
      const A term = is_own ? own[number % terms.per_member * terms.own_distance + at]
                            : received[number * terms.received_distance + at];
      // Not 0 + term, which would lose the sign of -0.
      sum = first == nullptr && i == 0 ? device::widen(term) : sum + device::widen(term);
    }
    device::narrow(sum, out[at]);
  }
}

template <class A, class T>
cudaError_t enqueue_ordered(cudaStream_t stream, const OrderedTerms& terms, std::byte* out,
                            std::uint64_t elements) {
  const std::uint64_t blocks =
      std::min<std::uint64_t>((elements + kThreads - 1) / kThreads, kMaxBlocks);
  return device::launch(
      {.stream = stream, .blocks = static_cast<unsigned>(blocks), .threads = kThreads},
      &add_ordered_terms<A, T>, terms, reinterpret_cast<T*>(out), elements);
}

template <class T>
cudaError_t enqueue(cudaStream_t stream, const SumTerms& terms, std::byte* out, Bytes bytes) {
  constexpr Bytes kTogether = Bytes{kThreads} * kEight;
  const Bytes size = bytes / sizeof(T);
  const Bytes blocks = std::min((size + kTogether - 1) / kTogether, kMaxBlocks);
  return device::launch(
      {.stream = stream, .blocks = static_cast<unsigned>(blocks), .threads = kThreads},
      &sum_terms<T>, terms, reinterpret_cast<T*>(out), size);
}

}  // namespace

int load_sum() {
  for (const cudaError_t code :
       {device::load(&sum_terms<float>), device::load(&sum_terms<Bf16>),
        device::load(&sum_terms<F16>), device::load(&add_ordered_terms<float, float>),
        device::load(&add_ordered_terms<float, Bf16>), device::load(&add_ordered_terms<Bf16, Bf16>),
        device::load(&add_ordered_terms<float, F16>), device::load(&add_ordered_terms<F16, F16>)}) {
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

int enqueue_ordered_sum(CUstream_st* stream, const OrderedTerms& terms, std::byte* out,
                        std::uint64_t elements, DType term_type, DType type) {
  if (elements == 0) return cudaSuccess;
  return with_training_type(type, [&](auto value) {
    using T = decltype(value);
    if (term_type == DType::f32) return enqueue_ordered<float, T>(stream, terms, out, elements);
    return enqueue_ordered<T, T>(stream, terms, out, elements);
  });
}

}  // namespace ballast::comm
