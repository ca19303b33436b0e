#pragma once

#include <limits>

#include "src/model/cuda/attention/attention_tiles.h"

namespace ballast::model::cuda {

// The softmax of rows whose scores come tile by tile. Only sources of kernels include it.

/// State per row of a lane: the maximum score so far, and this lane's part of the sum of exp(score
/// - maximum).
template <int kTiles>
struct Softmax {
  float greatest[kTiles][2];
  float sum[kTiles][2];
};

template <int kTiles>
__device__ void clear(Softmax<kTiles>& softmax) {
#pragma unroll
  for (int i = 0; i < 2 * kTiles; ++i) {
    softmax.greatest[i / 2][i % 2] = -std::numeric_limits<float>::infinity();
    softmax.sum[i / 2][i % 2] = 0.0F;
  }
}

/// Combines the maximum or sum of a row over the four lanes that share it.
__device__ inline float greatest_of_row(float value) {
  value = fmaxf(value, __shfl_xor_sync(device::kAllLanes, value, 1));
  return fmaxf(value, __shfl_xor_sync(device::kAllLanes, value, 2));
}
__device__ inline float sum_of_row(float value) {
  value += __shfl_xor_sync(device::kAllLanes, value, 1);
  return value + __shfl_xor_sync(device::kAllLanes, value, 2);
}

/// Replaces scores by exp(scale * (score - maximum so far)); `corrections` takes earlier sums of
/// these to that maximum. A row that has seen no key yet has the maximum -infinity and sums of 0.
/// `scale` applies to exponents of base 2.
template <int kTiles, int kKeys>
__device__ void to_powers(Sums<kTiles, kKeys>& scores, Softmax<kTiles>& softmax, float scale,
                          float (&corrections)[kTiles][2]) {
#pragma unroll
  for (int m = 0; m < kTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float before = softmax.greatest[m][half];
      float greatest = before;
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
        greatest = fmaxf(greatest, fmaxf(scores[m][n][2 * half], scores[m][n][2 * half + 1]));
      }
      greatest = greatest_of_row(greatest);
      const bool none = greatest == -std::numeric_limits<float>::infinity();
      const float shift = none ? 0.0F : -scale * greatest;
      const float correction = device::power_of_two(__fmaf_rn(before, scale, shift));
      float sum = softmax.sum[m][half] * correction;
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i) {
          scores[m][n][i] = device::power_of_two(__fmaf_rn(scores[m][n][i], scale, shift));
          sum += scores[m][n][i];
        }
      }
      softmax.greatest[m][half] = greatest;
      softmax.sum[m][half] = sum;
      corrections[m][half] = correction;
    }
  }
}

template <int kTiles, int kWidth>
__device__ void rescale(Sums<kTiles, kWidth>& sums, const float (&corrections)[kTiles][2]) {
#pragma unroll
  for (int m = 0; m < kTiles; ++m) {
#pragma unroll
    for (int n = 0; n < kWidth / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[m][n][i] *= corrections[m][i / 2];
    }
  }
}

/// Completes the softmax: writes the logarithms of the sums and leaves 1 / sum in `factors`.
template <int kTiles>
__device__ void finish(const Softmax<kTiles>& softmax, float scale, int first_row, int length,
                       float* log_sums, float (&factors)[kTiles][2]) {
#pragma unroll
  for (int m = 0; m < kTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = sum_of_row(softmax.sum[m][half]);
      factors[m][half] = 1.0F / sum;
      const int row = first_row + 16 * m + 8 * half + lane_row();
      if (lane_column() == 0 && row < length) {
        log_sums[row] = __fmaf_rn(softmax.greatest[m][half], scale, logf(sum));
      }
    }
  }
}

}  // namespace ballast::model::cuda
