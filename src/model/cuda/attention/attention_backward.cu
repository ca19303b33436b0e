#include <algorithm>

#include "src/model/cuda/attention/attention_tiles.h"
#include "src/model/cuda/attention/gradient_tiles.h"

namespace ballast::model::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * static_cast<int>(device::kWarp);

/// A block owns rows of keys and values, or of queries and dout, and loops in steps over the rows
/// of the other two. It has four warps, because a multiprocessor has four tensor units, and the
/// shared memory of some GPUs (99 KiB) holds only one block for the widest heads.
template <int kWidth, int kValues>
struct BackwardGeometry {
  static constexpr int kTiles = kWidth <= 64 ? 2 : 1;
  static constexpr int kWarpRows = 16 * kTiles;
  static constexpr int kOwn = kWarps * kWarpRows;
  static constexpr int kStep = kWidth <= 192 ? 32 : 16;
  /// Slices of columns, such that those of dkeys and dvalues fit in the registers of a block.
  static constexpr int kSlices = kWidth + kValues <= 320 ? 1 : 2;
  static constexpr int kKeySlice = kWidth / kSlices;
  static constexpr int kValueSlice = kValues / kSlices;
  /// Blocks of differentiate_queries() that fit in the registers of a multiprocessor.
  static constexpr int kQueryBlocks = kWidth == 64 || kWidth > 128 ? 2 : 3;
  /// Elements of a row of the first matrix and one of the second.
  static constexpr int kPair = kTileStep<kWidth> + kTileStep<kValues>;
  static constexpr std::size_t kSharedBytes = (kOwn + 2 * kStep) * kPair * sizeof(Bf16);
  /// The padding after each row of a tile takes a pair of QueryRows.
  static constexpr int kPairStep = kTileRowBytes<kWidth> / sizeof(QueryRow);
  static_assert(kTileRowBytes<kWidth> - kWidth * sizeof(Bf16) == 2 * sizeof(QueryRow));
};

/// Copies a tile of the first matrix, followed by one of the second.
template <int kWidth, int kValues, int kRows>
__device__ void copy_pair(Bf16* tiles, const MatrixPair& pair, int row) {
  copy_rows<kWidth, kRows, kThreads>(tiles, pair.first, row);
  copy_rows<kValues, kRows, kThreads>(tiles + kRows * kTileStep<kWidth>, pair.second, row);
}

/// Shared memory of a block: the rows that it owns, and two buffers for steps.
template <int kWidth, int kValues>
struct Shared {
  using G = BackwardGeometry<kWidth, kValues>;
  Bf16* own;
  Bf16* steps;

  __device__ Shared() : own(device::dynamic_shared<Bf16>()), steps(own + G::kOwn * G::kPair) {}
  /// Returns the first row of this warp.
  __device__ Bf16* own_first() const { return own + warp_row() * kTileStep<kWidth>; }
  __device__ Bf16* own_second() const {
    return own + G::kOwn * kTileStep<kWidth> + warp_row() * kTileStep<kValues>;
  }
  __device__ Bf16* first(int turn) const { return steps + turn % 2 * G::kStep * G::kPair; }
  __device__ Bf16* second(int turn) const { return first(turn) + G::kStep * kTileStep<kWidth>; }
  /// Pairs of rows are in the padding of the step's first tile, kPairStep apart.
  __device__ QueryRow* query_rows(int turn) const {
    return reinterpret_cast<QueryRow*>(first(turn) + kWidth);
  }

 private:
  __device__ static int warp_row() {
    return static_cast<int>(threadIdx.x / device::kWarp) * G::kWarpRows;
  }
};

template <int kWidth, int kValues>
__device__ void copy_queries(const Shared<kWidth, kValues>& shared, const AttentionShape& shape,
                             const Queries& queries, const Bf16* qkv, const QueryRow* rows,
                             const Bf16* dout, int turn) {
  constexpr int kStep = BackwardGeometry<kWidth, kValues>::kStep;
  const auto head = static_cast<std::size_t>(queries.head);
  const HeadPlace place = place_of(shape, blockIdx.y, head);
  copy_pair<kWidth, kValues, kStep>(
      shared.first(turn),
      {rows_in_qkv(shape, qkv + place.query), rows_in_out(shape, dout + place.out)}, queries.first);
  copy_query_rows<kStep, BackwardGeometry<kWidth, kValues>::kPairStep>(shared.query_rows(turn),
                                                                       rows, shape, queries);
}

