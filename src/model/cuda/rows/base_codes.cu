#include <algorithm>

#include "ballast/model/quantized_values.h"

#include "src/device/cuda/eight.h"
#include "src/device/cuda/kernel_language.h"
#include "src/model/cuda/rows/base_codes.h"
#include "src/model/cuda/rows/blocks.h"

namespace ballast::model::cuda {
namespace {

using device::kEight;
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
