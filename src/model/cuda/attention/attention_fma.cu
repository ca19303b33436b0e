#include <algorithm>
#include <limits>
#include <type_traits>

#include "src/device/cuda/eight_values.h"
#include "src/device/cuda/kernel_language.h"
#include "src/model/cuda/attention/attention_places.h"

namespace ballast::model::cuda {
namespace {

// Attention without tensor cores: for fp32, which they do not support, to compare with other
// programs; for fp16, on GPUs older than the instructions of tensor_core.h; for bf16 among the
// plain kernels and for heads wider than kWidestOnTensorCores. A warp owns a few rows. It processes
// the rows of the other side 32 at a time, one per lane. In the results each lane has every 32nd
// column, kParts of them. Matrices of the other side take turns in one tile, so that a block fits
// into the shared memory of small GPUs.

constexpr int kWarps = 4;
constexpr int kLanes = static_cast<int>(device::kWarp);
constexpr int kThreads = kWarps * kLanes;
constexpr int kStep = kLanes;
constexpr int kForwardRows = 4;
constexpr int kBackwardRows = 2;

__device__ int lane() {
  return static_cast<int>(threadIdx.x) % kLanes;
}
__device__ int warp() {
  return static_cast<int>(threadIdx.x) / kLanes;
}
/// Row stride of a tile, in elements, such that lanes that read one column of their rows use
/// different banks.
__host__ __device__ constexpr int tile_step(int size) {
  return size + 1;
}
/// Shared memory of a block: tiles [rows, tile_step()], then `weights` floats.
std::size_t shared_bytes(const AttentionShape& shape, int rows, int weights) {
  const int floats = rows * tile_step(static_cast<int>(shape.head_dim)) + weights;
  return static_cast<std::size_t>(floats) * sizeof(float);
}

/// Loads rows first .. first + count, with zeros after the end.
template <class T>
__device__ void load_rows(float* tile, const AttentionRows<const T>& rows, int first, int count) {
  for (int row = warp(); row < count; row += kWarps) {
    const bool there = first + row < rows.length;
    const T* const from =
        rows.start + (there ? static_cast<std::size_t>(first + row) * rows.step : 0);
    for (int i = lane(); i < rows.size; i += kLanes) {
      tile[row * tile_step(rows.size) + i] = there ? device::widen(from[i]) : 0.0F;
    }
  }
}

/// Multiplies kRows rows, starting at `a`, with this lane's row of a tile.
template <int kRows>
__device__ void multiply_rows(float (&products)[kRows], const float* a, const float* tile,
                              int size) {
  const float* const b = tile + lane() * tile_step(size);
#pragma unroll
  for (int r = 0; r < kRows; ++r) products[r] = 0.0F;
  for (int i = 0; i < size; ++i) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      products[r] = __fmaf_rn(a[r * tile_step(size) + i], b[i], products[r]);
    }
  }
}

/// sums += W B. W is [kRows, kStep]; B is the rows of a tile.
template <int kRows, int kParts>
__device__ void add_product(float (&sums)[kRows][kParts], const float* weights, const float* tile,
                            int size) {
  for (int j = 0; j < kStep; ++j) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int column = lane() + part * kLanes;
      if (column >= size) break;
      const float value = tile[j * tile_step(size) + column];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        sums[r][part] = __fmaf_rn(weights[r * kStep + j], value, sums[r][part]);
      }
    }
  }
}

template <int kRows, int kParts, class T>
__device__ void write_rows(const float (&sums)[kRows][kParts], const float (&factors)[kRows],
                           const AttentionRows<T>& to, int first) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (first + r >= to.length) break;
    T* const row = to.start + static_cast<std::size_t>(first + r) * to.step;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int column = lane() + part * kLanes;
      if (column < to.size) device::narrow(sums[r][part] * factors[r], row[column]);
    }
  }
}

__device__ float greatest_of_warp(float value) {
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) {
    value = fmaxf(value, __shfl_xor_sync(device::kAllLanes, value, step));
  }
  return value;
}

/// State of one row while attend() loops over its keys.
struct RowState {
  float greatest = -std::numeric_limits<float>::infinity();  ///< largest score so far
  float sum = 0.0F;  ///< this lane's part of the sum of exp(score - greatest)
};