/// Adds the contributions of one step's queries to the gradients of this warp's keys, which are the
/// rows here. Probabilities and their gradients enter the second products in bf16.
template <int kWidth, int kValues, bool kCapped, int kTiles, int kKeySlice, int kValueSlice>
__device__ void add_queries(Sums<kTiles, kKeySlice>& dkeys, Sums<kTiles, kValueSlice>& dvalues,
                            const Shared<kWidth, kValues>& shared, int turn, int first_key,
                            int first_query, const SequenceMask& mask, int slice, float scale,
                            const SoftCap& cap) {
  constexpr int kStep = BackwardGeometry<kWidth, kValues>::kStep;
  constexpr int kPairStep = BackwardGeometry<kWidth, kValues>::kPairStep;
  const Bf16* const queries = lane_part<kWidth>(shared.first(turn));
  const Bf16* const douts = lane_part<kValues>(shared.second(turn));
  const QueryRow* const rows = rows_of_lane<kPairStep>(shared.query_rows(turn));
  Sums<kTiles, kStep> p;
  multiply_rows<kWidth, kTiles, kStep>(p, lane_part<kWidth>(shared.own_first()), queries);
  [[maybe_unused]] Sums<kTiles, kStep> slopes;
  if constexpr (kCapped) cap_scores<kTiles, kStep>(p, slopes, cap);
  to_probabilities<kTiles, kStep, kPairStep>(p, rows, scale);
  if (first_key + 16 * kTiles > first_query ||
      mask.first_key(first_query + kStep - 1) > first_key) {
    hide_keys_of_columns<kTiles, kStep>(p, first_key + lane_row(), first_query + lane_column(),
                                        mask);
  }
  Weights<kTiles, kStep> weights;
  to_weights<kTiles, kStep>(p, weights);
  add_product<kValues, kTiles, kStep, kValueSlice>(dvalues, weights, douts + slice * kValueSlice);
  Sums<kTiles, kStep> dp;
  multiply_rows<kValues, kTiles, kStep>(dp, lane_part<kValues>(shared.own_second()), douts);
  to_score_gradients<kTiles, kStep, kPairStep>(p, dp, rows);
  if constexpr (kCapped) multiply_by<kTiles, kStep>(p, slopes);
  to_weights<kTiles, kStep>(p, weights);
  add_product<kWidth, kTiles, kStep, kKeySlice>(dkeys, weights, queries + slice * kKeySlice);
}

/// Gradients of keys and values. There is one block per head of keys (and slice of columns),
/// sequence and tile of keys. Tiles seen by the most queries start first. Source: Dao,
/// "FlashAttention-2", 2023, algorithm 2, without the gradients of queries, so that no two blocks
/// add to one sum. `scale`: softmax_scale().
template <int kWidth, int kValues, bool kCapped>
__global__ void __launch_bounds__(kThreads, 2)
    differentiate_keys(AttentionShape shape, float scale, SoftCap cap, const Bf16* qkv,
                       const QueryRow* rows, const Bf16* dout, Bf16* dqkv) {
  using G = BackwardGeometry<kWidth, kValues>;
  const Shared<kWidth, kValues> shared;
  const auto group = static_cast<int>(shape.heads / shape.kv_heads);
  const int slice = static_cast<int>(blockIdx.x % G::kSlices);
  const int first = static_cast<int>(blockIdx.z) * G::kOwn;
  const int length = static_cast<int>(shape.length);
  const int first_head = static_cast<int>(blockIdx.x / G::kSlices) * group;
  const HeadPlace place = place_of(shape, blockIdx.y, static_cast<std::size_t>(first_head));
  const int first_key = first + static_cast<int>(threadIdx.x / device::kWarp) *
                                    G::kWarpRows;  // first row of this warp
  const SequenceMask mask = mask_of(shape, blockIdx.y);

  Sums<G::kTiles, G::kKeySlice> dkeys;
  Sums<G::kTiles, G::kValueSlice> dvalues;
  clear<G::kTiles, G::kKeySlice>(dkeys);
  clear<G::kTiles, G::kValueSlice>(dvalues);
  copy_pair<kWidth, kValues, G::kOwn>(
      shared.own, {rows_in_qkv(shape, qkv + place.key), rows_in_qkv(shape, qkv + place.value)},
      first);
  Queries queries{first_head, first};
  copy_queries<kWidth, kValues>(shared, shape, queries, qkv, rows, dout, 0);
  device::end_copies();
  for (int turn = 0; queries.head < first_head + group; ++turn) {
    const Queries next = queries.after(G::kStep, first, first + G::kOwn, mask);
    device::await_copies<0>();
    __syncthreads();  // this step is complete, and all threads are done with the previous one
    if (next.head < first_head + group) {
      copy_queries<kWidth, kValues>(shared, shape, next, qkv, rows, dout, turn + 1);
    }
    device::end_copies();
    const int query = queries.first;
    queries = next;
    // Warps without keys, or with keys that none of these queries sees, take part only in the
    // copies.
    if (first_key >= length || first_key >= query + G::kStep ||
        mask.first_key(query) >= first_key + G::kWarpRows) {
      continue;
    }
    add_queries<kWidth, kValues, kCapped, G::kTiles, G::kKeySlice, G::kValueSlice>(
        dkeys, dvalues, shared, turn, first_key, query, mask, slice, scale * kLog2E, cap);
  }
  device::await_copies<0>();
  if (first_key >= length) return;
  write_rows<kWidth, G::kTiles, G::kKeySlice>(dkeys, cap.scale, shared.own_first(),
                                              rows_in_qkv(shape, dqkv + place.key), first_key,
                                              slice * G::kKeySlice);
  const AttentionRows<Bf16> value_rows = rows_in_qkv(shape, dqkv + place.value);
  write_rows<kValues, G::kTiles, G::kValueSlice>(dvalues, 1.0F, shared.own_second(), value_rows,
                                                 first_key, slice * G::kValueSlice);
  if constexpr (kValues < kWidth) write_zeros<G::kWarpRows>(value_rows, first_key, kValues);
}

