#include "src/device/cuda/eight_values.h"
#include "src/device/cuda/kernel_language.h"
#include "src/model/cuda/experts/experts.h"
#include "src/model/cuda/rows/row_threads.h"

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

namespace {

/// Groups of eight elements that a thread of dot() keeps in registers.
constexpr unsigned kHeld = 2;

/// Returns the place of choice `i`.
__device__ unsigned place_of(const ExpertRows& rows, unsigned i) {
  return rows.places == nullptr ? i : static_cast<unsigned>(rows.places[i]);
}

/// Returns the token of a choice.
__device__ std::size_t row_of(const ExpertRows& rows, unsigned place) {
  return place / static_cast<unsigned>(rows.per_token);
}

/// product / weight, or 0 for a weight of 0.
__device__ float quotient(float product, float weight) {
  return weight == 0.0F ? 0.0F : product / weight;
}

template <class T>
__device__ Piece<T> times(const Piece<T>& piece, float factor) {
  float values[kOneAccess<T>];
  device::widen(piece, values);
  for (float& value : values) value *= factor;
  Piece<T> product;
  device::narrow(values, product);
  return product;
}

/// There is one block per row of y and part of its columns.
template <class T>
__global__ void gather_to_experts(ExpertRows rows, const T* x, const float* weights, T* y,
                                  std::size_t width) {
  const std::size_t column = own_column<T>();
  if (column >= width) return;
  Piece<T> piece;
  if (blockIdx.x < rows.count) {
    const unsigned place = place_of(rows, blockIdx.x);
    piece = device::read<kOneAccess<T>>(x + row_of(rows, place) * width + column);
    if (weights != nullptr) piece = times<T>(piece, weights[place]);
  }
  device::write(piece, y + blockIdx.x * width + column);
}

/// There is one block per choice. kOfAll: `activated` is one row for all choices, and its part is
/// added.
template <bool kOfAll, class T>
__global__ void __launch_bounds__(kMaxThreads)
    dot(ExpertRows rows, const T* activated, const T* gradients, const float* weights,
        float* weight_gradients, std::size_t width) {
  Team<RowFit::beyond> team;
  const RowShare<RowFit::beyond, kHeld> share(team, static_cast<unsigned>(width));
  const unsigned place = place_of(rows, blockIdx.x);
  const T* const values = activated + (kOfAll ? 0 : blockIdx.x * width);
  const T* const row = gradients + blockIdx.x * width;
  Eight<T> kept[kHeld];
  share.keep(row, kept);
  float product[1] = {};
  share.each(row, kept, [&](unsigned at, const float(&gradient)[kEight]) {
    float value[kEight];
    device::read(values + at, value);
    for (unsigned i = 0; i < kEight; ++i) product[0] += gradient[i] * value[i];
  });
  team.sum(product);
  if (team.rank() != 0) return;
  const float gradient = weights == nullptr ? product[0] : quotient(product[0], weights[place]);
  weight_gradients[place] = kOfAll ? weight_gradients[place] + gradient : gradient;
}

__global__ void put(ExpertRows rows, const float* values, const float* weights, float* to) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= rows.count) return;
  const unsigned place = place_of(rows, i);
  to[place] = quotient(values[i], weights[place]);
}

/// There is one block per row and part of its columns.
template <class T>
__global__ void add_bias_to_rows(const T* bias, float* y, std::size_t width) {
  const std::size_t column = own_column<float>();
  if (column >= width) return;
  float* const to = y + blockIdx.x * width + column;
  float values[kOneAccess<float>];
  device::read(to, values);
  for (unsigned i = 0; i < kOneAccess<float>; ++i) values[i] += device::widen(bias[column + i]);
  device::write(values, to);
}

/// There is one block per choice and part of its columns.
__global__ void add_rows_to_sums(ExpertRows rows, const float* y, const float* weights, float* sums,
                                 std::size_t width) {
  const std::size_t column = own_column<float>();
  if (column >= width) return;
  const unsigned place = place_of(rows, blockIdx.x);
  const float weight = weights == nullptr ? 1.0F : weights[place];
  float* const to = sums + row_of(rows, place) * width + column;
  float sum[kOneAccess<float>];
  float values[kOneAccess<float>];
  device::read(to, sum);
  device::read(y + blockIdx.x * width + column, values);
  for (unsigned i = 0; i < kOneAccess<float>; ++i) sum[i] += values[i] * weight;
  device::write(sum, to);
}

