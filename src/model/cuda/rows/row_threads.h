#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include <cuda_runtime_api.h>

#include "src/device/cuda/eight_values.h"
#include "src/device/cuda/kernel_language.h"
#include "src/model/compute/formulas.h"
#include "src/model/cuda/rows/rows.h"

namespace ballast::model::cuda {

/// Threads of a block of kernels whose threads work independently.
inline constexpr unsigned kElementThreads = 256;

/// Blocks for this number of threads.
inline unsigned blocks_of(std::size_t threads) {
  return static_cast<unsigned>((threads + kElementThreads - 1) / kElementThreads);
}

// Kernels that move or add whole rows. Each thread has one access of 16 bytes.

using device::kOneAccess;
using device::Packed;

/// Threads of a block that processes a part of a row.
inline constexpr unsigned kMaxRowThreads = 128;

inline unsigned blocks_for(std::size_t items, unsigned per_block) {
  return static_cast<unsigned>((items + per_block - 1) / per_block);
}

/// A thread's part of a row.
template <class T>
using Piece = Packed<T, kOneAccess<T>>;

/// Launches one block per row and part of its columns, with one thread per piece.
template <class T>
device::LaunchConfig by_rows(cudaStream_t stream, std::size_t rows, std::size_t width) {
  const std::size_t pieces = width / kOneAccess<T>;
  const auto threads = static_cast<unsigned>(std::min<std::size_t>(
      (pieces + device::kWarp - 1) / device::kWarp * device::kWarp, kMaxRowThreads));
  return {.stream = stream,
          .blocks = {static_cast<unsigned>(rows), blocks_for(pieces, threads)},
          .threads = threads};
}
/// Returns the thread's first column.
template <class T>
__device__ std::size_t own_column() {
  return (std::size_t{blockIdx.y} * blockDim.x + threadIdx.x) * kOneAccess<T>;
}

// Threads that process one row of a norm, and their sums over the row.

using device::Eight;
using device::kEight;
using device::kWarp;

/// How threads keep a row: each has a few groups of eight elements in registers.
enum class RowFit {
  warp,    ///< a warp keeps a row of up to kNarrow elements; a block has kRowsOfBlock rows
  block,   ///< a block keeps a row
  beyond,  ///< a block keeps the first part and rereads the rest when it needs it
};
inline constexpr unsigned kHeldByLane = 4;  ///< groups of eight
inline constexpr std::size_t kNarrow = std::size_t{kWarp} * kHeldByLane * kEight;
inline constexpr unsigned kRowsOfBlock = 8;
inline constexpr unsigned kMaxThreads = 512;

/// Returns the places with defaults filled in.
inline NormRows places_of(NormRows places, const Rows& rows) {
  if (places.x_step == 0) places.x_step = places.groups * rows.width;
  if (places.y_step == 0) places.y_step = places.groups * rows.width;
  return places;
}

/// The threads of one row.
template <RowFit fit>
class Team {
 public:
  static constexpr bool kWarpEach = fit == RowFit::warp;

  __device__ unsigned rank() const { return kWarpEach ? threadIdx.x % kWarp : threadIdx.x; }
  __device__ unsigned size() const { return kWarpEach ? kWarp : blockDim.x; }
  /// Index of this team in the grid.
  __device__ std::size_t number() const {
    return kWarpEach ? std::size_t{blockIdx.x} * kRowsOfBlock + threadIdx.x / kWarp : blockIdx.x;
  }
  __device__ std::size_t count() const {
    return kWarpEach ? std::size_t{gridDim.x} * kRowsOfBlock : gridDim.x;
  }
  /// Replaces each of `values` by its sum over the team.
  template <unsigned count>
  __device__ void sum(float (&values)[count]) {
    if constexpr (kWarpEach) {
      for (float& value : values) value = device::warp_sum(value);
    } else {
      __shared__ float shared[2][2 * kWarp];
      static_assert(count <= 2);
      turn_ ^= 1U;
      device::block_sum(values, shared[turn_]);
    }
  }