/// There is one block per tile of queries, head and sequence: only the first number of blocks may
/// be above 65,535, which tiles of long sequences are. `scale` applies to exponents of base 2.
template <int kParts, class T>
__global__ void __launch_bounds__(kThreads)
    attend(AttentionShape shape, float scale, SoftCap cap, const T* qkv, T* out, float* log_sums) {
  constexpr int kRows = kWarps * kForwardRows;
  const int size = static_cast<int>(shape.head_dim);
  const int length = static_cast<int>(shape.length);
  float* const queries = device::dynamic_shared<float>();
  float* const step = queries + kRows * tile_step(size);
  float* const weights = step + kStep * tile_step(size) + warp() * kForwardRows * kStep;
  const HeadPlace place = place_of(shape, blockIdx.z, blockIdx.y);
  const int first = static_cast<int>(blockIdx.x) * kRows;
  const int first_row = first + warp() * kForwardRows;
  const int end = std::min(first + kRows, length);
  const SequenceMask mask = mask_of(shape, blockIdx.z);
  float sums[kForwardRows][kParts] = {};
  RowState rows[kForwardRows];
  load_rows(queries, rows_in_qkv(shape, qkv + place.query), first, kRows);
  for (int key = mask.first_step(first, kStep); key < end; key += kStep) {
    load_rows(step, rows_in_qkv(shape, qkv + place.key), key, kStep);
    __syncthreads();
    float scores[kForwardRows];
    multiply_rows<kForwardRows>(scores, queries + warp() * kForwardRows * tile_step(size), step,
                                size);
    __syncthreads();
    load_rows(step, rows_in_qkv(shape, qkv + place.value), key, kStep);
#pragma unroll
    for (int r = 0; r < kForwardRows; ++r) {
      const int query = first_row + r;
      scores[r] = cap.score(scores[r]);
      if (key + lane() > query || key + lane() < mask.first_key(query))
        scores[r] = -std::numeric_limits<float>::infinity();
      const float greatest = fmaxf(rows[r].greatest, greatest_of_warp(scores[r]));
      // The row may not have seen any key yet.
      const float base = greatest == -std::numeric_limits<float>::infinity() ? 0.0F : greatest;
      const float correction = exp2f((rows[r].greatest - base) * scale);
      const float power = exp2f((scores[r] - base) * scale);
      rows[r].greatest = greatest;
      rows[r].sum = __fmaf_rn(rows[r].sum, correction, power);
      weights[r * kStep + lane()] = power;
#pragma unroll
      for (int part = 0; part < kParts; ++part) sums[r][part] *= correction;
    }
    __syncthreads();
    add_product<kForwardRows>(sums, weights, step, size);
    __syncthreads();
  }
  float factors[kForwardRows];
#pragma unroll
  for (int r = 0; r < kForwardRows; ++r) {
    const float sum = device::warp_sum(rows[r].sum);
    factors[r] = 1.0F / sum;
    if (lane() == 0 && first_row + r < length) {
      log_sums[place.row + static_cast<std::size_t>(first_row + r)] =
          __fmaf_rn(rows[r].greatest, scale / kLog2E, logf(sum));
    }
  }
  write_rows<kForwardRows>(sums, factors, rows_in_out(shape, out + place.out), first_row);
}

/// Rows that a block of differentiate() owns, and rows that it loops over: queries and dout on one
/// side, keys and values on the other.
template <class T>
struct Sides {
  AttentionRows<const T> queries;
  AttentionRows<const T> douts;
  AttentionRows<const T> keys;
  AttentionRows<const T> values;
  const QueryRow* rows;
};
template <class T>
__device__ Sides<T> sides_of(const AttentionShape& shape, std::size_t head, const T* qkv,
                             const T* dout, const QueryRow* rows) {
  const HeadPlace place = place_of(shape, blockIdx.z, head);
  return {rows_in_qkv(shape, qkv + place.query), rows_in_out(shape, dout + place.out),
          rows_in_qkv(shape, qkv + place.key), rows_in_qkv(shape, qkv + place.value),
          rows + (blockIdx.z * shape.heads + head) * padded_length(shape)};
}

/// Probability of a key and the gradient of its score.
struct Weight {
  float probability = 0.0F;
  float gradient = 0.0F;
};
__device__ Weight weight_of(float product, float dp, const QueryRow& row, float scale,
                            const SoftCap& cap) {
  const float score = cap.score(product);
  const float probability = exp2f(__fmaf_rn(score, scale, -row.log_sum));
  return {probability, probability * (dp - row.delta) * cap.slope(score)};
}

