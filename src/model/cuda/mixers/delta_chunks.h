#pragma once

#include <cstddef>
#include <cstdint>

#include "src/device/cuda/eight_values.h"
#include "src/device/cuda/kernel_language.h"
#include "src/model/compute/formulas.h"
#include "src/model/cuda/mixers/mixers.h"

namespace ballast::model::cuda {

// Code shared by the kernels of the recurrence. Only sources of kernels include it.

inline constexpr unsigned kDeltaChunkRows = DeltaShape::kChunk;
inline constexpr unsigned kDeltaThreads = 256;
inline constexpr unsigned kDeltaWarps = kDeltaThreads / device::kWarp;
/// Rows of a result that a warp or thread computes at once.
inline constexpr unsigned kRowsAtOnce = kDeltaChunkRows / kDeltaWarps;

/// Gates and decays of the rows of a chunk. Rows after the end of the sequence change nothing.
struct DeltaScratch::Gates {
  float beta[kDeltaChunkRows];
  float sums[kDeltaChunkRows];  ///< sums of g since the start of the chunk or document
  /// Decay of the chunk's first state before the row; 0: another document.
  float carried[kDeltaChunkRows];
  float left[kDeltaChunkRows];  ///< decay from the row to the end of the chunk; 0: another document
  std::int32_t first[kDeltaChunkRows];  ///< first row of the chunk in the document of the row
  float carry;  ///< decay of the state over the chunk; 0: another document begins in it

  /// Returns exp(sums[i] - sums[j]) if both rows are in one document and j <= i, otherwise 0.
  [[nodiscard]] __device__ float decay(unsigned i, unsigned j) const {
    if (j > i || static_cast<std::int32_t>(j) < first[i]) return 0.0F;
    return expf(sums[i] - sums[j]);
  }
};

/// The chunks that kernels process together: of some sequences, between two kept states. Blocks are
/// x: chunks or columns, y: heads, z: sequences.
struct DeltaTurn {
  DeltaShape shape;
  DeltaScratch scratch;
  std::size_t first_sequence;
  std::size_t first_chunk;
  std::size_t chunks;

