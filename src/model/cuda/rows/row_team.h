#pragma once

#include <algorithm>
#include <cstddef>

#include "src/device/cuda/eight.h"
#include "src/device/cuda/kernel_language.h"
#include "src/model/compute/formulas.h"
#include "src/model/cuda/rows/rows.h"

namespace ballast::model::cuda {

// Threads that process one row of a norm, and their sums over the row.

using device::Eight;
using device::kEight;
using device::kWarp;

/// How threads keep a row: each has a few groups of eight elements in registers.
enum class Fit {
  warp,    ///< a warp keeps a row of up to kNarrow elements; a block has kRowsOfBlock rows
  block,   ///< a block keeps a row
  beyond,  ///< a block keeps the first part and rereads the rest when it needs it
};
inline constexpr unsigned kHeldByLane = 4;  ///< groups of eight
inline constexpr std::size_t kNarrow = std::size_t{kWarp} * kHeldByLane * kEight;
inline constexpr unsigned kRowsOfBlock = 8;
inline constexpr unsigned kMostThreads = 512;

/// Returns the places with defaults filled in.
inline NormRows places_of(NormRows places, const Rows& rows) {
  if (places.x_step == 0) places.x_step = places.groups * rows.width;
  if (places.y_step == 0) places.y_step = places.groups * rows.width;
  return places;
}

/// The threads of one row.
template <Fit fit>
class Team {
 public:
  static constexpr bool kWarpEach = fit == Fit::warp;

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
template <Fit fit, unsigned held>
class Share {
 public:
  __device__ Share(const Team<fit>& team, unsigned width)
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
    if constexpr (fit == Fit::beyond) {
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
template <bool centred, Fit fit, unsigned held, class T>
__device__ inline RowStatistics row_statistics(Team<fit>& team, const Share<fit, held>& share,
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
      std::min<std::size_t>((width + together - 1) / together * kWarp, kMostThreads));
}
/// Returns whether a block can keep the whole row.
inline bool keeps(std::size_t width, unsigned held) {
  return width <= std::size_t{kMostThreads} * held * kEight;
}

}  // namespace ballast::model::cuda
