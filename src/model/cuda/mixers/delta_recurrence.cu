#include <algorithm>
#include <cmath>

#include "src/model/compute/formulas.h"
#include "src/model/cuda/mixers/delta_chunks.h"

namespace ballast::model::cuda {

namespace {

using device::kWarp;
constexpr unsigned kRows = kDeltaChunkRows;

__device__ double softplus(double x) {
  return x > 20.0 ? x : log1p(exp(x));
}

/// Returns the factor of unit queries.
__device__ float query_scale(const DeltaShape& shape) {
  return static_cast<float>(1.0 / sqrt(static_cast<double>(shape.key_width)));
}

/// Scales keys and queries to unit length. Blocks are x: chunks, y: heads of keys.
template <class T>
__global__ void __launch_bounds__(kDeltaThreads)
    write_unit_rows(DeltaTurn turn, const T* channels) {
  const DeltaShape& s = turn.shape;
  const DeltaChunk chunk = chunk_of(turn, blockIdx.x, blockIdx.y * turn.shared_heads());
  float* const rows = keys_of(turn, chunk);
  const std::size_t width = s.key_width;
  for (unsigned r = threadIdx.x / kWarp; r < 2 * kRows; r += kDeltaWarps) {
    const unsigned i = r % kRows;
    const bool there = i < chunk.rows;
    const T* const x = channels + (chunk.row + i) * s.channels() + (r < kRows ? s.keys() : 0) +
                       chunk.key_head * width;
    const float scale = r < kRows ? 1.0F : query_scale(s);
    const float factor = there ? inverse_length(x, width) * scale : 0.0F;
    for (std::size_t c = threadIdx.x % kWarp; c < width; c += kWarp) {
      rows[r * width + c] = there ? device::widen(x[c]) * factor : 0.0F;
    }
  }
}

/// Computes the gates of a chunk by the first kRows threads. `steps` [kRows]: scratch.
template <class T>
__device__ void load_gates(DeltaScratch::Gates& gates, double* steps, const DeltaTurn& turn,
                           const DeltaInputs<T>& in, const DeltaChunk& chunk) {
  const unsigned i = threadIdx.x;
  const unsigned last = chunk.rows - 1;
  const bool there = i < chunk.rows;
  const std::size_t position = there ? position_of(in, chunk, i) : 0;
  const bool continues = position > i;  // the document began before the chunk
  if (there) {
    const double rate = exp(static_cast<double>(device::widen(in.decay[chunk.head])));
    const T* const b = in.betas + (chunk.row + i) * in.betas_step + chunk.head;
    const double a = static_cast<double>(device::widen(b[turn.shape.value_heads])) +
                     static_cast<double>(device::widen(in.shift[chunk.head]));
    gates.beta[i] = turn.shape.beta_factor * formulas::sigmoid(device::widen(b[0]));
    gates.first[i] = continues ? 0 : static_cast<std::int32_t>(i - position);
    steps[i] = -rate * softplus(a);
  }
  __syncthreads();
  if (i == 0) {
    float sum = 0.0F;
    for (unsigned row = 0; row < kRows; ++row) {
      if (row < chunk.rows) {
        const bool starts = row == 0 || gates.first[row] == static_cast<std::int32_t>(row);
        sum = static_cast<float>((starts ? 0.0 : static_cast<double>(sum)) + steps[row]);
      }
      gates.sums[row] = sum;
    }
    gates.carry = position_of(in, chunk, last) > last ? expf(gates.sums[last]) : 0.0F;
  }
  __syncthreads();
  if (i >= kRows) return;
  const bool same = there && gates.first[i] == gates.first[last] &&
                    continues == (position_of(in, chunk, last) > last);
  gates.carried[i] = continues ? expf(gates.sums[i]) : 0.0F;
  gates.left[i] = same ? expf(gates.sums[last] - gates.sums[i]) : 0.0F;
  if (there) return;
  gates.beta[i] = 0.0F;
  gates.first[i] = static_cast<std::int32_t>(i);
}

using Square = float[kRows][kRows + 1];

/// Replaces each column of `inverse` by that of the inverse of 1 + the strictly lower `system`.
__device__ void invert(const Square& system, Square& inverse) {
  const unsigned column = threadIdx.x;
  if (column >= kRows) return;
  for (unsigned i = 0; i < kRows; ++i) {
    float sum = i == column ? 1.0F : 0.0F;
    for (unsigned j = column; j < i; ++j) {
      sum = __fmaf_rn(-system[i][j], inverse[j][column], sum);
    }
    inverse[i][column] = sum;
  }
}

/// Blocks are x: chunks, y: heads of values.
template <class T>
__global__ void __launch_bounds__(kDeltaThreads)
    write_matrices(DeltaTurn turn, DeltaInputs<T> in, bool backward) {
  __shared__ DeltaScratch::Gates gates;
  __shared__ double steps[kRows];
  __shared__ Square system;
  __shared__ Square inverse;
  const std::size_t width = turn.shape.key_width;
  const DeltaChunk chunk = chunk_of(turn, blockIdx.x, blockIdx.y);
  load_gates(gates, steps, turn, in, chunk);
  __syncthreads();
  const DeltaRows<float> keys = {keys_of(turn, chunk), width, kRows};
  const DeltaRows<float> queries = {keys.start + kRows * width, width, kRows};
  multiply_rows(keys, keys, width, [&](unsigned, unsigned i, unsigned j, float product) {
    const float score = i == j ? 0.0F : product * gates.decay(i, j);
    if (backward) square_of(turn.scratch.keys, chunk)[i * kRows + j] = score;
    system[i][j] = score * gates.beta[i];
  });
  multiply_rows(queries, keys, width, [&](unsigned, unsigned i, unsigned j, float product) {
    square_of(turn.scratch.queries, chunk)[i * kRows + j] = product * gates.decay(i, j);
  });
  __syncthreads();
  invert(system, inverse);
  __syncthreads();
  float* const to = square_of(turn.scratch.inverse, chunk);
  for (unsigned at = threadIdx.x; at < kRows * kRows; at += kDeltaThreads) {
    to[at] = inverse[at / kRows][at % kRows];
  }
  if (threadIdx.x == 0) turn.scratch.gates[chunk.unit] = gates;
}

/// Sums the gradients of unit rows over the heads of values, in order, and differentiates the
/// scaling. Blocks are x: chunks, y: heads of keys. A warp has one row.
template <class T>
__global__ void __launch_bounds__(kDeltaThreads)
    write_row_gradients(DeltaTurn turn, const T* channels, DeltaGradients<T> to) {
  const DeltaShape& s = turn.shape;
  const std::size_t width = s.key_width;
  const DeltaChunk chunk = chunk_of(turn, blockIdx.x, blockIdx.y * turn.shared_heads());
  const float* const drows = turn.scratch.drows + chunk.unit * turn.rows_of_keys();
  const std::size_t next_head = DeltaShape::kChunksOfState * turn.rows_of_keys();
  for (unsigned r = threadIdx.x / kWarp; r < 2 * kRows; r += kDeltaWarps) {
    const unsigned i = r % kRows;
    if (i >= chunk.rows) continue;
    const std::size_t column = (r < kRows ? s.keys() : 0) + chunk.key_head * width;
    const T* const x = channels + (chunk.row + i) * s.channels() + column;
    const float inverse = inverse_length(x, width);
    const auto gradient = [&](std::size_t c) {
      float sum = 0.0F;
      for (std::size_t head = 0; head < turn.shared_heads(); ++head) {
        sum += drows[head * next_head + r * width + c];
      }
      return sum;
    };
    float along = 0.0F;
    for (std::size_t c = threadIdx.x % kWarp; c < width; c += kWarp) {
      along = __fmaf_rn(device::widen(x[c]) * inverse, gradient(c), along);
    }
    along = device::warp_sum(along);
    const float scale = inverse * (r < kRows ? 1.0F : query_scale(s));
    for (std::size_t c = threadIdx.x % kWarp; c < width; c += kWarp) {
      device::narrow((gradient(c) - device::widen(x[c]) * inverse * along) * scale,
                     to.channels[(chunk.row + i) * to.step + column + c]);
    }
  }
}

device::LaunchConfig by_chunks(cudaStream_t stream, const DeltaTurn& turn, std::size_t heads,
                               std::size_t sequences) {
  return {.stream = stream,
          .blocks = {static_cast<unsigned>(turn.chunks), static_cast<unsigned>(heads),
                     static_cast<unsigned>(sequences)},
          .threads = kDeltaThreads};
}

}  // namespace

template <class T>
cudaError_t prepare_chunks(cudaStream_t stream, const DeltaTurn& turn, std::size_t sequences,
                           const DeltaInputs<T>& in, bool backward) {
  const cudaError_t code = device::launch(by_chunks(stream, turn, turn.shape.key_heads, sequences),
                                          &write_unit_rows<T>, turn, in.channels);
  if (code != cudaSuccess) return code;
  return device::launch(by_chunks(stream, turn, turn.shape.value_heads, sequences),
                        &write_matrices<T>, turn, in, backward);
}

template <class T>
cudaError_t differentiate_unit_rows(cudaStream_t stream, const DeltaTurn& turn,
                                    std::size_t sequences, const DeltaInputs<T>& in,
                                    const DeltaGradients<T>& to) {
  return device::launch(by_chunks(stream, turn, turn.shape.key_heads, sequences),
                        &write_row_gradients<T>, turn, in.channels, to);
}

#define BALLAST_CHUNKS(T)                                                                   \
  template cudaError_t prepare_chunks(cudaStream_t, const DeltaTurn&, std::size_t,          \
                                      const DeltaInputs<T>&, bool);                         \
  template cudaError_t differentiate_unit_rows(cudaStream_t, const DeltaTurn&, std::size_t, \
                                               const DeltaInputs<T>&, const DeltaGradients<T>&);
BALLAST_CHUNKS(float)
BALLAST_CHUNKS(Bf16)
BALLAST_CHUNKS(F16)
#undef BALLAST_CHUNKS

namespace {

constexpr std::size_t kChunks = DeltaShape::kChunksOfState;
/// Scratch memory of the sequences that are processed at once, if these are more than one.
constexpr std::size_t kScratchBytes = std::size_t{512} << 20U;

std::size_t bytes_of(const DeltaShape& shape, std::size_t sequences) {
  Bump counting;
  static_cast<void>(DeltaScratch::take(counting, shape, sequences));
  return counting.used();
}

/// Returns the number of sequences that kernels process at once.
std::size_t sequences_at_once(const DeltaShape& shape) {
  std::size_t sequences = shape.sequences;
  while (sequences > 1 && bytes_of(shape, sequences) > kScratchBytes) {
    sequences = (sequences + 1) / 2;
  }
  return sequences;
}

/// Calls work(turn, sequences) for all chunks, the first or the last ones of a sequence first.
template <class Work>
cudaError_t for_turns(const DeltaShape& shape, std::byte* scratch, bool backward,
                      const Work& work) {
  const std::size_t together = sequences_at_once(shape);
  Bump bump(scratch);
  DeltaTurn turn{};
  turn.shape = shape;
  turn.scratch = DeltaScratch::take(bump, shape, together);
  for (std::size_t first = 0; first < shape.sequences; first += together) {
    turn.first_sequence = first;
    for (std::size_t i = 0; i < shape.kept_states(); ++i) {
      const std::size_t number = backward ? shape.kept_states() - 1 - i : i;
      turn.first_chunk = number * kChunks;
      turn.chunks = std::min(kChunks, shape.chunks() - turn.first_chunk);
      const cudaError_t code = work(turn, std::min(together, shape.sequences - first));
      if (code != cudaSuccess) return code;
    }
  }
  return cudaSuccess;
}

}  // namespace

DeltaScratch DeltaScratch::take(Bump& bump, const DeltaShape& shape, std::size_t sequences) {
  const std::size_t heads = sequences * shape.value_heads;
  const std::size_t units = heads * kChunks;
  const std::size_t rows = 2 * kDeltaChunkRows * shape.key_width;
  const std::size_t values = kDeltaChunkRows * shape.value_width;
  constexpr std::size_t kSquare = std::size_t{kDeltaChunkRows} * kDeltaChunkRows;
  DeltaScratch s;
  s.rows = bump.take<float>(sequences * shape.key_heads * kChunks * rows);
  s.gates = bump.take<Gates>(units);
  s.inverse = bump.take<float>(units * kSquare);
  s.queries = bump.take<float>(units * kSquare);
  s.keys = bump.take<float>(units * kSquare);
  s.states = bump.take<float>(units * shape.state());
  s.written = bump.take<float>(units * values);
  s.dstate = bump.take<float>(heads * shape.state());
  s.dstates = bump.take<float>(units * shape.state());
  s.dwritten = bump.take<float>(units * values);
  s.drows = bump.take<float>(units * rows);
  s.sums = bump.take<double>(2 * shape.sequences * shape.chunks() * shape.value_heads);
  return s;
}

std::size_t delta_scratch_bytes(const DeltaShape& shape) {
  return shape.key_heads == 0 ? 0 : bytes_of(shape, sequences_at_once(shape));
}

template <class T>
cudaError_t recur(cudaStream_t stream, const DeltaShape& shape, const DeltaInputs<T>& in, T* out,
                  float* states, std::byte* scratch) {
  return for_turns(shape, scratch, false, [&](const DeltaTurn& turn, std::size_t sequences) {
    const cudaError_t code = prepare_chunks(stream, turn, sequences, in, false);
    if (code != cudaSuccess) return code;
    return advance_states<T>(stream, turn, sequences, in, {states, out, states});
  });
}

template <class T>
cudaError_t recur_backward(cudaStream_t stream, const DeltaShape& shape, const DeltaInputs<T>& in,
                           const float* states, const T* dout, const DeltaGradients<T>& to,
                           std::byte* scratch) {
  const double* sums = nullptr;
  const auto differentiate = [&](const DeltaTurn& turn, std::size_t sequences) {
    sums = turn.scratch.sums;
    cudaError_t code = prepare_chunks(stream, turn, sequences, in, true);
    if (code != cudaSuccess) return code;
    code = advance_states<T>(stream, turn, sequences, in, {states});
    if (code != cudaSuccess) return code;
    code = differentiate_states(stream, turn, sequences, dout, to);
    if (code != cudaSuccess) return code;
    code = differentiate_chunks(stream, turn, sequences, in, dout, to);
    if (code != cudaSuccess) return code;
    return differentiate_unit_rows(stream, turn, sequences, in, to);
  };
  const cudaError_t code = for_turns(shape, scratch, true, differentiate);
  if (code != cudaSuccess || sums == nullptr) return code;
  return add_decay_gradients(stream, shape, sums, to.decay, to.shift);
}

#define BALLAST_RECURRENCES(T)                                                                   \
  template cudaError_t recur(cudaStream_t, const DeltaShape&, const DeltaInputs<T>&, T*, float*, \
                             std::byte*);                                                        \
  template cudaError_t recur_backward(cudaStream_t, const DeltaShape&, const DeltaInputs<T>&,    \
                                      const float*, const T*, const DeltaGradients<T>&,          \
                                      std::byte*);
BALLAST_RECURRENCES(float)
BALLAST_RECURRENCES(Bf16)
BALLAST_RECURRENCES(F16)
#undef BALLAST_RECURRENCES

}  // namespace ballast::model::cuda
