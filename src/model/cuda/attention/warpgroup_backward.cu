#include <algorithm>

#include "src/model/cuda/attention/attention_tiles.h"
#include "src/model/cuda/attention/gradient_tiles.h"
#include "src/model/cuda/attention/warpgroup_tiles.h"

namespace ballast::model::cuda {
namespace {

// The kernels of attention_backward.cu with products of warpgroups: each block owns 128 rows and
// loops in steps of 64 rows. While a step's last products run, the scores of the next are started,
// so a step stays in shared memory for one turn longer than it is read by new products.

inline constexpr int kStep = 64;
inline constexpr int kStages = 3;

template <int kWidth>
inline constexpr std::size_t kSharedBytes =
    device::kPanelAlignment +
    (2 * kOwn + 2 * kStages * kStep) * kWidth * sizeof(Bf16) + kStages* kStep * sizeof(QueryRow);

/// Shared memory of a block: the rows that it owns, and three steps.
template <int kWidth>
struct Panels {
  Bf16* own;
  Bf16* steps;
  QueryRow* rows;

  __device__ Panels() : own(first_panel()) {
    steps = own + 2 * kOwn * kWidth;
    rows = reinterpret_cast<QueryRow*>(steps + 2 * kStages * kStep * kWidth);
  }
  __device__ Bf16* own_second() const { return own + kOwn * kWidth; }
  __device__ Bf16* first(int turn) const { return steps + turn % kStages * 2 * kStep * kWidth; }
  __device__ Bf16* second(int turn) const { return first(turn) + kStep * kWidth; }
  __device__ QueryRow* query_rows(int turn) const { return rows + turn % kStages * kStep; }

