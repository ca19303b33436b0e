#include <algorithm>
#include <cmath>

#include "ballast/core/dtype.h"
#include "ballast/model/packed_values.h"

#include "src/device/cuda/eight_values.h"
#include "src/device/cuda/kernel_language.h"
#include "src/model/cuda/rows/row_threads.h"
#include "src/model/cuda/rows/rows.h"

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
  if (row < from.rows && from.sum_row_of[row] != kNoSumRow) {
    add_some(from.sum_rows + std::size_t{from.sum_row_of[row]} * width + within % width, kEight,
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

namespace {

using device::kAllLanes;

static_assert(WeightCodes::kBlock == kWarp * kEight, "one warp encodes one block");

/// Returns the scale of a block. `largest`: bits of its largest magnitude. The bits of magnitudes
/// have the order of their values; inf and NaN are the largest.
__device__ float scale_of(unsigned largest) {
  if (largest >= 0x7f800000U) return __uint_as_float(0x7fc00000U);
  const float scale = __fdiv_rn(__uint_as_float(largest), 127.0F);
  return scale >= 0x1p-126F ? scale : 0.0F;
}

/// There is one warp per block, with eight elements per lane.
template <class T>
__global__ void encode(const T* weights, std::size_t blocks, uint2* codes, float* scales) {
  const std::size_t lane_of_all = std::size_t{blockIdx.x} * kElementThreads + threadIdx.x;
  const std::size_t block = lane_of_all / kWarp;
  if (block >= blocks) return;
  float values[kEight];
  device::read(weights + lane_of_all * kEight, values);
  unsigned largest = 0;
  for (const float value : values) {
    const unsigned magnitude = __float_as_uint(value) & 0x7fffffffU;
    largest = magnitude > largest ? magnitude : largest;
  }
  for (int step = kWarp / 2; step > 0; step /= 2) {
    const unsigned other = __shfl_xor_sync(kAllLanes, largest, step);
    largest = other > largest ? other : largest;
  }
  const float scale = scale_of(largest);
  if (threadIdx.x % kWarp == 0) scales[block] = scale;
  unsigned words[2] = {};
  if (scale > 0.0F) {
    const float inverse = __fdiv_rn(1.0F, scale);
    for (unsigned i = 0; i < kEight; ++i) {
      const int nearest = __float2int_rn(__fmul_rn(values[i], inverse));
      words[i / 4] |= (static_cast<unsigned>(nearest) & 0xffU) << (8 * (i % 4));
    }
  }
  codes[lane_of_all] = {words[0], words[1]};
}

/// One thread handles eight elements.
template <class T>
__global__ void decode_codes(const uint2* codes, const float* scales, std::size_t blocks,
                             T* weights) {
  const std::size_t at = std::size_t{blockIdx.x} * kElementThreads + threadIdx.x;
  const std::size_t block = at / kWarp;
  if (block >= blocks) return;
  const float scale = scales[block];
  const uint2 mine = codes[at];
  const unsigned words[2] = {mine.x, mine.y};
  T* const to = weights + at * kEight;
  if (std::isnan(scale)) {  // the scale itself, because a GPU's product would be a different NaN
    for (unsigned i = 0; i < kEight; ++i) device::narrow(scale, to[i]);
    return;
  }
  float values[kEight];
  for (unsigned i = 0; i < kEight; ++i) {
    const auto code = static_cast<std::int8_t>(words[i / 4] >> (8 * (i % 4)) & 0xffU);
    values[i] = __fmul_rn(static_cast<float>(code), scale);
  }
  device::write(values, to);
}

device::LaunchConfig over_blocks(cudaStream_t stream, std::size_t blocks) {
  constexpr std::size_t kTogether = kElementThreads / kWarp;
  return {.stream = stream,
          .blocks = static_cast<unsigned>((blocks + kTogether - 1) / kTogether),
          .threads = kElementThreads};
}

}  // namespace

template <class T>
cudaError_t quantize_weights(cudaStream_t stream, const T* weights, std::size_t blocks,
                             std::int8_t* codes, float* scales) {
  if (blocks == 0) return cudaSuccess;
  return device::launch(over_blocks(stream, blocks), &encode<T>, weights, blocks,
                        reinterpret_cast<uint2*>(codes), scales);
}

template <class T>
cudaError_t dequantize_weights(cudaStream_t stream, const std::int8_t* codes, const float* scales,
                               std::size_t blocks, T* weights) {
  if (blocks == 0) return cudaSuccess;
  return device::launch(over_blocks(stream, blocks), &decode_codes<T>,
                        reinterpret_cast<const uint2*>(codes), scales, blocks, weights);
}

template cudaError_t quantize_weights(cudaStream_t, const float*, std::size_t, std::int8_t*,
                                      float*);
template cudaError_t quantize_weights(cudaStream_t, const Bf16*, std::size_t, std::int8_t*, float*);
template cudaError_t quantize_weights(cudaStream_t, const F16*, std::size_t, std::int8_t*, float*);
template cudaError_t dequantize_weights(cudaStream_t, const std::int8_t*, const float*, std::size_t,
                                        float*);
template cudaError_t dequantize_weights(cudaStream_t, const std::int8_t*, const float*, std::size_t,
                                        Bf16*);
template cudaError_t dequantize_weights(cudaStream_t, const std::int8_t*, const float*, std::size_t,
                                        F16*);

namespace {

using device::rounded_product;
using device::rounded_sum;

/// The tables of values, as a kernel argument.
struct Tables {
  float nf4[16];
  float map[kElementThreads];
};

/// See QuantizedArrays.
struct CodeArrays {
  const std::uint8_t* codes;
  const std::uint8_t* quantized_scales;  ///< null: fp32 scales
  const float* scales;                   ///< fp32 scales of blocks, or of scales
  const float* mean;
  std::size_t elements;
  std::size_t block;
};

__device__ float scale_of(const CodeArrays& arrays, const float* map, std::size_t index) {
  if (arrays.quantized_scales == nullptr) return arrays.scales[index];
  const float centred =
      rounded_product(map[arrays.quantized_scales[index]], arrays.scales[index / kNestedBlock]);
  return rounded_sum(centred, arrays.mean[0]);
}

/// One thread handles eight elements, which share a scale.
template <class T>
__global__ void decode_base(CodeArrays arrays, Tables tables, T* out) {
  __shared__ float nf4[16];
  __shared__ float map[kElementThreads];
  map[threadIdx.x] = tables.map[threadIdx.x];
  if (threadIdx.x < 16) nf4[threadIdx.x] = tables.nf4[threadIdx.x];
  __syncthreads();
  const std::size_t first = (std::size_t{blockIdx.x} * kElementThreads + threadIdx.x) * kEight;
  if (first >= arrays.elements) return;
  const float scale = scale_of(arrays, map, first / arrays.block);
  const std::size_t left = arrays.elements - first;
  const unsigned count = left < kEight ? static_cast<unsigned>(left) : kEight;
  float values[kEight] = {};
  for (unsigned i = 0; i < count; ++i) {
    const std::size_t at = first + i;
    if (arrays.block == 64) {
      const unsigned pair = arrays.codes[at / 2];
      values[i] = rounded_product(scale, nf4[i % 2 == 0 ? pair >> 4U : pair & 0xfU]);
    } else {
      values[i] = rounded_product(scale, map[arrays.codes[at]]);
    }
  }
  if (count == kEight) {
    device::write(values, out + first);
    return;
  }
  for (unsigned i = 0; i < count; ++i) device::narrow(values[i], out[first + i]);
}

__global__ void copy(const uint4* from, uint4* to, std::size_t count) {
  const std::size_t at = std::size_t{blockIdx.x} * kElementThreads + threadIdx.x;
  if (at < count) to[at] = from[at];
}

}  // namespace

template <class T>
cudaError_t dequantize_base(cudaStream_t stream, const QuantizedMatrix& matrix, T* out) {
  const QuantizedArrays& where = matrix.arrays;
  if (where.elements == 0) return cudaSuccess;
  const bool nested = where.nested_count > 0;
  const auto* const codes = reinterpret_cast<const std::uint8_t*>(matrix.at);
  const CodeArrays arrays = {
      .codes = codes,
      .quantized_scales = nested ? codes + where.scales : nullptr,
      .scales = reinterpret_cast<const float*>(codes + (nested ? where.nested : where.scales)),
      .mean = reinterpret_cast<const float*>(codes + where.mean),
      .elements = where.elements,
      .block = matrix.quantization.block()};
  Tables tables;
  std::copy(nf4_values().begin(), nf4_values().end(), tables.nf4);
  std::copy(dynamic_map().begin(), dynamic_map().end(), tables.map);
  const std::size_t threads = (where.elements + kEight - 1) / kEight;
  return device::launch(
      {.stream = stream, .blocks = blocks_of(threads), .threads = kElementThreads}, &decode_base<T>,
      arrays, tables, out);
}

cudaError_t copy_bytes(cudaStream_t stream, const std::byte* from, std::byte* to,
                       std::size_t size) {
  if (size == 0) return cudaSuccess;
  const std::size_t count = size / sizeof(uint4);
  return device::launch({.stream = stream, .blocks = blocks_of(count), .threads = kElementThreads},
                        &copy, reinterpret_cast<const uint4*>(from), reinterpret_cast<uint4*>(to),
                        count);
}

template cudaError_t dequantize_base(cudaStream_t, const QuantizedMatrix&, float*);
template cudaError_t dequantize_base(cudaStream_t, const QuantizedMatrix&, Bf16*);
template cudaError_t dequantize_base(cudaStream_t, const QuantizedMatrix&, F16*);

}  // namespace ballast::model::cuda
