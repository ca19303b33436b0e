#include <cmath>

#include "ballast/core/weight_codes.h"

#include "src/device/cuda/eight.h"
#include "src/device/cuda/kernel_language.h"
#include "src/model/cuda/rows/blocks.h"
#include "src/model/cuda/rows/gradients.h"

namespace ballast::model::cuda {
namespace {

using device::kAllLanes;
using device::kEight;
using device::kWarp;

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
cudaError_t encode_weights(cudaStream_t stream, const T* weights, std::size_t blocks,
                           std::int8_t* codes, float* scales) {
  if (blocks == 0) return cudaSuccess;
  return device::launch(over_blocks(stream, blocks), &encode<T>, weights, blocks,
                        reinterpret_cast<uint2*>(codes), scales);
}

template <class T>
cudaError_t decode_weights(cudaStream_t stream, const std::int8_t* codes, const float* scales,
                           std::size_t blocks, T* weights) {
  if (blocks == 0) return cudaSuccess;
  return device::launch(over_blocks(stream, blocks), &decode_codes<T>,
                        reinterpret_cast<const uint2*>(codes), scales, blocks, weights);
}

template cudaError_t encode_weights(cudaStream_t, const float*, std::size_t, std::int8_t*, float*);
template cudaError_t encode_weights(cudaStream_t, const Bf16*, std::size_t, std::int8_t*, float*);
template cudaError_t encode_weights(cudaStream_t, const F16*, std::size_t, std::int8_t*, float*);
template cudaError_t decode_weights(cudaStream_t, const std::int8_t*, const float*, std::size_t,
                                    float*);
template cudaError_t decode_weights(cudaStream_t, const std::int8_t*, const float*, std::size_t,
                                    Bf16*);
template cudaError_t decode_weights(cudaStream_t, const std::int8_t*, const float*, std::size_t,
                                    F16*);

}  // namespace ballast::model::cuda
