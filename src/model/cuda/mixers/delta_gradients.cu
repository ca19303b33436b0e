#include <cmath>

#include "src/model/cuda/mixers/delta_chunks.h"

namespace ballast::model::cuda {
namespace {

using device::kWarp;
constexpr unsigned kRows = kDeltaChunkRows;

using Square = float[kRows][kRows + 1];

/// Gradients of a chunk in shared memory.
struct ChunkGradients {
  Square keys;     ///< gradients of decayed products of keys, then of the products
  Square queries;  ///< gradients of decayed products of queries with keys, then of the products
  float beta[kRows];
  float sums[kRows];        ///< gradients of Gates::sums
  float of_keys[kRows];     ///< unit keys times the gradients of what they read
  float of_queries[kRows];  ///< unit queries times the gradients of what they read
  float of_left[kRows];     ///< unit keys times the gradients of keys that leave the chunk
  float of_values[kRows];   ///< values times the gradients of what is written
  float of_state;           ///< state times its gradient
};

/// Sums over the 16 lanes that share a row of multiply_rows().
__device__ float sum_of_side(float value) {
  for (int step = 8; step > 0; step /= 2) {
    value += __shfl_xor_sync(device::kAllLanes, value, step);
  }
  return value;
}

/// A chunk with its matrices in memory.
template <class T>
struct WholeChunk {
  __device__ WholeChunk(const DeltaTurn& in_turn, const T* dout)
      : turn(in_turn),
        at(chunk_of(in_turn, blockIdx.x, blockIdx.y)),
        gates(turn.scratch.gates[at.unit]),
        keys{keys_of(turn, at), turn.shape.key_width, kRows},
        queries{keys.start + kRows * turn.shape.key_width, turn.shape.key_width, kRows},
        written(rows_of(turn.scratch.written)),
        dwritten(rows_of(turn.scratch.dwritten)),
        state(state_of(turn.scratch.states)),
        dstate(state_of(turn.scratch.dstates)),
        dresults{dout + at.row * turn.shape.values() + at.head * turn.shape.value_width,
                 turn.shape.values(), at.rows},
        drows(turn.scratch.drows + at.unit * turn.rows_of_keys()) {}

  [[nodiscard]] __device__ DeltaRows<float> rows_of(const float* all) const {
    const std::size_t width = turn.shape.value_width;
    return {all + at.unit * kRows * width, width, kRows};
  }
  [[nodiscard]] __device__ DeltaRows<float> state_of(const float* all) const {
    return {all + at.unit * turn.shape.state(), turn.shape.value_width,
            static_cast<unsigned>(turn.shape.key_width)};
  }

