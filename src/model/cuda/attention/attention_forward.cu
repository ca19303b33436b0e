#include <algorithm>
#include <limits>

#include "src/model/cuda/attention/attention_tiles.h"

namespace ballast::model::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * static_cast<int>(device::kWarp);
/// Keys per tile.
constexpr int kKeys = 64;

template <int kWidth, int kValues>
struct ForwardGeometry {
  static constexpr int kTiles = kValues <= 128 ? 2 : 1;
  static constexpr int kWarpRows = 16 * kTiles;
  static constexpr int kRows = kWarps * kWarpRows;
  static constexpr std::size_t kSharedBytes =
      (kRows + kKeys) * kTileRowBytes<kWidth> + kKeys * kTileRowBytes<kValues>;
};

/// There is one block per head, sequence and tile of queries. Tiles with the most keys start first.
/// Source: Dao, "FlashAttention-2", 2023, algorithm 1. Values of a tile are copied while its scores
/// are computed, and the next tile's keys while the values are summed.
/// `scale`: softmax_scale().
template <int kWidth, int kValues, bool kCapped>
__global__ void __launch_bounds__(kThreads, kWidth <= 32 ? 3 : 2)
    attend(AttentionShape shape, float scale, SoftCap cap, const Bf16* qkv, Bf16* out,
           float* log_sums) {
  using G = ForwardGeometry<kWidth, kValues>;
  constexpr int kTiles = G::kTiles;
  Bf16* const queries = device::dynamic_shared<Bf16>();
  Bf16* const keys = queries + G::kRows * kTileStep<kWidth>;
  Bf16* const values = keys + kKeys * kTileStep<kWidth>;
  const HeadPlace place = place_of(shape, blockIdx.y, blockIdx.x);
  const AttentionRows<const Bf16> all_keys = rows_in_qkv(shape, qkv + place.key);
  const AttentionRows<const Bf16> all_values = rows_in_qkv(shape, qkv + place.value);
  const int length = all_keys.length;
  const int first = static_cast<int>(gridDim.z - 1 - blockIdx.z) * G::kRows;
  const int warp_row = static_cast<int>(threadIdx.x / device::kWarp) * G::kWarpRows;
  const int first_row = first + warp_row;
  const SequenceMask mask = mask_of(shape, blockIdx.y);
  const int begin = mask.first_step(first, kKeys);
  Bf16* const own = queries + warp_row * kTileStep<kWidth>;

  Sums<kTiles, kValues> sums;
  clear<kTiles, kValues>(sums);
  Softmax<kTiles> softmax;
  clear(softmax);
  copy_rows<kWidth, G::kRows, kThreads>(queries, rows_in_qkv(shape, qkv + place.query), first);
  copy_rows<kWidth, kKeys, kThreads>(keys, all_keys, begin);
  device::end_copies();
  const int end = std::min(first + G::kRows, length);
  for (int key = begin; key < end; key += kKeys) {
    // Warps without rows, or with rows that see none of these keys, take part only in the copies.
    const bool seen = first_row < length && key < first_row + G::kWarpRows &&
                      key + kKeys > mask.first_key(first_row);
    Weights<kTiles, kKeys> weights;
    device::await_copies<0>();
    __syncthreads();  // keys are complete, and all threads are done with the previous values
    copy_rows<kValues, kKeys, kThreads>(values, all_values, key);
    device::end_copies();
    if (seen) {
      Sums<kTiles, kKeys> scores;
      multiply_rows<kWidth, kTiles, kKeys>(scores, lane_part<kWidth>(own), lane_part<kWidth>(keys));
      if constexpr (kCapped) cap_scores<kTiles, kKeys>(scores, cap);
      if (key + kKeys > first_row || key < mask.first_key(first_row + G::kWarpRows - 1)) {
        hide_unseen_keys<kTiles, kKeys>(scores, key + lane_column(), first_row + lane_row(), mask,
                                        -std::numeric_limits<float>::infinity());
      }
      float corrections[kTiles][2];
      to_powers<kTiles, kKeys>(scores, softmax, scale * kLog2E, corrections);
      rescale<kTiles, kValues>(sums, corrections);
      to_weights<kTiles, kKeys>(scores, weights);
    }
    device::await_copies<0>();
    __syncthreads();  // values are complete, and all threads are done with these keys
    if (key + kKeys < end) copy_rows<kWidth, kKeys, kThreads>(keys, all_keys, key + kKeys);
    device::end_copies();
    if (seen) {
      add_product<kValues, kTiles, kKeys, kValues>(sums, weights, lane_part<kValues>(values));
    }
  }
  device::await_copies<0>();
  if (first_row >= length) return;
  float factors[kTiles][2];
  finish<kTiles>(softmax, scale, first_row, length, log_sums + place.row, factors);
  const AttentionRows<Bf16> results = rows_in_out(shape, out + place.out);
  write_rows<kWidth, kTiles, kValues>(sums, factors, own, results, first_row, 0);
  if constexpr (kValues < kWidth) write_zeros<G::kWarpRows>(results, first_row, kValues);
}

template <int kWidth, int kValues, bool kCapped>
cudaError_t start(cudaStream_t stream, const AttentionShape& shape, const Bf16* qkv, Bf16* out,
                  float* log_sums) {
  using G = ForwardGeometry<kWidth, kValues>;
  const auto tiles = static_cast<unsigned>((shape.length + G::kRows - 1) / G::kRows);
  return device::launch({.stream = stream,
                         .blocks = {static_cast<unsigned>(shape.heads),
                                    static_cast<unsigned>(shape.sequences), tiles},
                         .threads = kThreads,
                         .shared_bytes = G::kSharedBytes},
                        &attend<kWidth, kValues, kCapped>, shape, softmax_scale(shape),
                        cap_of(shape), qkv, out, log_sums);
}

}  // namespace

template <>
cudaError_t attention(cudaStream_t stream, const AttentionShape& shape, const Bf16* qkv, Bf16* out,
                      float* log_sums) {
  if (shape.log_sums() == 0) return cudaSuccess;
  if (!has_kernels(shape)) return cudaErrorInvalidValue;
  if (shape.head_dim > kWidestOnTensorCores) {
    return plain_attention(stream, shape, qkv, out, log_sums);
  }
  if (warpgroups_fit(shape)) return forward_by_warpgroups(stream, shape, qkv, out, log_sums);
  return for_widths(shape, [&](auto width, auto values, auto capped) {
    return start<width.value, values.value, capped.value>(stream, shape, qkv, out, log_sums);
  });
}

}  // namespace ballast::model::cuda