/// Gradients of keys and values (kOfKeys) or of queries. There is one block per tile of rows, head
/// and sequence. Heads that share keys are processed one after the other. `scale`: softmax_scale().
template <bool kOfKeys, int kParts, class T>
__global__ void __launch_bounds__(kThreads)
    differentiate(AttentionShape shape, float scale, SoftCap cap, const T* qkv,
                  const QueryRow* rows, const T* dout, T* dqkv) {
  constexpr int kRows = kWarps * kBackwardRows;
  const int size = static_cast<int>(shape.head_dim);
  const int length = static_cast<int>(shape.length);
  float* const own = device::dynamic_shared<float>();
  float* const own_second = own + kRows * tile_step(size);
  float* const step = own_second + kRows * tile_step(size);
  float* const gradients = step + kStep * tile_step(size) + warp() * 2 * kBackwardRows * kStep;
  float* const probabilities = gradients + kBackwardRows * kStep;
  const std::size_t heads = kOfKeys ? shape.heads / shape.kv_heads : 1;
  const int first = static_cast<int>(blockIdx.x) * kRows;
  const int mine = warp() * kBackwardRows;  // first row in the tile
  const SequenceMask mask = mask_of(shape, blockIdx.z);
  float sums[kBackwardRows][kParts] = {};
  float second_sums[kBackwardRows][kParts] = {};
  for (std::size_t head = blockIdx.y * heads; head < (blockIdx.y + 1) * heads; ++head) {
    const Sides<T> sides = sides_of(shape, head, qkv, dout, rows);
    load_rows(own, kOfKeys ? sides.keys : sides.queries, first, kRows);
    load_rows(own_second, kOfKeys ? sides.values : sides.douts, first, kRows);
    const int begin = kOfKeys ? first / kStep * kStep : mask.first_step(first, kStep);
    const int end = kOfKeys ? length : std::min(first + kRows, length);
    for (int at = begin; at < end; at += kStep) {
      if (kOfKeys && mask.first_key(at) >= first + kRows) break;  // no later query sees these keys
      load_rows(step, kOfKeys ? sides.douts : sides.values, at, kStep);
      __syncthreads();
      float dp[kBackwardRows];
      multiply_rows<kBackwardRows>(dp, own_second + mine * tile_step(size), step, size);
      __syncthreads();
      load_rows(step, kOfKeys ? sides.queries : sides.keys, at, kStep);
      __syncthreads();
      float scores[kBackwardRows];
      multiply_rows<kBackwardRows>(scores, own + mine * tile_step(size), step, size);
#pragma unroll
      for (int r = 0; r < kBackwardRows; ++r) {
        const int own_row = first + mine + r;
        const int query = kOfKeys ? at + lane() : own_row;
        const int key = kOfKeys ? own_row : at + lane();
        Weight weight;
        if (query < length && key <= query && key >= mask.first_key(query))
          weight = weight_of(scores[r], dp[r], sides.rows[query], scale * kLog2E, cap);
        gradients[r * kStep + lane()] = weight.gradient;
        probabilities[r * kStep + lane()] = weight.probability;
      }
      __syncwarp();
      add_product<kBackwardRows>(sums, gradients, step, size);
      __syncthreads();
      if constexpr (kOfKeys) {
        load_rows(step, sides.douts, at, kStep);
        __syncthreads();
        add_product<kBackwardRows>(second_sums, probabilities, step, size);
        __syncthreads();
      }
    }
  }
  const HeadPlace place = place_of(shape, blockIdx.z, blockIdx.y * heads);
  write_rows<kBackwardRows>(sums, {cap.scale, cap.scale},
                            rows_in_qkv(shape, dqkv + (kOfKeys ? place.key : place.query)),
                            first + mine);
  if (kOfKeys) {
    write_rows<kBackwardRows>(second_sums, {1.0F, 1.0F}, rows_in_qkv(shape, dqkv + place.value),
                              first + mine);
  }
}

/// Calls start(parts) with a std::integral_constant, the number of columns per lane.
template <class Start>
cudaError_t for_parts(const AttentionShape& shape, const Start& start) {
  if (shape.head_dim <= 256) return start(std::integral_constant<int, 8>{});
  static_assert(kWidestHead == 512);
  return start(std::integral_constant<int, 16>{});
}

