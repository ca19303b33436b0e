#include <algorithm>

#include "src/device/cuda/eight.h"
#include "src/device/cuda/kernel_language.h"
#include "src/model/cuda/rows/gradients.h"

namespace ballast::model::cuda {
namespace {

using device::Eight;
using device::kEight;
using device::kWarp;

/// Threads of a chunk's block.
constexpr unsigned kChunkThreads = 1024;
/// Threads of the block that adds the chunks.
constexpr unsigned kTotalThreads = 128;

/// Sums the statistics of all threads of the block; thread 0 writes them.
__device__ void leave(GradientStats mine, GradientStats* to) {
  __shared__ double squares[kWarp];
  __shared__ std::uint64_t non_finite[kWarp];
  double sum[1] = {mine.sum_of_squares};
  std::uint64_t count[1] = {mine.non_finite};
  device::block_sum(sum, squares);
  device::block_sum(count, non_finite);
  if (threadIdx.x == 0) *to = {sum[0], count[0]};
}

/// Adds up to kEight elements, starting at `from`, to `values`.
template <class T>
__device__ void add_some(const T* from, std::size_t count, float (&values)[kEight]) {
  if (count >= kEight) {
    float more[kEight];
    device::read(from, more);
    for (unsigned i = 0; i < kEight; ++i) values[i] += more[i];
  } else {
    for (std::size_t i = 0; i < count; ++i) values[i] += device::widen(from[i]);
  }
}

template <class T>
__device__ void write_some(const Eight<T>& eight, std::size_t count, T* to) {
  if (count >= kEight) return device::write(eight, to);
  float values[kEight];
  device::widen(eight, values);
  for (std::size_t i = 0; i < count; ++i) device::narrow(values[i], to[i]);
}

/// Statistics of eight values; values after the end are zeros.
__device__ void count(const float (&values)[kEight], double& squares, unsigned& non_finite) {
  for (const float value : values) {
    const auto wide = static_cast<double>(value);
    squares += wide * wide;
    non_finite += (__float_as_uint(value) & 0x7f800000U) == 0x7f800000U ? 1U : 0U;
  }
}

template <class T>
struct GradientPacking {
  UnpackedGradient from;
  T* packed;
};

/// Adds the sums of up to kEight elements, starting at `at` in a chunk that starts at `begin`, to
/// `values`.
__device__ void add_sums(const UnpackedGradient& from, std::size_t begin, std::size_t at,
                         std::size_t size, float (&values)[kEight]) {
  if (at >= from.table) return add_some(from.rest + (at - from.table), size - at, values);
  // A chunk is short enough for divisions in 32 bits.
  const auto width = static_cast<unsigned>(from.width);
  const std::size_t first = begin / width;
  const auto within = static_cast<unsigned>(at - first * width);
  const std::size_t row = first + within / width;
  if (row < from.rows && from.slot_of_row[row] != kNoSlot) {
    add_some(from.slots + std::size_t{from.slot_of_row[row]} * width + within % width, kEight,
             values);
  }
  if (at < from.tied_size) add_some(from.tied + at, from.tied_size - at, values);
}

/// There is one block per chunk of `size` values. Packs them first if there is something to pack. A
/// thread has the same values in both cases, so that the statistics are equal.
template <bool packs, class T>
__global__ void __launch_bounds__(kChunkThreads)
    go_through_chunks(GradientPacking<T> from, const T* packed, std::size_t size,
                      GradientStats* partial) {
  const std::size_t begin = std::size_t{blockIdx.x} * kStatsChunk;
  const std::size_t end = begin + kStatsChunk < size ? begin + kStatsChunk : size;
  double squares = 0.0;
  unsigned non_finite = 0;
  for (std::size_t at = begin + threadIdx.x * kEight; at < end; at += kChunkThreads * kEight) {
    float values[kEight] = {};
    if constexpr (packs) {
      add_sums(from.from, begin, at, size, values);
      Eight<T> eight;
      device::narrow(values, eight);
      write_some(eight, size - at, from.packed + at);
      device::widen(eight, values);
    } else {
      add_some(packed + at, size - at, values);
    }
    count(values, squares, non_finite);
  }
  if (partial != nullptr) leave({squares, non_finite}, partial + blockIdx.x);
}

__global__ void __launch_bounds__(kTotalThreads)
    add_chunks(const GradientStats* partial, std::size_t chunks, GradientStats* stats) {
  GradientStats mine;
  for (std::size_t i = threadIdx.x; i < chunks; i += kTotalThreads) {
    mine.sum_of_squares += partial[i].sum_of_squares;
    mine.non_finite += partial[i].non_finite;
  }
  leave(mine, stats);
}

/// Packs or measures; if `stats` is null, only packs.
template <bool packs, class T>
cudaError_t run(cudaStream_t stream, const GradientPacking<T>& from, const T* packed,
                std::size_t size, GradientStats* partial, GradientStats* stats) {
  const std::size_t chunks = (size + kStatsChunk - 1) / kStatsChunk;
  if (chunks > 0) {
    const cudaError_t code = device::launch(
        {.stream = stream, .blocks = static_cast<unsigned>(chunks), .threads = kChunkThreads},
        &go_through_chunks<packs, T>, from, packed, size, stats == nullptr ? nullptr : partial);
    if (code != cudaSuccess) return code;
  }
  if (stats == nullptr) return cudaSuccess;
  return device::launch({.stream = stream, .threads = kTotalThreads}, &add_chunks, partial, chunks,
                        stats);
}

}  // namespace

template <class T>
cudaError_t pack_gradient(cudaStream_t stream, const UnpackedGradient& from, T* packed,
                          std::size_t size, GradientStats* partial, GradientStats* stats) {
  return run<true, T>(stream, {from, packed}, nullptr, size, partial, stats);
}

template <class T>
cudaError_t measure_gradient(cudaStream_t stream, const T* packed, std::size_t size,
                             GradientStats* partial, GradientStats* stats) {
  return run<false, T>(stream, {}, packed, size, partial, stats);
}

template cudaError_t pack_gradient(cudaStream_t, const UnpackedGradient&, float*, std::size_t,
                                   GradientStats*, GradientStats*);
template cudaError_t pack_gradient(cudaStream_t, const UnpackedGradient&, Bf16*, std::size_t,
                                   GradientStats*, GradientStats*);
template cudaError_t pack_gradient(cudaStream_t, const UnpackedGradient&, F16*, std::size_t,
                                   GradientStats*, GradientStats*);
template cudaError_t measure_gradient(cudaStream_t, const float*, std::size_t, GradientStats*,
                                      GradientStats*);
template cudaError_t measure_gradient(cudaStream_t, const Bf16*, std::size_t, GradientStats*,
                                      GradientStats*);
template cudaError_t measure_gradient(cudaStream_t, const F16*, std::size_t, GradientStats*,
                                      GradientStats*);

}  // namespace ballast::model::cuda
