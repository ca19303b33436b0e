#include <algorithm>
#include <limits>

#include "src/model/cuda/attention/attention_tiles.h"
#include "src/model/cuda/attention/warpgroup_tiles.h"

namespace ballast::model::cuda {
namespace {

/// Shared memory of a block, which owns 128 queries and loops over keys and values in steps of
/// kStep rows. Values stay for one turn longer than keys.
template <int kWidth>
struct ForwardPanels {
  static constexpr int kStep = 128;
  static constexpr std::size_t kSharedBytes =
      device::kPanelAlignment + (kOwn + 5 * kStep) * kWidth * sizeof(Bf16);
  Bf16* queries;

  __device__ ForwardPanels() : queries(first_panel()) {}
  __device__ Bf16* keys(int turn) const { return queries + (kOwn + turn % 2 * kStep) * kWidth; }
  __device__ Bf16* values(int turn) const {
    return queries + (kOwn + (2 + turn % 3) * kStep) * kWidth;
  }
  __device__ void copy_step(const AttentionRows<const Bf16>& all_keys,
                            const AttentionRows<const Bf16>& all_values, int row, int turn) const {
    copy_panels<kWidth, kStep, kThreads>(keys(turn), all_keys, row);
    copy_panels<kWidth, kStep, kThreads>(values(turn), all_values, row);
  }
};

/// See attend() in attention_forward.cu. The scores of a step are computed while the values of the
/// previous one are summed.
template <int kWidth>
__global__ void __launch_bounds__(kThreads, 1)
    attend_by_warpgroups(AttentionShape shape, float scale, const Bf16* qkv, Bf16* out,
                         float* log_sums) {
  using Panels = ForwardPanels<kWidth>;
  constexpr int kStep = Panels::kStep;
  const Panels panels;
  const HeadPlace place = place_of(shape, blockIdx.y, blockIdx.x);
  const AttentionRows<const Bf16> all_keys = rows_in_qkv(shape, qkv + place.key);
  const AttentionRows<const Bf16> all_values = rows_in_qkv(shape, qkv + place.value);
  const int length = all_keys.length;
  const int first = static_cast<int>(gridDim.z - 1 - blockIdx.z) * kOwn;
  const int group = static_cast<int>(threadIdx.x) / kWarpgroupThreads * kWarpgroupRows;
  const int first_row = first + static_cast<int>(threadIdx.x / device::kWarp) * 16;
  const SequenceMask mask = mask_of(shape, blockIdx.y);
  const int begin = mask.first_step(first, kStep);
  const int end = std::min(first + kOwn, length);

  copy_panels<kWidth, kOwn, kThreads>(panels.queries, rows_in_qkv(shape, qkv + place.query), first);
  panels.copy_step(all_keys, all_values, begin, 0);
  device::end_copies();
  Sums<1, kWidth> sums;
  clear<1, kWidth>(sums);
  Softmax<1> softmax;
  clear(softmax);
  Weights<1, kStep> weights;
  // Turn t computes the scores of step t and sums the values of step t - 1.
  const int turns = (end - begin + kStep - 1) / kStep;
  for (int turn = 0; turn < turns; ++turn) {
    const int key = begin + turn * kStep;
    await_panels();  // all threads are done with the values of the step before the previous one
    if (key + kStep < end) panels.copy_step(all_keys, all_values, key + kStep, turn + 1);
    device::end_copies();
    Sums<1, kStep> scores;
    device::pin_sums(scores[0]);
    device::pin_sums(sums[0]);
    device::begin_products();
    start_rows<kWidth, kOwn, kStep>(scores, panels.queries, group, panels.keys(turn));
    device::end_products();
    if (turn > 0) start_sums<kWidth, kStep>(sums, weights, panels.values(turn - 1));
    device::end_products();
    device::await_products<1>();
    device::pin_sums(scores[0]);
    if (key + kStep > first || key < mask.first_key(first + kOwn - 1)) {
      hide_unseen_keys<1, kStep>(scores, key + lane_column(), first_row + lane_row(), mask,
                                 -std::numeric_limits<float>::infinity());
    }
    float corrections[1][2];
    to_powers<1, kStep>(scores, softmax, scale * kLog2E, corrections);
    device::await_products<0>();
    device::pin_sums(sums[0]);
    rescale<1, kWidth>(sums, corrections);
    to_weights<1, kStep>(scores, weights);
  }
  device::await_copies<0>();
  device::pin_sums(sums[0]);
  device::begin_products();
  start_sums<kWidth, kStep>(sums, weights, panels.values(turns - 1));
  device::end_products();
  device::await_products<0>();
  device::pin_sums(sums[0]);
  __syncthreads();  // the queries' and keys' panels become staging
  if (first_row >= length) return;
  float factors[1][2];
  finish<1>(softmax, scale, first_row, length, log_sums + place.row, factors);
  write_rows<kWidth, 1, kWidth>(sums, factors, staging_rows<kWidth>(panels.queries),
                                rows_in_out(shape, out + place.out), first_row, 0);
}

template <int kWidth>
cudaError_t start(cudaStream_t stream, const AttentionShape& shape, const Bf16* qkv, Bf16* out,
                  float* log_sums) {
  const auto tiles = static_cast<unsigned>((shape.length + kOwn - 1) / kOwn);
  return device::launch({.stream = stream,
                         .blocks = {static_cast<unsigned>(shape.heads),
                                    static_cast<unsigned>(shape.sequences), tiles},
                         .threads = kThreads,
                         .shared_bytes = ForwardPanels<kWidth>::kSharedBytes},
                        &attend_by_warpgroups<kWidth>, shape, shape.score_scale(), qkv, out,
                        log_sums);
}

}  // namespace

cudaError_t forward_by_warpgroups(cudaStream_t stream, const AttentionShape& shape, const Bf16* qkv,
                                  Bf16* out, float* log_sums) {
  return shape.head_dim <= 64 ? start<64>(stream, shape, qkv, out, log_sums)
                              : start<128>(stream, shape, qkv, out, log_sums);
}

}  // namespace ballast::model::cuda
