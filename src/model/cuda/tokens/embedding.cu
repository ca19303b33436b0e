#include <algorithm>

#include "src/device/cuda/eight.h"
#include "src/model/cuda/rows/row_pieces.h"
#include "src/model/cuda/tokens/scatter.h"
#include "src/model/cuda/tokens/tokens.h"

namespace ballast::model::cuda {
namespace {

__global__ void find_bad_token(const std::int32_t* tokens, std::size_t count, std::int32_t least,
                               std::size_t vocabulary, std::uint32_t* first_bad) {
  const std::size_t at = std::size_t{blockIdx.x} * kTokenThreads + threadIdx.x;
  if (at >= count) return;
  const bool ignored = tokens[at] < 0 && tokens[at] >= least;
  if (!ignored && !is_in(tokens[at], 0, vocabulary)) {
    atomicMin(first_bad, static_cast<std::uint32_t>(at));
  }
}

template <class T>
__global__ void look_up(Embedding<const T> tables, Ids ids, EmbeddingExtents extents, T* out) {
  const std::size_t column = own_column<T>();
  if (column >= extents.width) return;
  const std::size_t at = blockIdx.x;
  const std::int32_t token = ids.tokens[at];
  const bool here = is_in(token, tables.first, tables.size);
  if (!here && tables.tile && !tables.begins && tables.positions == nullptr) return;
  Piece<T> row;
  if (here) {
    const std::size_t place = static_cast<std::size_t>(token) - tables.first;
    row = device::read<kOneAccess<T>>(tables.tokens + place * extents.width + column);
  } else if (tables.begins) {
    float none[kOneAccess<T>];
    for (float& value : none) value = -0.0F;
    device::narrow(none, row);
  } else if (tables.tile) {
    row = device::read<kOneAccess<T>>(out + at * extents.width + column);
  }
  if (tables.positions != nullptr) {
    const std::size_t position = ids.positions == nullptr
                                     ? blockIdx.x % static_cast<unsigned>(extents.length)
                                     : static_cast<std::size_t>(ids.positions[at]);
    float sum[kOneAccess<T>];
    device::widen(row, sum);
    float other[kOneAccess<T>];
    device::read(tables.positions + position * extents.width + column, other);
    for (unsigned i = 0; i < kOneAccess<T>; ++i) sum[i] += other[i];
    device::narrow(sum, row);
  } else if (tables.scale != 1.0F) {
    float scaled[kOneAccess<T>];
    device::widen(row, scaled);
    for (float& value : scaled) value *= tables.scale;
    device::narrow(scaled, row);
  }
  device::write(row, out + at * extents.width + column);
}

/// The block of a position adds its rows of all sequences.
template <class T>
__global__ void add_to_positions(const T* dy, std::size_t count, std::size_t length,
                                 std::size_t width, float* positions) {
  const std::size_t column = own_column<T>();
  if (column >= width) return;
  float* const gradient = positions + blockIdx.x * width + column;
  float sum[kOneAccess<T>];
  device::read(gradient, sum);
#pragma unroll 4
  for (std::size_t at = blockIdx.x; at < count; at += length) {
    add_piece<T>(sum, device::read<kOneAccess<T>>(dy + at * width + column));
  }
  device::write(sum, gradient);
}

/// Tokens of one row have the same slot.
__global__ void note_slots(Ids ids, std::size_t count, RowsWithSlots rows) {
  const std::size_t at = std::size_t{blockIdx.x} * kTokenThreads + threadIdx.x;
  if (at >= count || !is_in(ids.tokens[at], rows.first, rows.count)) return;
  const std::size_t row = static_cast<std::size_t>(ids.tokens[at]) - rows.first;
  atomicMin(rows.slots + row, static_cast<std::uint32_t>(ids.slots[at]));
}

}  // namespace

cudaError_t find_slots(cudaStream_t stream, const Ids& ids, std::size_t count,
                       const RowsWithSlots& rows) {
  if (count == 0) return cudaSuccess;
  return device::launch(
      {.stream = stream, .blocks = blocks_for(count, kTokenThreads), .threads = kTokenThreads},
      &note_slots, ids, count, rows);
}

cudaError_t check_tokens(cudaStream_t stream, const std::int32_t* tokens, std::size_t count,
                         std::int32_t least, std::size_t vocabulary, std::uint32_t* first_bad) {
  if (count == 0) return cudaSuccess;
  return device::launch(
      {.stream = stream, .blocks = blocks_for(count, kTokenThreads), .threads = kTokenThreads},
      &find_bad_token, tokens, count, least, vocabulary, first_bad);
}

template <class T>
cudaError_t embed(cudaStream_t stream, const Embedding<const T>& tables, const Ids& ids,
                  const EmbeddingExtents& extents, T* out) {
  if (extents.count == 0 || extents.width == 0) return cudaSuccess;
  return device::launch(by_rows<T>(stream, extents.count, extents.width), &look_up<T>, tables, ids,
                        extents, out);
}

template <class T>
cudaError_t embed_backward(cudaStream_t stream, const Ids& ids, const T* dy,
                           const EmbeddingExtents& extents, const Embedding<float>& gradients,
                           std::uint32_t* links) {
  const auto [count, length, width] = extents;
  if (count == 0 || width == 0) return cudaSuccess;
  const Scatter<T> to_tokens = {.ids = ids.tokens,
                                .places = ids.slots,
                                .dy = dy,
                                .table = gradients.tokens,
                                .first = gradients.first,
                                .size = gradients.size,
                                .width = width,
                                .scale = gradients.scale};
  const cudaError_t code =
      gradients.tokens == nullptr ? cudaSuccess : scatter(stream, to_tokens, count, links);
  if (code != cudaSuccess || gradients.positions == nullptr) return code;
  if (ids.positions == nullptr) {
    return device::launch(by_rows<T>(stream, std::min(count, length), width), &add_to_positions<T>,
                          dy, count, length, width, gradients.positions);
  }
  const Scatter<T> to_positions = {.ids = ids.positions,
                                   .places = ids.positions,
                                   .dy = dy,
                                   .table = gradients.positions,
                                   .size = length,
                                   .width = width};
  return scatter(stream, to_positions, count, links);
}

template cudaError_t embed(cudaStream_t, const Embedding<const float>&, const Ids&,
                           const EmbeddingExtents&, float*);
template cudaError_t embed(cudaStream_t, const Embedding<const Bf16>&, const Ids&,
                           const EmbeddingExtents&, Bf16*);
template cudaError_t embed(cudaStream_t, const Embedding<const F16>&, const Ids&,
                           const EmbeddingExtents&, F16*);
template cudaError_t embed_backward(cudaStream_t, const Ids&, const float*, const EmbeddingExtents&,
                                    const Embedding<float>&, std::uint32_t*);
template cudaError_t embed_backward(cudaStream_t, const Ids&, const Bf16*, const EmbeddingExtents&,
                                    const Embedding<float>&, std::uint32_t*);
template cudaError_t embed_backward(cudaStream_t, const Ids&, const F16*, const EmbeddingExtents&,
                                    const Embedding<float>&, std::uint32_t*);

}  // namespace ballast::model::cuda
