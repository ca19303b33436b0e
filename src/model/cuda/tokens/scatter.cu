#include <limits>

#include "src/device/cuda/eight.h"
#include "src/model/cuda/tokens/scatter.h"

namespace ballast::model::cuda {
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