template <bool kOfKeys, int kParts, class T>
cudaError_t start(cudaStream_t stream, const AttentionShape& shape, const T* qkv,
                  const QueryRow* rows, const T* dout, T* dqkv) {
  constexpr int kRows = kWarps * kBackwardRows;
  return device::launch({.stream = stream,
                         .blocks = {static_cast<unsigned>((shape.length + kRows - 1) / kRows),
                                    static_cast<unsigned>(kOfKeys ? shape.kv_heads : shape.heads),
                                    static_cast<unsigned>(shape.sequences)},
                         .threads = kThreads,
                         .shared_bytes = shared_bytes(shape, 2 * kRows + kStep, 2 * kRows * kStep)},
                        &differentiate<kOfKeys, kParts, T>, shape, softmax_scale(shape),
                        cap_of(shape), qkv, rows, dout, dqkv);
}

}  // namespace

template <class T>
cudaError_t plain_attention(cudaStream_t stream, const AttentionShape& shape, const T* qkv, T* out,
                            float* log_sums) {
  if (shape.log_sums() == 0) return cudaSuccess;
  if (!has_kernels(shape)) return cudaErrorInvalidValue;
  constexpr int kRows = kWarps * kForwardRows;
  return for_parts(shape, [&](auto parts) {
    return device::launch(
        {.stream = stream,
         .blocks = {static_cast<unsigned>((shape.length + kRows - 1) / kRows),
                    static_cast<unsigned>(shape.heads), static_cast<unsigned>(shape.sequences)},
         .threads = kThreads,
         .shared_bytes = shared_bytes(shape, kRows + kStep, kRows * kStep)},
        &attend<parts.value, T>, shape, softmax_scale(shape) * kLog2E, cap_of(shape), qkv, out,
        log_sums);
  });
}

template <class T>
cudaError_t plain_attention_backward(cudaStream_t stream, const AttentionShape& shape, const T* qkv,
                                     const T* out, const float* log_sums, const T* dout, T* dqkv,
                                     void* scratch) {
  if (shape.log_sums() == 0) return cudaSuccess;
  if (!has_kernels(shape)) return cudaErrorInvalidValue;
  auto* const rows = static_cast<QueryRow*>(scratch);
  const cudaError_t code = gather_query_rows(stream, shape, out, log_sums, dout, rows);
  if (code != cudaSuccess) return code;
  return for_parts(shape, [&](auto parts) {
    const cudaError_t keys = start<true, parts.value>(stream, shape, qkv, rows, dout, dqkv);
    if (keys != cudaSuccess) return keys;
    return start<false, parts.value>(stream, shape, qkv, rows, dout, dqkv);
  });
}

template <class T>
cudaError_t attention(cudaStream_t stream, const AttentionShape& shape, const T* qkv, T* out,
                      float* log_sums) {
  return plain_attention(stream, shape, qkv, out, log_sums);
}

template <class T>
cudaError_t attention_backward(cudaStream_t stream, const AttentionShape& shape, const T* qkv,
                               const T* out, const float* log_sums, const T* dout, T* dqkv,
                               void* scratch) {
  return plain_attention_backward(stream, shape, qkv, out, log_sums, dout, dqkv, scratch);
}

template cudaError_t attention(cudaStream_t, const AttentionShape&, const float*, float*, float*);
template cudaError_t attention(cudaStream_t, const AttentionShape&, const F16*, F16*, float*);
template cudaError_t attention_backward(cudaStream_t, const AttentionShape&, const float*,
                                        const float*, const float*, const float*, float*, void*);
template cudaError_t attention_backward(cudaStream_t, const AttentionShape&, const F16*, const F16*,
                                        const float*, const F16*, F16*, void*);
template cudaError_t plain_attention(cudaStream_t, const AttentionShape&, const float*, float*,
                                     float*);
template cudaError_t plain_attention(cudaStream_t, const AttentionShape&, const Bf16*, Bf16*,
                                     float*);
template cudaError_t plain_attention(cudaStream_t, const AttentionShape&, const F16*, F16*, float*);
template cudaError_t plain_attention_backward(cudaStream_t, const AttentionShape&, const float*,
                                              const float*, const float*, const float*, float*,
                                              void*);
template cudaError_t plain_attention_backward(cudaStream_t, const AttentionShape&, const Bf16*,
                                              const Bf16*, const float*, const Bf16*, Bf16*, void*);
template cudaError_t plain_attention_backward(cudaStream_t, const AttentionShape&, const F16*,
                                              const F16*, const float*, const F16*, F16*, void*);

}  // namespace ballast::model::cuda
