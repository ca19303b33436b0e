#include "src/model/cuda/mixers/delta_chunks.h"

namespace ballast::model::cuda {
namespace {

using device::kWarp;
constexpr unsigned kRows = kDeltaChunkRows;

/// The block's columns of the values of one head. Blocks are x: columns, y: heads of values.
struct Columns {
  unsigned lane = threadIdx.x % kWarp;
  unsigned first_row = threadIdx.x / kWarp * kRowsAtOnce;  ///< rows of the warp in a chunk
  std::size_t column = std::size_t{blockIdx.x} * kWarp + threadIdx.x % kWarp;
  bool live = false;  ///< the lane has a column

  __device__ explicit Columns(const DeltaShape& shape) : live(column < shape.value_width) {}
};

/// Matrices in shared memory, with one column per lane.
using Tile = float (*)[kWarp];

/// Calls body(row) for the rows of the state that the thread has, in groups of kRowsAtOnce.
template <class Body>
__device__ void for_state_rows(const DeltaShape& shape, const Columns& at, const Body& body) {
  for (std::size_t row = at.first_row; row < shape.key_width; row += kRows) body(row);
}
/// Reads the columns of a state, or zeros if it is null.
__device__ void read_state(const DeltaShape& shape, const Columns& at, const float* from,
                           Tile state) {
  for_state_rows(shape, at, [&](std::size_t row) {
    for (unsigned r = 0; r < kRowsAtOnce; ++r) {
      const bool there = from != nullptr && at.live;
      state[row + r][at.lane] = there ? from[(row + r) * shape.value_width + at.column] : 0.0F;
    }
  });
}
__device__ void write_state(const DeltaShape& shape, const Columns& at, Tile state, float* to) {
  if (!at.live) return;
  for_state_rows(shape, at, [&](std::size_t row) {
    for (unsigned r = 0; r < kRowsAtOnce; ++r) {
      to[(row + r) * shape.value_width + at.column] = state[row + r][at.lane];
    }
  });
}
/// Writes the warp's rows of a matrix [kRows, value_width].
__device__ void write_rows_of(const DeltaShape& shape, const Columns& at,
                              const float (&values)[kRowsAtOnce], float* to) {
  for (unsigned r = 0; r < kRowsAtOnce && at.live; ++r) {
    to[(at.first_row + r) * shape.value_width + at.column] = values[r];
  }
}

/// Leaves the updates that a chunk writes in `written`, and rows of queries times the state in
/// `results`.
template <class T>
__device__ void solve(const DeltaTurn& turn, const DeltaInputs<T>& in, const DeltaChunk& chunk,
                      const Columns& at, Tile state, Tile written, float (&results)[kRowsAtOnce],
                      bool reads) {
  const DeltaShape& s = turn.shape;
  const DeltaScratch::Gates& gates = turn.scratch.gates[chunk.unit];
  const float* const keys = keys_of(turn, chunk) + at.first_row * s.key_width;
  const auto of_state = [&](std::size_t n) { return state[n][at.lane]; };
  float read[kRowsAtOnce] = {};
  add_left_product(read, keys, s.key_width, s.key_width, of_state);
  if (reads) {
    add_left_product(results, keys + kRows * s.key_width, s.key_width, s.key_width, of_state);
  }
  for (unsigned r = 0; r < kRowsAtOnce; ++r) {
    const unsigned row = at.first_row + r;
    float value = 0.0F;
    if (row < chunk.rows && at.live) {
      value = device::widen(in.channels[(chunk.row + row) * s.channels() + 2 * s.keys() +
                                        chunk.head * s.value_width + at.column]);
    }
    written[row][at.lane] = gates.beta[row] * (value - gates.carried[row] * read[r]);
  }
  __syncthreads();
  float solved[kRowsAtOnce] = {};
  add_left_product(solved, square_of(turn.scratch.inverse, chunk) + at.first_row * kRows, kRows,
                   at.first_row + kRowsAtOnce, [&](std::size_t n) { return written[n][at.lane]; });
  __syncthreads();
  for (unsigned r = 0; r < kRowsAtOnce; ++r) written[at.first_row + r][at.lane] = solved[r];
  __syncthreads();
}

/// Replaces the state before a solved chunk by that after it.
__device__ void advance(const DeltaTurn& turn, const DeltaChunk& chunk, const Columns& at,
                        Tile state, Tile written) {
  const DeltaShape& s = turn.shape;
  const DeltaScratch::Gates& gates = turn.scratch.gates[chunk.unit];
  for_state_rows(s, at, [&](std::size_t row) {
    float sums[kRowsAtOnce];
    for (unsigned r = 0; r < kRowsAtOnce; ++r) {
      sums[r] = gates.carry * state[row + r][at.lane];
    }
    add_flipped_product(sums, keys_of(turn, chunk) + row, s.key_width, 0, kRows,
                        [&](std::size_t n) { return gates.left[n] * written[n][at.lane]; });
    for (unsigned r = 0; r < kRowsAtOnce; ++r) state[row + r][at.lane] = sums[r];
  });
}

/// Place of the state of the first chunk among those that the forward pass keeps.
__device__ std::size_t kept_state_at(const DeltaTurn& turn, const DeltaChunk& chunk) {
  const std::size_t head = turn.first_sequence * turn.shape.value_heads + chunk.head_of_all;
  return (head * turn.shape.kept_states() + chunk.number / DeltaShape::kChunksOfState) *
         turn.shape.state();
}

/// Shared memory: the state [key_width, columns], then `written` [kRows, columns].
template <class T>
__global__ void __launch_bounds__(kDeltaThreads)
    advance_columns(DeltaTurn turn, DeltaInputs<T> in, DeltaResults<T> to) {
  const DeltaShape& s = turn.shape;
  const Columns at(s);
  const auto state = reinterpret_cast<Tile>(device::dynamic_shared<float>());
  const Tile written = state + s.key_width;
  const DeltaChunk first = chunk_of(turn, 0, blockIdx.y);
  const std::size_t kept = kept_state_at(turn, first);
  T* const out = to.out;
  read_state(s, at, turn.first_chunk == 0 ? nullptr : to.states + kept, state);
  if (turn.first_chunk == 0 && out != nullptr) write_state(s, at, state, to.next + kept);
  for (std::size_t i = 0; i < turn.chunks; ++i) {
    const DeltaChunk chunk = chunk_of(turn, i, blockIdx.y);
    __syncthreads();  // the state is complete
    if (out == nullptr) write_state(s, at, state, turn.scratch.states + chunk.unit * s.state());
    float results[kRowsAtOnce] = {};
    solve(turn, in, chunk, at, state, written, results, out != nullptr);
    if (out == nullptr) {
      float values[kRowsAtOnce];
      for (unsigned r = 0; r < kRowsAtOnce; ++r) values[r] = written[at.first_row + r][at.lane];
      write_rows_of(s, at, values, turn.scratch.written + chunk.unit * kRows * s.value_width);
    } else {
      const DeltaScratch::Gates& gates = turn.scratch.gates[chunk.unit];
      for (unsigned r = 0; r < kRowsAtOnce; ++r) results[r] *= gates.carried[at.first_row + r];
      add_left_product(results, square_of(turn.scratch.queries, chunk) + at.first_row * kRows,
                       kRows, at.first_row + kRowsAtOnce,
                       [&](std::size_t n) { return written[n][at.lane]; });
      for (unsigned r = 0; r < kRowsAtOnce && at.live; ++r) {
        const unsigned row = at.first_row + r;
        if (row >= chunk.rows) break;
        device::narrow(
            results[r],
            out[(chunk.row + row) * s.values() + chunk.head * s.value_width + at.column]);
      }
    }
    advance(turn, chunk, at, state, written);
  }
  const bool continues = turn.first_chunk + turn.chunks < s.chunks();
  if (out != nullptr && continues) write_state(s, at, state, to.next + kept + s.state());
}

/// Leaves the gradient of what a chunk writes in `dwritten`, given that of the state after it and
/// of its results.
template <class T>
__device__ void differentiate_writes(const DeltaTurn& turn, const DeltaChunk& chunk,
                                     const Columns& at, Tile dstate, Tile dresults, Tile solved,
                                     const DeltaGradients<T>& to, float (&dwritten)[kRowsAtOnce]) {
  const DeltaShape& s = turn.shape;
  const DeltaScratch::Gates& gates = turn.scratch.gates[chunk.unit];
  float sums[kRowsAtOnce] = {};
  add_left_product(sums, keys_of(turn, chunk) + at.first_row * s.key_width, s.key_width,
                   s.key_width, [&](std::size_t n) { return dstate[n][at.lane]; });
  for (unsigned r = 0; r < kRowsAtOnce; ++r) sums[r] *= gates.left[at.first_row + r];
  add_flipped_product(sums, square_of(turn.scratch.queries, chunk) + at.first_row, kRows,
                      at.first_row, kRows, [&](std::size_t n) { return dresults[n][at.lane]; });
  for (unsigned r = 0; r < kRowsAtOnce; ++r) solved[at.first_row + r][at.lane] = sums[r];
  __syncthreads();
  add_flipped_product(dwritten, square_of(turn.scratch.inverse, chunk) + at.first_row, kRows,
                      at.first_row, kRows, [&](std::size_t n) { return solved[n][at.lane]; });
  write_rows_of(s, at, dwritten, turn.scratch.dwritten + chunk.unit * kRows * s.value_width);
  for (unsigned r = 0; r < kRowsAtOnce && at.live; ++r) {
    const unsigned row = at.first_row + r;
    if (row >= chunk.rows) break;
    device::narrow(gates.beta[row] * dwritten[r],
                   to.channels[(chunk.row + row) * to.step + 2 * s.keys() +
                               chunk.head * s.value_width + at.column]);
  }
}

/// Processes the chunks of a turn, the last one first. Shared memory: the state's gradient, then
/// two matrices [kRows, columns].
template <class T>
__global__ void __launch_bounds__(kDeltaThreads)
    differentiate_columns(DeltaTurn turn, const T* dout, DeltaGradients<T> to) {
  const DeltaShape& s = turn.shape;
  const Columns at(s);
  const auto dstate = reinterpret_cast<Tile>(device::dynamic_shared<float>());
  const Tile dresults = dstate + s.key_width;
  const Tile dreads = dresults + kRows;
  const DeltaChunk first = chunk_of(turn, 0, blockIdx.y);
  float* const carried = turn.scratch.dstate + first.head_of_all * s.state();
  const bool ends = turn.first_chunk + turn.chunks == s.chunks();
  read_state(s, at, ends ? nullptr : carried, dstate);
  for (std::size_t i = turn.chunks; i-- > 0;) {
    const DeltaChunk chunk = chunk_of(turn, i, blockIdx.y);
    const DeltaScratch::Gates& gates = turn.scratch.gates[chunk.unit];
    write_state(s, at, dstate, turn.scratch.dstates + chunk.unit * s.state());
    for (unsigned r = 0; r < kRowsAtOnce; ++r) {
      const unsigned row = at.first_row + r;
      float value = 0.0F;
      if (row < chunk.rows && at.live) {
        value = device::widen(
            dout[(chunk.row + row) * s.values() + chunk.head * s.value_width + at.column]);
      }
      dresults[row][at.lane] = value;
    }
    __syncthreads();  // results and state are complete
    float dwritten[kRowsAtOnce] = {};
    differentiate_writes(turn, chunk, at, dstate, dresults, dreads, to, dwritten);
    __syncthreads();
    for (unsigned r = 0; r < kRowsAtOnce; ++r) {
      const unsigned row = at.first_row + r;
      dreads[row][at.lane] = -dwritten[r] * gates.beta[row] * gates.carried[row];
      dresults[row][at.lane] *= gates.carried[row];
    }
    __syncthreads();
    for_state_rows(s, at, [&](std::size_t row) {
      float sums[kRowsAtOnce];
      for (unsigned r = 0; r < kRowsAtOnce; ++r) sums[r] = gates.carry * dstate[row + r][at.lane];
      const float* const keys = keys_of(turn, chunk) + row;
      add_flipped_product(sums, keys, s.key_width, 0, kRows,
                          [&](std::size_t n) { return dreads[n][at.lane]; });
      add_flipped_product(sums, keys + kRows * s.key_width, s.key_width, 0, kRows,
                          [&](std::size_t n) { return dresults[n][at.lane]; });
      for (unsigned r = 0; r < kRowsAtOnce; ++r) dstate[row + r][at.lane] = sums[r];
    });
    __syncthreads();
  }
  write_state(s, at, dstate, carried);
}

/// `tiles`: matrices [kRows, columns] in shared memory.
device::LaunchConfig by_columns(cudaStream_t stream, const DeltaTurn& turn, std::size_t sequences,
                                std::size_t tiles) {
  const DeltaShape& s = turn.shape;
  return {.stream = stream,
          .blocks = {static_cast<unsigned>((s.value_width + kWarp - 1) / kWarp),
                     static_cast<unsigned>(s.value_heads), static_cast<unsigned>(sequences)},
          .threads = kDeltaThreads,
          .shared_bytes = (s.key_width + tiles * kRows) * kWarp * sizeof(float)};
}

}  // namespace

template <class T>
cudaError_t advance_states(cudaStream_t stream, const DeltaTurn& turn, std::size_t sequences,
                           const DeltaInputs<T>& in, const DeltaResults<T>& results) {
  return device::launch(by_columns(stream, turn, sequences, 1), &advance_columns<T>, turn, in,
                        results);
}

template <class T>
cudaError_t differentiate_states(cudaStream_t stream, const DeltaTurn& turn, std::size_t sequences,
                                 const T* dout, const DeltaGradients<T>& to) {
  return device::launch(by_columns(stream, turn, sequences, 2), &differentiate_columns<T>, turn,
                        dout, to);
}

#define BALLAST_STATES(T)                                                                          \
  template cudaError_t advance_states(cudaStream_t, const DeltaTurn&, std::size_t,                 \
                                      const DeltaInputs<T>&, const DeltaResults<T>&);              \
  template cudaError_t differentiate_states(cudaStream_t, const DeltaTurn&, std::size_t, const T*, \
                                            const DeltaGradients<T>&);
BALLAST_STATES(float)
BALLAST_STATES(Bf16)
BALLAST_STATES(F16)
#undef BALLAST_STATES

}  // namespace ballast::model::cuda