  const DeltaTurn& turn;
  DeltaChunk at;
  const DeltaScratch::Gates& gates;
  DeltaRows<float> keys;
  DeltaRows<float> queries;
  DeltaRows<float> written;
  DeltaRows<float> dwritten;
  DeltaRows<float> state;
  DeltaRows<float> dstate;
  DeltaRows<T> dresults;
  float* drows;  ///< [2, kRows, key_width]
};

/// Differentiates the decayed products: gradients of beta and of the logarithms of decays, then of
/// the products. The first kRows threads sum rows, the next ones columns.
template <class T>
__device__ void differentiate_scores(const WholeChunk<T>& c, ChunkGradients& g) {
  const std::size_t width = c.turn.shape.value_width;
  multiply_rows(c.dwritten, c.written, width, [&](unsigned, unsigned i, unsigned j, float product) {
    g.keys[i][j] = j < i ? -product : 0.0F;
  });
  multiply_rows(c.dresults, c.written, width, [&](unsigned, unsigned i, unsigned j, float product) {
    g.queries[i][j] = product;
  });
  __syncthreads();
  const float* const keys = square_of(c.turn.scratch.keys, c.at);
  const float* const queries = square_of(c.turn.scratch.queries, c.at);
  const unsigned mine = threadIdx.x % kRows;
  const bool by_row = threadIdx.x < kRows;
  float beta = 0.0F;
  float sum = 0.0F;
  if (threadIdx.x < 2 * kRows) {
    for (unsigned n = 0; n < kRows; ++n) {
      const unsigned i = by_row ? mine : n;
      const unsigned j = by_row ? n : mine;
      const float of_key = g.keys[i][j] * keys[i * kRows + j];
      sum += of_key * c.gates.beta[i] + g.queries[i][j] * queries[i * kRows + j];
      beta += of_key;
    }
  }
  if (by_row) {
    g.beta[mine] = beta;
    g.sums[mine] = sum;
  }
  __syncthreads();
  if (!by_row && threadIdx.x < 2 * kRows) g.sums[mine] -= sum;
  for (unsigned at = threadIdx.x; at < kRows * kRows; at += kDeltaThreads) {
    const unsigned i = at / kRows;
    const unsigned j = at % kRows;
    const float decay = c.gates.decay(i, j);
    g.keys[i][j] *= decay * c.gates.beta[i];
    g.queries[i][j] *= decay;
  }
  __syncthreads();
}

/// Writes the contributions of the states to the gradients of unit rows, and the products of both.
template <class T>
__device__ void differentiate_reads(const WholeChunk<T>& c, ChunkGradients& g) {
  const DeltaShape& s = c.turn.shape;
  const std::size_t width = s.key_width;
  float of_left[4] = {};
  float of_keys[4] = {};
  float of_queries[4] = {};
  multiply_rows(c.written, c.dstate, s.value_width,
                [&](unsigned r, unsigned i, unsigned j, float product) {
                  of_left[r] = __fmaf_rn(product, c.keys.start[i * width + j], of_left[r]);
                  c.drows[i * width + j] = c.gates.left[i] * product;
                });
  multiply_rows(c.dwritten, c.state, s.value_width,
                [&](unsigned r, unsigned i, unsigned j, float product) {
                  of_keys[r] = __fmaf_rn(-product, c.keys.start[i * width + j], of_keys[r]);
                  c.drows[i * width + j] -= c.gates.beta[i] * c.gates.carried[i] * product;
                });
  multiply_rows(c.dresults, c.state, s.value_width,
                [&](unsigned r, unsigned i, unsigned j, float product) {
                  of_queries[r] = __fmaf_rn(product, c.queries.start[i * width + j], of_queries[r]);
                  c.drows[(kRows + i) * width + j] = c.gates.carried[i] * product;
                });
  for (unsigned r = 0; r < 4; ++r) {
    const unsigned i = threadIdx.x / 16 + 16 * r;
    const float left = sum_of_side(of_left[r]);
    const float keys = sum_of_side(of_keys[r]);
    const float queries = sum_of_side(of_queries[r]);
    if (threadIdx.x % 16 != 0) continue;
    g.of_left[i] = c.gates.left[i] * left;
    g.of_keys[i] = keys;
    g.of_queries[i] = queries;
  }
}

/// Adds the contributions of the products of unit rows to their gradients. Threads have the same
/// elements as in multiply_rows().
template <class T>
__device__ void differentiate_products(const WholeChunk<T>& c, const ChunkGradients& g) {
  const std::size_t width = c.turn.shape.key_width;
  for (unsigned r = 0; r < 4; ++r) {
    const unsigned i = threadIdx.x / 16 + 16 * r;
    for (std::size_t column = threadIdx.x % 16; column < width; column += 16) {
      float key = 0.0F;
      float query = 0.0F;
      for (unsigned j = 0; j < kRows; ++j) {
        const float of_key = c.keys.start[j * width + column];
        key = __fmaf_rn(g.keys[i][j] + g.keys[j][i], of_key, key);
        key = __fmaf_rn(g.queries[j][i], c.queries.start[j * width + column], key);
        query = __fmaf_rn(g.queries[i][j], of_key, query);
      }
      c.drows[i * width + column] += key;
      c.drows[(kRows + i) * width + column] += query;
    }
  }
}

/// Computes the products of values and states with their gradients. `partial` [kWarps]: scratch.
template <class T>
__device__ void multiply_with_gradients(const WholeChunk<T>& c, const T* channels,
                                        ChunkGradients& g, float* partial) {
  const DeltaShape& s = c.turn.shape;
  const unsigned lane = threadIdx.x % kWarp;
  for (unsigned i = threadIdx.x / kWarp; i < kRows; i += kDeltaWarps) {
    float sum = 0.0F;
    const T* const values =
        channels + (c.at.row + i) * s.channels() + 2 * s.keys() + c.at.head * s.value_width;
    for (std::size_t n = lane; i < c.at.rows && n < s.value_width; n += kWarp) {
      sum = __fmaf_rn(device::widen(values[n]), c.dwritten.start[i * s.value_width + n], sum);
    }
    sum = device::warp_sum(sum);
    if (lane == 0) g.of_values[i] = sum;
  }
  float of_state[1] = {};
  for (std::size_t n = threadIdx.x; n < s.state(); n += kDeltaThreads) {
    of_state[0] = __fmaf_rn(c.state.start[n], c.dstate.start[n], of_state[0]);
  }
  device::block_sum(of_state, partial);
  if (threadIdx.x == 0) g.of_state = of_state[0];
}

/// Completes the gradients of beta and of Gates::sums, and turns the latter into those of g. One
/// thread.
__device__ void complete(const DeltaScratch::Gates& gates, unsigned rows, ChunkGradients& g) {
  float& last = g.sums[rows - 1];
  float of_last = g.of_state * gates.carry;
  for (unsigned i = 0; i < kRows; ++i) {
    const float carried = gates.carried[i];
    g.beta[i] += carried * g.of_keys[i] + g.of_values[i];
    g.sums[i] += carried * (gates.beta[i] * g.of_keys[i] + g.of_queries[i]) - g.of_left[i];
    of_last += g.of_left[i];
  }
  last += of_last;
  for (unsigned i = rows - 1; i-- > 0;) {
    const bool ends = gates.first[i + 1] == static_cast<std::int32_t>(i + 1);
    if (!ends) g.sums[i] += g.sums[i + 1];
  }
}

/// Writes the gradients of `b` and `a`, and the chunk's part of those of decay and shift.
template <class T>
__device__ void write_gate_gradients(const WholeChunk<T>& c, const DeltaInputs<T>& in,
                                     const ChunkGradients& g, const DeltaGradients<T>& to,
                                     double (&parts)[2][kRows]) {
  const DeltaShape& s = c.turn.shape;
  const unsigned i = threadIdx.x;
  if (i < c.at.rows) {
    const std::size_t row = c.at.row + i;
    const double rate = exp(static_cast<double>(device::widen(in.decay[c.at.head])));
    const double x = static_cast<double>(
                         device::widen(in.betas[row * in.betas_step + s.value_heads + c.at.head])) +
                     static_cast<double>(device::widen(in.shift[c.at.head]));
    const auto dg = static_cast<double>(g.sums[i]);
    const double da = -dg * rate / (1.0 + exp(-x));
    const float beta = c.gates.beta[i];
    T* const d = to.betas + row * to.step + c.at.head;
    device::narrow(g.beta[i] * beta * (1.0F - beta / s.beta_factor), d[0]);
    device::narrow(static_cast<float>(da), d[s.value_heads]);
    parts[0][i] = -dg * rate * (x > 20.0 ? x : log1p(exp(x)));
    parts[1][i] = da;
  }
  __syncthreads();
  if (i >= 2) return;
  double sum = 0.0;
  for (unsigned row = 0; row < c.at.rows; ++row) sum += parts[i][row];
  const std::size_t chunks = s.sequences * s.chunks();
  const std::size_t chunk = (c.turn.first_sequence + blockIdx.z) * s.chunks() + c.at.number;
  c.turn.scratch.sums[(i * chunks + chunk) * s.value_heads + c.at.head] = sum;
}

/// Blocks are x: chunks, y: heads of values. Shared memory: ChunkGradients.
template <class T>
__global__ void __launch_bounds__(kDeltaThreads)
    differentiate_chunk(DeltaTurn turn, DeltaInputs<T> in, const T* dout, DeltaGradients<T> to) {
  __shared__ ChunkGradients g;
  __shared__ float partial[kWarp];
  __shared__ double parts[2][kRows];
  const WholeChunk<T> c(turn, dout);
  differentiate_scores(c, g);
  differentiate_reads(c, g);
  differentiate_products(c, g);
  multiply_with_gradients(c, in.channels, g, partial);
  __syncthreads();
  if (threadIdx.x == 0) complete(c.gates, c.at.rows, g);
  __syncthreads();
  write_gate_gradients(c, in, g, to, parts);
}

constexpr unsigned kSumThreads = 64;

/// A thread has one head of values. `sums`: [2, chunks, heads].
__global__ void __launch_bounds__(kSumThreads)
    sum_decay_gradients(const double* sums, std::size_t chunks, std::size_t heads, float* decay,
                        float* shift) {
  const std::size_t head = std::size_t{blockIdx.x} * kSumThreads + threadIdx.x;
  float* const to = blockIdx.y == 0 ? decay : shift;
  if (head >= heads || to == nullptr) return;
  double sum = 0.0;
  for (std::size_t i = 0; i < chunks; ++i) sum += sums[(blockIdx.y * chunks + i) * heads + head];
  to[head] += static_cast<float>(sum);
}

}  // namespace

template <class T>
cudaError_t differentiate_chunks(cudaStream_t stream, const DeltaTurn& turn, std::size_t sequences,
                                 const DeltaInputs<T>& in, const T* dout,
                                 const DeltaGradients<T>& to) {
  return device::launch(
      {.stream = stream,
       .blocks = {static_cast<unsigned>(turn.chunks), static_cast<unsigned>(turn.shape.value_heads),
                  static_cast<unsigned>(sequences)},
       .threads = kDeltaThreads},
      &differentiate_chunk<T>, turn, in, dout, to);
}

cudaError_t add_decay_gradients(cudaStream_t stream, const DeltaShape& shape, const double* sums,
                                float* decay, float* shift) {
  const std::size_t heads = shape.value_heads;
  return device::launch(
      {.stream = stream,
       .blocks = {static_cast<unsigned>((heads + kSumThreads - 1) / kSumThreads), 2},
       .threads = kSumThreads},
      &sum_decay_gradients, sums, shape.sequences * shape.chunks(), heads, decay, shift);
}

#define BALLAST_GRADIENTS(T)                                                             \
  template cudaError_t differentiate_chunks(cudaStream_t, const DeltaTurn&, std::size_t, \
                                            const DeltaInputs<T>&, const T*,             \
                                            const DeltaGradients<T>&);
BALLAST_GRADIENTS(float)
BALLAST_GRADIENTS(Bf16)
BALLAST_GRADIENTS(F16)
#undef BALLAST_GRADIENTS

}  // namespace ballast::model::cuda
