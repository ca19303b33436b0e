#include "src/device/cuda/eight.h"
#include "src/device/cuda/kernel_language.h"
#include "src/model/cuda/rows/rows.h"

namespace ballast::model::cuda {
namespace {

using device::kEight;
using device::narrow;
using device::read;
using device::widen;
using device::write;

constexpr unsigned kThreads = 256;

/// One element per thread: the matrices [rows, rank] of adapters are small.
template <class T>
__global__ void scaled(T* x, float factor, std::size_t size) {
  const std::size_t at = std::size_t{blockIdx.x} * kThreads + threadIdx.x;
  if (at < size) narrow(widen(x[at]) * factor, x[at]);
}

template <class T>
__global__ void dropped(DropoutMask mask, const T* x, T* y, std::size_t size, bool add_to_y) {
  const std::size_t at = (std::size_t{blockIdx.x} * kThreads + threadIdx.x) * kEight;
  if (at >= size) return;
  float values[kEight];
  float sums[kEight] = {};
  read(x + at, values);
  if (add_to_y) read(y + at, sums);
  for (unsigned half = 0; half < 2; ++half) {
    const auto factors = mask.factors(at / 4 + half);
    for (unsigned i = 0; i < 4; ++i) {
      sums[4 * half + i] = device::rounded_sum(
          sums[4 * half + i], device::rounded_product(values[4 * half + i], factors[i]));
    }
  }
  write(sums, y + at);
}

unsigned blocks_of(std::size_t threads) {
  return static_cast<unsigned>((threads + kThreads - 1) / kThreads);
}

}  // namespace

template <class T>
cudaError_t scale(cudaStream_t stream, T* x, float factor, std::size_t size) {
  if (size == 0) return cudaSuccess;
  return device::launch({.stream = stream, .blocks = blocks_of(size), .threads = kThreads},
                        &scaled<T>, x, factor, size);
}

template <class T>
cudaError_t drop(cudaStream_t stream, const DropoutMask& mask, const T* x, T* y, std::size_t size,
                 bool add_to_y) {
  if (size == 0) return cudaSuccess;
  return device::launch({.stream = stream, .blocks = blocks_of(size / kEight), .threads = kThreads},
                        &dropped<T>, mask, x, y, size, add_to_y);
}

template cudaError_t scale(cudaStream_t, float*, float, std::size_t);
template cudaError_t scale(cudaStream_t, Bf16*, float, std::size_t);
template cudaError_t scale(cudaStream_t, F16*, float, std::size_t);
template cudaError_t drop(cudaStream_t, const DropoutMask&, const float*, float*, std::size_t,
                          bool);
template cudaError_t drop(cudaStream_t, const DropoutMask&, const Bf16*, Bf16*, std::size_t, bool);
template cudaError_t drop(cudaStream_t, const DropoutMask&, const F16*, F16*, std::size_t, bool);

}  // namespace ballast::model::cuda