/// Adds the contributions of one step's keys to the gradients of this warp's queries.
template <int kWidth, int kValues, bool kCapped, int kTiles>
__device__ void add_keys(Sums<kTiles, kWidth>& dqueries, const Shared<kWidth, kValues>& shared,
                         int turn, int first_query, int first_key, const SequenceMask& mask,
                         const QueryRow (&rows)[kTiles][2], float scale, const SoftCap& cap) {
  constexpr int kStep = BackwardGeometry<kWidth, kValues>::kStep;
  const Bf16* const keys = lane_part<kWidth>(shared.first(turn));
  const Bf16* const values = lane_part<kValues>(shared.second(turn));
  Sums<kTiles, kStep> p;
  multiply_rows<kWidth, kTiles, kStep>(p, lane_part<kWidth>(shared.own_first()), keys);
  Sums<kTiles, kStep> dp;
  multiply_rows<kValues, kTiles, kStep>(dp, lane_part<kValues>(shared.own_second()), values);
  [[maybe_unused]] Sums<kTiles, kStep> slopes;
  if constexpr (kCapped) cap_scores<kTiles, kStep>(p, slopes, cap);
  to_score_gradients<kTiles, kStep>(p, dp, rows, scale);
  if constexpr (kCapped) multiply_by<kTiles, kStep>(p, slopes);
  if (first_key + kStep > first_query ||
      mask.first_key(first_query + 16 * kTiles - 1) > first_key) {
    hide_unseen_keys<kTiles, kStep>(p, first_key + lane_column(), first_query + lane_row(), mask,
                                    0.0F);
  }
  Weights<kTiles, kStep> weights;
  to_weights<kTiles, kStep>(p, weights);
  add_product<kWidth, kTiles, kStep, kWidth>(dqueries, weights, keys);
}

