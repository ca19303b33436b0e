#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <type_traits>

#include "src/model/cuda/rows/row_pieces.h"
#include "src/model/cuda/rows/rows.h"

namespace ballast::model::cuda {
namespace {

constexpr unsigned kGroupThreads = 128;

/// How a block's threads share rows, each of which has `width` columns. A thread has one place.
struct GroupRows {
  unsigned rows = 0;      ///< per block
  unsigned width = 0;     ///< columns per row
  std::size_t count = 0;  ///< rows of all blocks

  struct Place {
    std::size_t row = 0;
    unsigned column = 0;
    bool here = false;  ///< whether the place exists
  };
  /// Returns the thread's place of `kColumns` columns. GPUs divide 64-bit integers slowly, so these
  /// have 32 bits.
  template <unsigned kColumns>
  [[nodiscard]] __device__ Place place() const {
    const unsigned places = width / kColumns;
    unsigned row = 0;
    unsigned at = blockIdx.y * blockDim.x + threadIdx.x;
    if (rows > 1) {
      row = at / places;
      at %= places;
    }
    const std::size_t whole = std::size_t{blockIdx.x} * rows + row;
    return {whole, at * kColumns, row < rows && at < places && whole < count};
  }
};

/// Copies kColumns columns per thread.
template <class T, unsigned kColumns>
__global__ void __launch_bounds__(kGroupThreads)
    copy_columns(GroupRows rows, unsigned group_width, unsigned wide, const T* from,
                 StepsOfGroups from_steps, T* to, StepsOfGroups to_steps) {
  const GroupRows::Place place = rows.place<kColumns>();
  if (!place.here) return;
  const unsigned group = place.column / wide;
  const unsigned column = place.column % wide;
  from += place.row * from_steps.row + group * from_steps.group + column;
  to += place.row * to_steps.row + group * to_steps.group + column;
  if constexpr (kColumns == 1) {
    *to = column < group_width ? *from : T{};
  } else {
    Packed<T, kColumns> copied;
    if (column < group_width) copied = device::read<kColumns>(from);
    device::write(copied, to);
  }
}

/// Sums kColumns columns per thread.
template <class T, unsigned kColumns>
__global__ void __launch_bounds__(kGroupThreads)
    sum_group_columns(GroupRows rows, unsigned groups, const T* from, StepsOfGroups steps, T* to,
                      std::size_t to_row) {
  const GroupRows::Place place = rows.place<kColumns>();
  if (!place.here) return;
  from += place.row * steps.row + place.column;
  to += place.row * to_row + place.column;
  float sums[kColumns] = {};
  for (unsigned group = 0; group < groups; ++group) {
    if constexpr (kColumns == 1) {
      sums[0] += device::widen(*from);
    } else {
      float values[kColumns];
      device::read(from, values);
      for (unsigned i = 0; i < kColumns; ++i) sums[i] += values[i];
    }
    from += steps.group;
  }
  if constexpr (kColumns == 1) {
    device::narrow(sums[0], *to);
  } else {
    device::write(sums, to);
  }
}

/// Returns whether accesses of 16 bytes fit: all offsets, in elements, are multiples of them.
template <class T>
bool whole_pieces(const T* from, const T* to, std::initializer_list<std::size_t> offsets) {
  const auto bits = reinterpret_cast<std::uintptr_t>(from) | reinterpret_cast<std::uintptr_t>(to);
  return bits % sizeof(uint4) == 0 && std::ranges::all_of(offsets, [](std::size_t offset) {
           return offset % kOneAccess<T> == 0;
         });
}

/// Calls start(columns per thread, launch, rows) for `count` rows of `width` columns.
template <class T, class Start>
cudaError_t by_places(cudaStream_t stream, bool pieces, std::size_t count, std::size_t width,
                      const Start& start) {
  const auto launch = [&](auto columns) {
    const auto places = static_cast<unsigned>(width / columns.value);
    const unsigned rows = std::max(kGroupThreads / places, 1U);
    return start(columns,
                 device::LaunchConfig{.stream = stream,
                                      .blocks = {blocks_for(count, rows),
                                                 blocks_for(rows > 1 ? 1 : places, kGroupThreads)},
                                      .threads = kGroupThreads},
                 GroupRows{rows, static_cast<unsigned>(width), count});
  };
  if (pieces) return launch(std::integral_constant<unsigned, kOneAccess<T>>{});
  return launch(std::integral_constant<unsigned, 1>{});
}

}  // namespace

template <class T>
cudaError_t copy_groups(cudaStream_t stream, const CopiedGroups& groups, const T* from,
                        const StepsOfGroups& from_steps, T* to, const StepsOfGroups& to_steps) {
  const std::size_t wide = groups.width + groups.zeros;
  if (groups.rows == 0 || groups.count * wide == 0) return cudaSuccess;
  const bool pieces = whole_pieces(
      from, to,
      {groups.width, groups.zeros, from_steps.row, from_steps.group, to_steps.row, to_steps.group});
  return by_places<T>(stream, pieces, groups.rows, groups.count * wide,
                      [&](auto columns, const device::LaunchConfig& how, const GroupRows& rows) {
                        return device::launch(how, &copy_columns<T, columns.value>, rows,
                                              groups.width, wide, from, from_steps, to, to_steps);
                      });
}

template <class T>
cudaError_t sum_groups(cudaStream_t stream, const CopiedGroups& groups, const T* from,
                       const StepsOfGroups& steps, T* to, std::size_t to_row) {
  if (groups.rows == 0 || groups.width == 0) return cudaSuccess;
  const bool pieces = whole_pieces(from, to, {groups.width, steps.row, steps.group, to_row});
  return by_places<T>(stream, pieces, groups.rows, groups.width,
                      [&](auto columns, const device::LaunchConfig& how, const GroupRows& rows) {
                        return device::launch(how, &sum_group_columns<T, columns.value>, rows,
                                              groups.count, from, steps, to, to_row);
                      });
}

#define BALLAST_GROUPS(T)                                                           \
  template cudaError_t copy_groups(cudaStream_t, const CopiedGroups&, const T*,     \
                                   const StepsOfGroups&, T*, const StepsOfGroups&); \
  template cudaError_t sum_groups(cudaStream_t, const CopiedGroups&, const T*,      \
                                  const StepsOfGroups&, T*, std::size_t);
BALLAST_GROUPS(float)
BALLAST_GROUPS(Bf16)
BALLAST_GROUPS(F16)
#undef BALLAST_GROUPS

}  // namespace ballast::model::cuda