  __device__ void copy_own(const MatrixPair& pair, int row) const {
    copy_panels<kWidth, kOwn, kThreads>(own, pair.first, row);
    copy_panels<kWidth, kOwn, kThreads>(own_second(), pair.second, row);
  }
  __device__ void copy_step(const MatrixPair& pair, int row, int turn) const {
    copy_panels<kWidth, kStep, kThreads>(first(turn), pair.first, row);
    copy_panels<kWidth, kStep, kThreads>(second(turn), pair.second, row);
  }
};

template <int kWidth>
__device__ void copy_queries(const Panels<kWidth>& panels, const AttentionShape& shape,
                             const Queries& queries, const Bf16* qkv, const QueryRow* rows,
                             const Bf16* dout, int turn) {
  const HeadPlace place = place_of(shape, blockIdx.y, static_cast<std::size_t>(queries.head));
  panels.copy_step({rows_in_qkv(shape, qkv + place.query), rows_in_out(shape, dout + place.out)},
                   queries.first, turn);
  copy_query_rows<kStep>(panels.query_rows(turn), rows, shape, queries);
}

/// Starts the products of a step's rows with the block's, for this warpgroup's rows: the scores,
/// and the gradients of the probabilities. Returns when the scores and all earlier products are
/// done.
template <int kWidth>
__device__ void start_scores(Sums<1, kStep>& p, Sums<1, kStep>& dp, const Panels<kWidth>& panels,
                             int turn) {
  const int own = static_cast<int>(threadIdx.x) / kWarpgroupThreads * kWarpgroupRows;
  device::pin_sums(p[0]);
  device::pin_sums(dp[0]);
  device::begin_products();
  start_rows<kWidth, kOwn, kStep>(p, panels.own, own, panels.first(turn));
  device::end_products();
  start_rows<kWidth, kOwn, kStep>(dp, panels.own_second(), own, panels.second(turn));
  device::end_products();
  device::await_products<1>();
  device::pin_sums(p[0]);
}

/// Gradients of keys and values; see differentiate_keys(). Probabilities and their gradients enter
/// the second products in bf16.
template <int kWidth>
__global__ void __launch_bounds__(kThreads, 1)
    differentiate_keys_by_warpgroups(AttentionShape shape, float scale, const Bf16* qkv,
                                     const QueryRow* rows, const Bf16* dout, Bf16* dqkv) {
  const Panels<kWidth> panels;
  const auto group = static_cast<int>(shape.heads / shape.kv_heads);
  const int first = static_cast<int>(blockIdx.z) * kOwn;
  const int first_head = static_cast<int>(blockIdx.x) * group;
  const HeadPlace place = place_of(shape, blockIdx.y, static_cast<std::size_t>(first_head));
  const int first_key = first + static_cast<int>(threadIdx.x / device::kWarp) * 16;
  const SequenceMask mask = mask_of(shape, blockIdx.y);

  Sums<1, kWidth> dkeys;
  Sums<1, kWidth> dvalues;
  clear<1, kWidth>(dkeys);
  clear<1, kWidth>(dvalues);
  panels.copy_own({rows_in_qkv(shape, qkv + place.key), rows_in_qkv(shape, qkv + place.value)},
                  first);
  Queries queries{first_head, first};
  copy_queries<kWidth>(panels, shape, queries, qkv, rows, dout, 0);
  device::end_copies();
  for (int turn = 0; queries.head < first_head + group; ++turn) {
    const Queries next = queries.after(kStep, first, first + kOwn, mask);
    await_panels();  // all threads are done with the step before the previous one
    if (next.head < first_head + group) {
      copy_queries<kWidth>(panels, shape, next, qkv, rows, dout, turn + 1);
    }
    device::end_copies();
    const QueryRow* const step_rows = rows_of_lane(panels.query_rows(turn));
    Sums<1, kStep> p;
    Sums<1, kStep> dp;
    start_scores<kWidth>(p, dp, panels, turn);
    to_probabilities<1, kStep>(p, step_rows, scale * kLog2E);
    if (first + kOwn > queries.first || mask.first_key(queries.first + kStep - 1) > first) {
      hide_keys_of_columns<1, kStep>(p, first_key + lane_row(), queries.first + lane_column(),
                                     mask);
    }
    Weights<1, kStep> weights;
    to_weights<1, kStep>(p, weights);
    device::begin_products();
    start_sums<kWidth, kStep>(dvalues, weights, panels.second(turn));
    device::end_products();
    device::await_products<1>();
    device::pin_sums(dp[0]);
    to_score_gradients<1, kStep>(p, dp, step_rows);
    Weights<1, kStep> gradients;
    to_weights<1, kStep>(p, gradients);
    device::begin_products();
    start_sums<kWidth, kStep>(dkeys, gradients, panels.first(turn));
    device::end_products();
    queries = next;
  }
  device::await_copies<0>();
  device::await_products<0>();
  device::pin_sums(dkeys[0]);
  device::pin_sums(dvalues[0]);
  __syncthreads();  // the block's own rows become staging
  if (first_key >= static_cast<int>(shape.length)) return;
  write_rows<kWidth, 1, kWidth>(dkeys, scale, staging_rows<kWidth>(panels.own),
                                rows_in_qkv(shape, dqkv + place.key), first_key, 0);
  write_rows<kWidth, 1, kWidth>(dvalues, 1.0F, staging_rows<kWidth>(panels.own),
                                rows_in_qkv(shape, dqkv + place.value), first_key, 0);
}

/// Gradients of queries; see differentiate_queries().
template <int kWidth>
__global__ void __launch_bounds__(kThreads, 1)
    differentiate_queries_by_warpgroups(AttentionShape shape, float scale, const Bf16* qkv,
                                        const QueryRow* all_rows, const Bf16* dout, Bf16* dqkv) {
  const Panels<kWidth> panels;
  const HeadPlace place = place_of(shape, blockIdx.y, blockIdx.x);
  const int first = static_cast<int>(gridDim.z - 1 - blockIdx.z) * kOwn;
  const int first_query = first + static_cast<int>(threadIdx.x / device::kWarp) * 16;
  const MatrixPair keys = {rows_in_qkv(shape, qkv + place.key),
                           rows_in_qkv(shape, qkv + place.value)};
  const SequenceMask mask = mask_of(shape, blockIdx.y);
  const int begin = mask.first_step(first, kStep);

  panels.copy_own({rows_in_qkv(shape, qkv + place.query), rows_in_out(shape, dout + place.out)},
                  first);
  panels.copy_step(keys, begin, 0);
  device::end_copies();
  const QueryRow* const head_rows =
      all_rows + (blockIdx.y * shape.heads + blockIdx.x) * padded_length(shape);
  QueryRow rows[1][2];
#pragma unroll
  for (int i = 0; i < 2; ++i) rows[0][i] = head_rows[first_query + 8 * i + lane_row()];
  Sums<1, kWidth> dqueries;
  clear<1, kWidth>(dqueries);
  const int end = std::min(first + kOwn, static_cast<int>(shape.length));
  for (int turn = 0; begin + turn * kStep < end; ++turn) {
    const int key = begin + turn * kStep;
    await_panels();  // all threads are done with the step before the previous one
    if (key + kStep < end) panels.copy_step(keys, key + kStep, turn + 1);
    device::end_copies();
    Sums<1, kStep> p;
    Sums<1, kStep> dp;
    start_scores<kWidth>(p, dp, panels, turn);
    device::await_products<0>();
    device::pin_sums(dp[0]);
    to_score_gradients<1, kStep>(p, dp, rows, scale * kLog2E);
    if (key + kStep > first || mask.first_key(first + kOwn - 1) > key) {
      hide_unseen_keys<1, kStep>(p, key + lane_column(), first_query + lane_row(), mask, 0.0F);
    }
    Weights<1, kStep> weights;
    to_weights<1, kStep>(p, weights);
    device::begin_products();
    start_sums<kWidth, kStep>(dqueries, weights, panels.first(turn));
    device::end_products();
  }
  device::await_copies<0>();
  device::await_products<0>();
  device::pin_sums(dqueries[0]);
  __syncthreads();  // the block's own rows become staging
  if (first_query >= static_cast<int>(shape.length)) return;
  write_rows<kWidth, 1, kWidth>(dqueries, scale, staging_rows<kWidth>(panels.own),
                                rows_in_qkv(shape, dqkv + place.query), first_query, 0);
}

template <int kWidth>
cudaError_t start(cudaStream_t stream, const AttentionShape& shape, const Bf16* qkv,
                  const QueryRow* rows, const Bf16* dout, Bf16* dqkv) {
  const auto tiles = static_cast<unsigned>((shape.length + kOwn - 1) / kOwn);
  const auto launch = [&](std::size_t heads, auto* kernel) {
    return device::launch(
        {.stream = stream,
         .blocks = {static_cast<unsigned>(heads), static_cast<unsigned>(shape.sequences), tiles},
         .threads = kThreads,
         .shared_bytes = kSharedBytes<kWidth>},
        kernel, shape, shape.score_scale(), qkv, rows, dout, dqkv);
  };
  const cudaError_t code = launch(shape.kv_heads, &differentiate_keys_by_warpgroups<kWidth>);
  if (code != cudaSuccess) return code;
  return launch(shape.heads, &differentiate_queries_by_warpgroups<kWidth>);
}

}  // namespace

cudaError_t backward_by_warpgroups(cudaStream_t stream, const AttentionShape& shape,
                                   const Bf16* qkv, const QueryRow* rows, const Bf16* dout,
                                   Bf16* dqkv) {
  return shape.head_dim <= 64 ? start<64>(stream, shape, qkv, rows, dout, dqkv)
                              : start<128>(stream, shape, qkv, rows, dout, dqkv);
}

}  // namespace ballast::model::cuda