/// Gradients of queries. There is one block per head, sequence and tile of queries. Tiles with the
/// most keys start first. Scores are recomputed, so that no two blocks add to one sum. `scale`:
/// softmax_scale().
template <int kWidth, int kValues, bool kCapped>
__global__ void __launch_bounds__(kThreads, BackwardGeometry<kWidth, kValues>::kQueryBlocks)
    differentiate_queries(AttentionShape shape, float scale, SoftCap cap, const Bf16* qkv,
                          const QueryRow* all_rows, const Bf16* dout, Bf16* dqkv) {
  using G = BackwardGeometry<kWidth, kValues>;
  const Shared<kWidth, kValues> shared;
  const HeadPlace place = place_of(shape, blockIdx.y, blockIdx.x);
  const int first = static_cast<int>(gridDim.z - 1 - blockIdx.z) * G::kOwn;
  const int length = static_cast<int>(shape.length);
  const int first_query = first + static_cast<int>(threadIdx.x / device::kWarp) *
                                      G::kWarpRows;  // first row of this warp
  const MatrixPair keys = {rows_in_qkv(shape, qkv + place.key),
                           rows_in_qkv(shape, qkv + place.value)};
  const SequenceMask mask = mask_of(shape, blockIdx.y);
  const int begin = mask.first_step(first, G::kStep);

  copy_pair<kWidth, kValues, G::kOwn>(
      shared.own, {rows_in_qkv(shape, qkv + place.query), rows_in_out(shape, dout + place.out)},
      first);
  copy_pair<kWidth, kValues, G::kStep>(shared.first(0), keys, begin);
  device::end_copies();
  const QueryRow* const head_rows =
      all_rows + (blockIdx.y * shape.heads + blockIdx.x) * padded_length(shape);
  QueryRow rows[G::kTiles][2];
#pragma unroll
  for (int i = 0; i < 2 * G::kTiles; ++i) {
    rows[i / 2][i % 2] = head_rows[first_query + 8 * i + lane_row()];
  }
  Sums<G::kTiles, kWidth> dqueries;
  clear<G::kTiles, kWidth>(dqueries);
  const int end = std::min(first + G::kOwn, length);
  for (int turn = 0; begin + turn * G::kStep < end; ++turn) {
    const int key = begin + turn * G::kStep;
    device::await_copies<0>();
    __syncthreads();  // this step is complete, and all threads are done with the previous one
    if (key + G::kStep < end) {
      copy_pair<kWidth, kValues, G::kStep>(shared.first(turn + 1), keys, key + G::kStep);
    }
    device::end_copies();
    // Warps without queries, or with queries that see none of these keys, take part only in the
    // copies.
    if (first_query >= length || key >= first_query + G::kWarpRows ||
        key + G::kStep <= mask.first_key(first_query)) {
      continue;
    }
    add_keys<kWidth, kValues, kCapped, G::kTiles>(dqueries, shared, turn, first_query, key, mask,
                                                  rows, scale * kLog2E, cap);
  }
  device::await_copies<0>();
  if (first_query >= length) return;
  write_rows<kWidth, G::kTiles, kWidth>(dqueries, cap.scale, shared.own_first(),
                                        rows_in_qkv(shape, dqkv + place.query), first_query, 0);
}

template <int kWidth, int kValues, bool kCapped>
cudaError_t start(cudaStream_t stream, const AttentionShape& shape, const Bf16* qkv,
                  const QueryRow* rows, const Bf16* dout, Bf16* dqkv) {
  using G = BackwardGeometry<kWidth, kValues>;
  const auto tiles = static_cast<unsigned>((shape.length + G::kOwn - 1) / G::kOwn);
  const auto heads = static_cast<unsigned>(shape.heads);
  const auto kv_heads = static_cast<unsigned>(shape.kv_heads);
  const auto sequences = static_cast<unsigned>(shape.sequences);
  const cudaError_t code =
      device::launch({.stream = stream,
                      .blocks = {kv_heads * G::kSlices, sequences, tiles},
                      .threads = kThreads,
                      .shared_bytes = G::kSharedBytes},
                     &differentiate_keys<kWidth, kValues, kCapped>, shape, softmax_scale(shape),
                     cap_of(shape), qkv, rows, dout, dqkv);
  if (code != cudaSuccess) return code;
  return device::launch({.stream = stream,
                         .blocks = {heads, sequences, tiles},
                         .threads = kThreads,
                         .shared_bytes = G::kSharedBytes},
                        &differentiate_queries<kWidth, kValues, kCapped>, shape,
                        softmax_scale(shape), cap_of(shape), qkv, rows, dout, dqkv);
}

}  // namespace

template <>
cudaError_t attention_backward(cudaStream_t stream, const AttentionShape& shape, const Bf16* qkv,
                               const Bf16* out, const float* log_sums, const Bf16* dout, Bf16* dqkv,
                               void* scratch) {
  if (shape.log_sums() == 0) return cudaSuccess;
  if (!has_kernels(shape)) return cudaErrorInvalidValue;
  if (shape.head_dim > kWidestOnTensorCores) {
    return plain_attention_backward(stream, shape, qkv, out, log_sums, dout, dqkv, scratch);
  }
  auto* const rows = static_cast<QueryRow*>(scratch);
  const cudaError_t code = gather_query_rows(stream, shape, out, log_sums, dout, rows);
  if (code != cudaSuccess) return code;
  if (warpgroups_fit(shape)) return backward_by_warpgroups(stream, shape, qkv, rows, dout, dqkv);
  return for_widths(shape, [&](auto width, auto values, auto capped) {
    return start<width.value, values.value, capped.value>(stream, shape, qkv, rows, dout, dqkv);
  });
}

}  // namespace ballast::model::cuda
