#include "src/device/cuda/eight.h"
#include "src/device/cuda/kernel_language.h"
#include "src/model/cuda/experts/row_groups.h"
#include "src/model/cuda/rows/row_pieces.h"

// Sorts the choices of a router by expert, then by number. Each thread has one expert and visits
// the choices of a group of rows in order, so the order of threads does not matter.

namespace ballast::model::cuda {
namespace {

constexpr unsigned kChoiceThreads = 256;
/// Choices that a block keeps in shared memory at a time.
constexpr unsigned kChoiceTile = 2048;
constexpr unsigned kChoicesEach = kOneAccess<std::int32_t>;
/// Threads of the block that adds the groups.
constexpr unsigned kScanThreads = 1024;
/// Groups whose counts a thread prefetches.
constexpr unsigned kChoicesAhead = 16;

/// The choices of a router.
struct Choices {
  const std::int32_t* chosen;  ///< kNoExpert matches no thread's expert
  unsigned count;
  unsigned of_group;
  unsigned experts;
};

/// Returns the thread's expert, which may be beyond the last one.
__device__ unsigned own_expert() {
  return blockIdx.y * kChoiceThreads + threadIdx.x;
}

/// Calls visit(number) for each choice of the thread's expert in the block's group, in order.
template <class Visit>
__device__ void each_choice(const Choices& choices, const Visit& visit) {
  alignas(16) __shared__ std::int32_t tile[kChoiceTile];
  const std::uint32_t expert = own_expert();
  const unsigned begin = blockIdx.x * choices.of_group;
  const unsigned end =
      choices.count - begin < choices.of_group ? choices.count : begin + choices.of_group;
  for (unsigned start = begin; start < end; start += kChoiceTile) {
    const unsigned here = end - start < kChoiceTile ? end - start : kChoiceTile;
    __syncthreads();  // all threads are done with the previous tile
    for (unsigned i = threadIdx.x; i < kChoiceTile; i += kChoiceThreads) {
      tile[i] = i < here ? choices.chosen[start + i] : -1;
    }
    __syncthreads();
    for (unsigned i = 0; i < here; i += kChoicesEach) {
      const uint4 word = device::load_16(tile + i);
      const std::uint32_t some[kChoicesEach] = {word.x, word.y, word.z, word.w};
      for (unsigned j = 0; j < kChoicesEach; ++j) {
        if (some[j] == expert) visit(start + i + j);
      }
    }
  }
}

/// Writes counts [groups, experts], with one block per group (x) and kChoiceThreads experts (y).
/// Also writes -1 to all places; padding keeps it.
__global__ void __launch_bounds__(kChoiceThreads)
    count_choices(Choices choices, std::int32_t* counts, std::int32_t* places) {
  if (blockIdx.y == 0) {
    const unsigned begin = blockIdx.x * choices.of_group;
    for (unsigned i = threadIdx.x; i < choices.of_group && i < choices.count - begin;
         i += kChoiceThreads) {
      places[begin + i] = -1;
    }
  }
  std::int32_t count = 0;
  each_choice(choices, [&](unsigned) { ++count; });
  if (own_expert() < choices.experts) {
    counts[std::size_t{blockIdx.x} * choices.experts + own_expert()] = count;
  }
}

/// Inclusive prefix sum over the threads. `shared` [kWarp] receives the sums of the warps.
__device__ std::int32_t sum_so_far(std::int32_t value, std::int32_t* shared) {
  const unsigned lane = threadIdx.x % device::kWarp;
  const unsigned warp = threadIdx.x / device::kWarp;
  for (unsigned step = 1; step < device::kWarp; step *= 2) {
    const unsigned from = lane < step ? lane : lane - step;
    const std::int32_t before = __shfl_sync(device::kAllLanes, value, static_cast<int>(from));
    if (lane >= step) value += before;
  }
  if (lane == device::kWarp - 1) shared[warp] = value;
  __syncthreads();
  for (unsigned i = 0; i < warp; ++i) value += shared[i];
  return value;
}

/// Calls body(count) for each group's count of an expert, and replaces the count by the result.
template <class Body>
__device__ void replace_counts(std::int32_t* counts, std::size_t groups, std::size_t experts,
                               const Body& body) {
  for (std::size_t first = 0; first < groups; first += kChoicesAhead) {
    std::int32_t some[kChoicesAhead];
#pragma unroll
    for (unsigned i = 0; i < kChoicesAhead; ++i) {
      some[i] = first + i < groups ? counts[(first + i) * experts] : 0;
    }
#pragma unroll
    for (unsigned i = 0; i < kChoicesAhead; ++i) {
      if (first + i < groups) counts[(first + i) * experts] = body(some[i]);
    }
  }
}

/// Replaces the counts by the places where each group's choices of each expert begin. One block.
__global__ void __launch_bounds__(kScanThreads)
    find_starts(std::int32_t* counts, std::size_t groups, std::size_t experts,
                std::int32_t* starts) {
  __shared__ std::int32_t of_warps[device::kWarp];
  std::int32_t before = 0;  // choices of the experts in earlier rounds
  for (std::size_t first = 0; first < experts; first += kScanThreads) {
    const std::size_t expert = first + threadIdx.x;
    const bool mine = expert < experts;
    std::int32_t sum = 0;
    if (mine) {
#pragma unroll 16
      for (std::size_t group = 0; group < groups; ++group) sum += counts[group * experts + expert];
    }
    std::int32_t next = before + sum_so_far(sum, of_warps) - sum;
    for (unsigned i = 0; i < kScanThreads / device::kWarp; ++i) before += of_warps[i];
    __syncthreads();  // all threads have read the sums of the warps
    if (!mine) continue;
    if (starts != nullptr) starts[expert] = next;
    if (groups == 0) continue;
    replace_counts(counts + expert, groups, experts, [&](std::int32_t count) {
      const std::int32_t start = next;
      next += count;
      return start;
    });
  }
  if (starts != nullptr && threadIdx.x == 0) starts[experts] = before;
}

/// There is one block per group (x) and kChoiceThreads experts (y).
__global__ void __launch_bounds__(kChoiceThreads)
    place_choices(Choices choices, const std::int32_t* starts, std::int32_t* places) {
  std::int32_t* next = places;
  if (own_expert() < choices.experts) {
    next += starts[std::size_t{blockIdx.x} * choices.experts + own_expert()];
  }
  each_choice(choices, [&](unsigned number) { *next++ = static_cast<std::int32_t>(number); });
}

}  // namespace

cudaError_t sort_choices(cudaStream_t stream, const RouterShape& shape, const Routing& routing,
                         std::int32_t* starts, std::int32_t* counts) {
  const RowGroups groups(shape.rows);
  const Choices choices = {.chosen = routing.chosen,
                           .count = static_cast<unsigned>(shape.choices()),
                           .of_group = static_cast<unsigned>(groups.rows * shape.per_token),
                           .experts = static_cast<unsigned>(shape.experts)};
  const device::LaunchConfig by_group = {
      .stream = stream,
      .blocks = {static_cast<unsigned>(groups.count), blocks_for(shape.experts, kChoiceThreads)},
      .threads = kChoiceThreads};
  if (groups.count > 0) {
    const cudaError_t code =
        device::launch(by_group, &count_choices, choices, counts, routing.places);
    if (code != cudaSuccess) return code;
  }
  const cudaError_t code = device::launch({.stream = stream, .threads = kScanThreads}, &find_starts,
                                          counts, groups.count, shape.experts, starts);
  if (code != cudaSuccess || groups.count == 0) return code;
  return device::launch(by_group, &place_choices, choices, counts, routing.places);
}

}  // namespace ballast::model::cuda
