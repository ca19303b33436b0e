#include <algorithm>
#include <limits>

#include "src/device/cuda/eight_values.h"
#include "src/model/cuda/rows/row_threads.h"
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

/// Tokens of one row have the same sum row.
__global__ void note_sum_rows(Ids ids, std::size_t count, RowsWithSums rows) {
  const std::size_t at = std::size_t{blockIdx.x} * kTokenThreads + threadIdx.x;
  if (at >= count || !is_in(ids.tokens[at], rows.first, rows.count)) return;
  const std::size_t row = static_cast<std::size_t>(ids.tokens[at]) - rows.first;
  atomicMin(rows.sum_rows + row, static_cast<std::uint32_t>(ids.sum_rows[at]));
}

}  // namespace

cudaError_t find_sum_rows(cudaStream_t stream, const Ids& ids, std::size_t count,
                          const RowsWithSums& rows) {
  if (count == 0) return cudaSuccess;
  return device::launch(
      {.stream = stream, .blocks = blocks_for(count, kTokenThreads), .threads = kTokenThreads},
      &note_sum_rows, ids, count, rows);
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
                                .places = ids.sum_rows,
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

namespace {

/// Marks the end of a list of links.
constexpr std::uint32_t kEndOfLinks = std::numeric_limits<std::uint32_t>::max();
/// Positions per block that searches for the next position with the same token. Each warp takes a
/// few of them, one after the other.
constexpr unsigned kPositions = 32;
/// Tokens that are searched at a time.
constexpr unsigned kTokenTile = 2048;
/// Rows that a thread prefetches.
constexpr unsigned kRowsAhead = 8;

/// Every position starts as the end of its list and as the first of its token.
__global__ void start_links(std::uint32_t* next, std::uint32_t* is_first, std::size_t count) {
  const std::size_t at = std::size_t{blockIdx.x} * kTokenThreads + threadIdx.x;
  if (at >= count) return;
  next[at] = kEndOfLinks;
  is_first[at] = 1;
}

/// Returns the index of the first element of tile[begin..end) that equals `token`, or `end`. A warp
/// compares four elements per lane at a time. The tile is aligned and padded to whole comparisons;
/// matches after the end are ignored.
__device__ unsigned find_in(const std::int32_t* tile, unsigned begin, unsigned end,
                            std::int32_t token) {
  constexpr unsigned kEach = kOneAccess<std::int32_t>;
  constexpr unsigned kLook = kEach * device::kWarp;
  static_assert(kTokenTile % kLook == 0);
  const unsigned own = threadIdx.x % device::kWarp * kEach;
  for (unsigned at = begin / kLook * kLook; at < end; at += kLook) {
    const uint4 word = device::load_16(tile + at + own);
    const std::uint32_t some[kEach] = {word.x, word.y, word.z, word.w};
    unsigned mine = end;
    for (unsigned i = kEach; i-- > 0;) {
      const unsigned place = at + own + i;
      if (some[i] == static_cast<std::uint32_t>(token) && place >= begin) mine = place;
    }
    const unsigned found = __ballot_sync(device::kAllLanes, mine < end);
    if (found != 0) return __shfl_sync(device::kAllLanes, mine, __ffs(static_cast<int>(found)) - 1);
  }
  return end;
}

/// Links each position to the next one with the same token, which is then not the token's first.
/// The distances to all successors of a token add up to at most `count`, so the work is `count`
/// times the number of different tokens in [from, from + size). Other tokens are not linked.
__global__ void link(const std::int32_t* tokens, std::size_t from, std::size_t size,
                     std::uint32_t* next, std::uint32_t* is_first, unsigned count) {
  constexpr unsigned kWarps = kTokenThreads / device::kWarp;
  constexpr unsigned kEach = kPositions / kWarps;
  alignas(16) __shared__ std::int32_t tile[kTokenTile];
  const unsigned lane = threadIdx.x % device::kWarp;
  const unsigned first = blockIdx.x * kPositions + threadIdx.x / device::kWarp * kEach;
  unsigned searching = 0;  // one bit per position of the warp
  for (unsigned i = 0; i < kEach; ++i) {
    const bool wanted = first + i < count && is_in(tokens[first + i], from, size);
    searching |= (wanted ? 1U : 0U) << i;
  }
  for (unsigned start = blockIdx.x * kPositions; start < count; start += kTokenTile) {
    const unsigned here = count - start < kTokenTile ? count - start : kTokenTile;
    for (unsigned i = threadIdx.x; i < here; i += kTokenThreads) tile[i] = tokens[start + i];
    __syncthreads();
    for (unsigned i = 0; i < kEach; ++i) {
      if ((searching >> i & 1U) == 0) continue;
      const unsigned begin = first + i + 1 > start ? first + i + 1 - start : 0;
      const unsigned found = find_in(tile, begin, here, tokens[first + i]);
      if (found >= here) continue;
      searching &= ~(1U << i);
      if (lane == 0) {
        next[first + i] = start + found;
        is_first[start + found] = 0;
      }
    }
    // All threads are done with the tile. If no thread is still searching, no further tile is
    // needed.
    if (__syncthreads_or(static_cast<int>(searching)) == 0) return;
  }
}

/// The block of an id's first position follows the links from there.
template <class T>
__global__ void add_to_rows(Scatter<T> sums, const std::uint32_t* next,
                            const std::uint32_t* is_first) {
  const std::size_t column = own_column<T>();
  std::uint32_t at = blockIdx.x;
  const std::int32_t id = sums.ids[at];
  if (is_first[at] == 0 || !is_in(id, sums.first, sums.size) || sums.places[at] < 0) return;
  if (column >= sums.width) return;
  const auto row = static_cast<std::size_t>(sums.places[at]);
  float* const gradient = sums.table + row * sums.width + column;
  float sum[kOneAccess<T>];
  device::read(gradient, sum);
  while (at != kEndOfLinks) {
    Piece<T> rows[kRowsAhead];
    unsigned there = 0;
#pragma unroll
    for (unsigned i = 0; i < kRowsAhead; ++i) {
      if (at == kEndOfLinks) continue;
      rows[i] = device::read<kOneAccess<T>>(sums.dy + std::size_t{at} * sums.width + column);
      at = next[at];
      ++there;
    }
#pragma unroll
    for (unsigned i = 0; i < kRowsAhead; ++i) {
      if (i < there) add_piece<T>(sum, rows[i], sums.scale);
    }
  }
  device::write(sum, gradient);
}

}  // namespace

template <class T>
cudaError_t scatter(cudaStream_t stream, const Scatter<T>& sums, std::size_t count,
                    std::uint32_t* links) {
  std::uint32_t* const next = links;
  std::uint32_t* const is_first = links + count;
  cudaError_t code = device::launch(
      {.stream = stream, .blocks = blocks_for(count, kTokenThreads), .threads = kTokenThreads},
      &start_links, next, is_first, count);
  if (code != cudaSuccess) return code;
  code = device::launch(
      {.stream = stream, .blocks = blocks_for(count, kPositions), .threads = kTokenThreads}, &link,
      sums.ids, sums.first, sums.size, next, is_first, static_cast<unsigned>(count));
  if (code != cudaSuccess) return code;
  return device::launch(by_rows<T>(stream, count, sums.width), &add_to_rows<T>, sums, next,
                        is_first);
}

template cudaError_t scatter(cudaStream_t, const Scatter<float>&, std::size_t, std::uint32_t*);
template cudaError_t scatter(cudaStream_t, const Scatter<Bf16>&, std::size_t, std::uint32_t*);
template cudaError_t scatter(cudaStream_t, const Scatter<F16>&, std::size_t, std::uint32_t*);

}  // namespace ballast::model::cuda
