#include <algorithm>

#include "src/model/cuda/mixers/delta_chunks.h"

namespace ballast::model::cuda {
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