 private:
  unsigned turn_ = 0;
};

/// A thread's elements of a row: groups of eight, a team's size apart. The first `held` groups are
/// in registers.
template <RowFit fit, unsigned held>
class RowShare {
 public:
  __device__ RowShare(const Team<fit>& team, unsigned width)
      : first_(team.rank() * kEight), step_(team.size() * kEight), width_(width) {}
  /// Calls body(k, at) for the groups in registers. The k-th begins at `at`.
  template <class Body>
  __device__ void each_held(const Body& body) const {
    for (unsigned k = 0; k < held; ++k) {
      const unsigned at = first_ + k * step_;
      if (at < width_) body(k, at);
    }
  }
  /// Calls body(at) for the other groups.
  template <class Body>
  __device__ void each_other(const Body& body) const {
    if constexpr (fit == RowFit::beyond) {
      for (unsigned at = first_ + held * step_; at < width_; at += step_) body(at);
    }
  }
  /// Calls body(at, values) for all groups of `row`. `kept` has those in registers.
  template <class T, class Body>
  __device__ void each(const T* row, const Eight<T> (&kept)[held], const Body& body) const {
    float values[kEight];
    each_held([&](unsigned k, unsigned at) {
      device::widen(kept[k], values);
      body(at, values);
    });
    each_other([&](unsigned at) {
      device::read(row + at, values);
      body(at, values);
    });
  }
  template <class T>
  __device__ void keep(const T* row, Eight<T> (&kept)[held]) const {
    each_held([&](unsigned k, unsigned at) { kept[k] = device::read(row + at); });
  }

 private:
  unsigned first_;
  unsigned step_;
  unsigned width_;
};

struct RowStatistics {
  float mean;
  float factor;
};

/// Mean (LayerNorm only) and inverse deviation of a row. The variance is computed from differences
/// to the mean, so that a large mean does not cancel it.
template <bool centred, RowFit fit, unsigned held, class T>
__device__ inline RowStatistics row_statistics(Team<fit>& team, const RowShare<fit, held>& share,
                                               const T* row, const Eight<T> (&kept)[held],
                                               float count, float epsilon) {
  float mean = 0.0F;
  if constexpr (centred) {
    float sum[1] = {};
    share.each(row, kept, [&](unsigned, const float(&x)[kEight]) {
      for (const float value : x) sum[0] += value;
    });
    team.sum(sum);
    mean = sum[0] / count;
  }
  float squares[1] = {};
  share.each(row, kept, [&](unsigned, const float(&x)[kEight]) {
    for (const float value : x) squares[0] += (value - mean) * (value - mean);
  });
  team.sum(squares);
  return {mean, formulas::inverse_deviation(squares[0] / count, epsilon)};
}

/// Number of threads for a row of `width` elements if each keeps `held` groups of eight.
inline unsigned threads_of_row(std::size_t width, unsigned held) {
  const std::size_t together = std::size_t{kWarp} * held * kEight;
  return static_cast<unsigned>(
      std::min<std::size_t>((width + together - 1) / together * kWarp, kMaxThreads));
}
/// Returns whether a block can keep the whole row.
inline bool keeps(std::size_t width, unsigned held) {
  return width <= std::size_t{kMaxThreads} * held * kEight;
}

// Sums of rows by token id, for kernels that use token ids (tokens.h).

/// Threads per block of kernels with one thread per token.
inline constexpr unsigned kTokenThreads = 256;

/// Whether `token` is one of [first, first + size).
__device__ inline bool is_in(std::int32_t token, std::size_t first, std::size_t size) {
  return token >= 0 && static_cast<std::size_t>(token) - first < size;
}

/// Adds a row times `scale` to `sum`.
template <class T>
__device__ void add_piece(float (&sum)[kOneAccess<T>], const Piece<T>& row, float scale = 1.0F) {
  float values[kOneAccess<T>];
  device::widen(row, values);
  for (unsigned i = 0; i < kOneAccess<T>; ++i) sum[i] += values[i] * scale;
}

/// A sum of rows: dy[i] * scale is added to row places[i] of `table`, if ids[i] - first is below
/// `size` and places[i] is not negative. Other ids add nothing. Equal ids have equal places.
template <class T>
struct Scatter {
  const std::int32_t* ids;
  const std::int32_t* places;
  const T* dy;
  float* table;
  std::size_t first = 0;
  std::size_t size;
  std::size_t width;
  float scale = 1.0F;
};

/// Adds the rows of `count` ids in the order of the ids. `links`: scratch memory for 2 * count
/// values. Equal ids are found by comparison, so the work grows with `count` times the number of
/// different ids. This is negligible compared with a model up to about 64k ids. dy is read once.
template <class T>
cudaError_t scatter(cudaStream_t stream, const Scatter<T>& sums, std::size_t count,
                    std::uint32_t* links);

}  // namespace ballast::model::cuda