device::LaunchConfig by_choices(cudaStream_t stream, const ExpertRows& rows, std::size_t width) {
  return {.stream = stream,
          .blocks = static_cast<unsigned>(rows.count),
          .threads = threads_of_row(width, kHeld)};
}

}  // namespace

template <class T>
cudaError_t gather_rows(cudaStream_t stream, const ExpertRows& rows, const T* x,
                        const float* weights, T* y, std::size_t padded, std::size_t width) {
  if (padded == 0 || width == 0) return cudaSuccess;
  return device::launch(by_rows<T>(stream, padded, width), &gather_to_experts<T>, rows, x, weights,
                        y, width);
}

template <class T>
cudaError_t dot_rows(cudaStream_t stream, const ExpertRows& rows, const T* activated,
                     const T* gradients, const float* weights, float* weight_gradients,
                     std::size_t width) {
  if (rows.count == 0 || width == 0) return cudaSuccess;
  return device::launch(by_choices(stream, rows, width), &dot<false, T>, rows, activated, gradients,
                        weights, weight_gradients, width);
}

template <class T>
cudaError_t dot_bias(cudaStream_t stream, const ExpertRows& rows, const T* bias, const T* gradients,
                     const float* weights, float* weight_gradients, std::size_t width) {
  if (rows.count == 0 || width == 0) return cudaSuccess;
  return device::launch(by_choices(stream, rows, width), &dot<true, T>, rows, bias, gradients,
                        weights, weight_gradients, width);
}

cudaError_t put_quotients(cudaStream_t stream, const ExpertRows& rows, const float* values,
                          const float* weights, float* to) {
  constexpr unsigned kThreads = 128;
  if (rows.count == 0) return cudaSuccess;
  const auto blocks = static_cast<unsigned>((rows.count + kThreads - 1) / kThreads);
  return device::launch({.stream = stream, .blocks = blocks, .threads = kThreads}, &put, rows,
                        values, weights, to);
}

template <class T>
cudaError_t add_bias(cudaStream_t stream, const T* bias, float* y, std::size_t rows,
                     std::size_t width) {
  if (rows == 0 || width == 0) return cudaSuccess;
  return device::launch(by_rows<float>(stream, rows, width), &add_bias_to_rows<T>, bias, y, width);
}

cudaError_t add_rows(cudaStream_t stream, const ExpertRows& rows, const float* y,
                     const float* weights, float* sums, std::size_t width) {
  if (rows.count == 0 || width == 0) return cudaSuccess;
  return device::launch(by_rows<float>(stream, rows.count, width), &add_rows_to_sums, rows, y,
                        weights, sums, width);
}

template cudaError_t gather_rows(cudaStream_t, const ExpertRows&, const float*, const float*,
                                 float*, std::size_t, std::size_t);
template cudaError_t gather_rows(cudaStream_t, const ExpertRows&, const Bf16*, const float*, Bf16*,
                                 std::size_t, std::size_t);
template cudaError_t gather_rows(cudaStream_t, const ExpertRows&, const F16*, const float*, F16*,
                                 std::size_t, std::size_t);
template cudaError_t dot_rows(cudaStream_t, const ExpertRows&, const float*, const float*,
                              const float*, float*, std::size_t);
template cudaError_t dot_rows(cudaStream_t, const ExpertRows&, const Bf16*, const Bf16*,
                              const float*, float*, std::size_t);
template cudaError_t dot_rows(cudaStream_t, const ExpertRows&, const F16*, const F16*, const float*,
                              float*, std::size_t);
template cudaError_t dot_bias(cudaStream_t, const ExpertRows&, const float*, const float*,
                              const float*, float*, std::size_t);
template cudaError_t dot_bias(cudaStream_t, const ExpertRows&, const Bf16*, const Bf16*,
                              const float*, float*, std::size_t);
template cudaError_t dot_bias(cudaStream_t, const ExpertRows&, const F16*, const F16*, const float*,
                              float*, std::size_t);
template cudaError_t add_bias(cudaStream_t, const float*, float*, std::size_t, std::size_t);
template cudaError_t add_bias(cudaStream_t, const Bf16*, float*, std::size_t, std::size_t);
template cudaError_t add_bias(cudaStream_t, const F16*, float*, std::size_t, std::size_t);

}  // namespace ballast::model::cuda