  [[nodiscard]] constexpr std::size_t shared_heads() const {
    return shape.value_heads / shape.key_heads;
  }
  [[nodiscard]] constexpr std::size_t rows_of_keys() const {
    return 2 * kDeltaChunkRows * shape.key_width;
  }
};

/// One chunk of one head of values.
struct DeltaChunk {
  std::size_t number;  ///< in the sequence
  std::size_t row;     ///< its first row in the micro-batch
  unsigned rows;       ///< before the end of the sequence
  std::size_t head;
  std::size_t key_head;
  std::size_t head_of_all;  ///< number among all heads in the scratch memory
  std::size_t unit;
  std::size_t unit_of_keys;
};
__device__ inline DeltaChunk chunk_of(const DeltaTurn& turn, std::size_t chunk, std::size_t head) {
  const DeltaShape& s = turn.shape;
  const std::size_t sequence = blockIdx.z;
  DeltaChunk at{};
  at.number = turn.first_chunk + chunk;
  const std::size_t begin = at.number * kDeltaChunkRows;
  at.row = (turn.first_sequence + sequence) * s.length + begin;
  at.rows = static_cast<unsigned>(s.length - begin < kDeltaChunkRows ? s.length - begin
                                                                     : kDeltaChunkRows);
  at.head = head;
  at.key_head = head / turn.shared_heads();
  at.head_of_all = sequence * s.value_heads + head;
  at.unit = at.head_of_all * DeltaShape::kChunksOfState + chunk;
  at.unit_of_keys = (sequence * s.key_heads + at.key_head) * DeltaShape::kChunksOfState + chunk;
  return at;
}
/// Returns the unit keys of a chunk; queries follow.
__device__ inline float* keys_of(const DeltaTurn& turn, const DeltaChunk& chunk) {
  return turn.scratch.rows + chunk.unit_of_keys * turn.rows_of_keys();
}
__device__ inline float* square_of(float* squares, const DeltaChunk& chunk) {
  return squares + chunk.unit * kDeltaChunkRows * kDeltaChunkRows;
}

/// Position of row `i` of a chunk in its document.
template <class T>
__device__ std::size_t position_of(const DeltaInputs<T>& in, const DeltaChunk& chunk, unsigned i) {
  return in.positions == nullptr ? chunk.number * kDeltaChunkRows + i
                                 : static_cast<std::size_t>(in.positions[chunk.row + i]);
}

/// 1 / sqrt(sum of squares + 1e-6) of a row, by one warp.
template <class T>
__device__ float inverse_length(const T* x, std::size_t width) {
  float squares = 0.0F;
  for (std::size_t i = threadIdx.x % device::kWarp; i < width; i += device::kWarp) {
    const float value = device::widen(x[i]);
    squares = __fmaf_rn(value, value, squares);
  }
  return formulas::inverse_deviation(device::warp_sum(squares), 1e-6F);
}

/// Rows in memory; those from `count` on are zeros.
template <class T>
struct DeltaRows {
  const T* start;
  std::size_t step;
  unsigned count;
};
/// Calls take(r, i, j, sum over n of a[i][n] * b[j][n]) for all rows i of a chunk and the rows j of
/// b, by one block. A thread has the rows i = threadIdx.x / 16 + 16 r. `width`: a multiple of 8.
template <class A, class B, class Take>
__device__ void multiply_rows(const DeltaRows<A>& a, const DeltaRows<B>& b, std::size_t width,
                              const Take& take) {
  constexpr unsigned kEach = 4;
  constexpr unsigned kSide = kDeltaChunkRows / kEach;
  const unsigned x = threadIdx.x % kSide;
  const unsigned y = threadIdx.x / kSide;
  for (unsigned first = 0; first < b.count; first += kDeltaChunkRows) {
    float sums[kEach][kEach] = {};
    for (std::size_t n = 0; n < width; n += device::kEight) {
      float left[kEach][device::kEight] = {};
      float right[kEach][device::kEight] = {};
      for (unsigned r = 0; r < kEach; ++r) {
        const unsigned i = y + kSide * r;
        const unsigned j = first + x + kSide * r;
        if (i < a.count) device::read(a.start + i * a.step + n, left[r]);
        if (j < b.count) device::read(b.start + j * b.step + n, right[r]);
      }
      for (unsigned k = 0; k < device::kEight; ++k) {
        for (unsigned r = 0; r < kEach; ++r) {
          for (unsigned c = 0; c < kEach; ++c) {
            sums[r][c] = __fmaf_rn(left[r][k], right[c][k], sums[r][c]);
          }
        }
      }
    }
    for (unsigned r = 0; r < kEach; ++r) {
      for (unsigned c = 0; c < kEach; ++c) {
        const unsigned j = first + x + kSide * c;
        if (j < b.count) take(r, y + kSide * r, j, sums[r][c]);
      }
    }
  }
}

// Products with the columns of one block: a lane has one column, a warp kRowsAtOnce rows of the
// result. `b(n)` returns row n of the right matrix in the lane's column.

/// sums[r] += sum of a[r][n] * b(n) for n < end, a multiple of 4.
template <class B>
__device__ void add_left_product(float (&sums)[kRowsAtOnce], const float* a, std::size_t a_step,
                                 std::size_t end, const B& b) {
  constexpr unsigned kFour = 4;
  for (std::size_t n = 0; n < end; n += kFour) {
    float right[kFour];
    for (unsigned k = 0; k < kFour; ++k) right[k] = b(n + k);
    for (unsigned r = 0; r < kRowsAtOnce; ++r) {
      float left[kFour];
      device::widen(device::read<kFour>(a + r * a_step + n), left);
      for (unsigned k = 0; k < kFour; ++k) sums[r] = __fmaf_rn(left[k], right[k], sums[r]);
    }
  }
}
/// sums[r] += sum of a[n][r] * b(n) for begin <= n < end.
template <class B>
__device__ void add_flipped_product(float (&sums)[kRowsAtOnce], const float* a, std::size_t a_step,
                                    std::size_t begin, std::size_t end, const B& b) {
  static_assert(kRowsAtOnce == device::kEight);
  for (std::size_t n = begin; n < end; ++n) {
    float left[kRowsAtOnce];
    device::read(a + n * a_step, left);
    const float right = b(n);
    for (unsigned r = 0; r < kRowsAtOnce; ++r) sums[r] = __fmaf_rn(left[r], right, sums[r]);
  }
}

// Launches of the kernels of one turn. `sequences`: number of sequences of the turn.

/// Computes unit rows, gates, and the matrices of the chunks. `backward`: also DeltaScratch::keys.
template <class T>
cudaError_t prepare_chunks(cudaStream_t stream, const DeltaTurn& turn, std::size_t sequences,
                           const DeltaInputs<T>& in, bool backward);
/// Computes the results and the kept states that follow, or without `out`, DeltaScratch::states and
/// written.
template <class T>
struct DeltaResults {
  const float* states;  ///< the kept ones
  T* out = nullptr;
  float* next = nullptr;  ///< `states`, to be written
};
template <class T>
cudaError_t advance_states(cudaStream_t stream, const DeltaTurn& turn, std::size_t sequences,
                           const DeltaInputs<T>& in, const DeltaResults<T>& results);
/// Computes the gradients of states and of what chunks write, and writes those of the values.
template <class T>
cudaError_t differentiate_states(cudaStream_t stream, const DeltaTurn& turn, std::size_t sequences,
                                 const T* dout, const DeltaGradients<T>& to);
/// Computes the gradients of unit rows, and writes those of `b` and `a`.
template <class T>
cudaError_t differentiate_chunks(cudaStream_t stream, const DeltaTurn& turn, std::size_t sequences,
                                 const DeltaInputs<T>& in, const T* dout,
                                 const DeltaGradients<T>& to);
/// Writes the gradients of queries and keys.
template <class T>
cudaError_t differentiate_unit_rows(cudaStream_t stream, const DeltaTurn& turn,
                                    std::size_t sequences, const DeltaInputs<T>& in,
                                    const DeltaGradients<T>& to);
/// Adds the sums over all chunks to the gradients of decay and shift.
cudaError_t add_decay_gradients(cudaStream_t stream, const DeltaShape& shape, const double* sums,
                                float* decay, float* shift);

}  // namespace ballast::model::cuda
