#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <type_traits>

#include "src/device/cuda/eight_values.h"
#include "src/device/cuda/kernel_language.h"
#include "src/model/cuda/rows/row_threads.h"
#include "src/model/cuda/rows/rows.h"

namespace ballast::model::cuda {

namespace {

using device::kEight;
using device::kWarp;

/// Threads that share a column; each takes every kStrands-th row of the group.
constexpr unsigned kStrands = 8;
constexpr unsigned kColumnThreads = kStrands * kWarp;
/// Number of rows from which groups are faster.
constexpr std::size_t kLeastRows = 64;

/// There is one block per 256 columns (x) and group of rows (y), the rows r with r % groups ==
/// group. Sums x or, with `products`, x y times the columns' factors.
template <class T, bool products>
__global__ void sum_columns(ColumnProducts<T> c, float* partials) {
  const std::size_t width = c.width;
  constexpr unsigned kColumns = kWarp * kEight;
  alignas(16) __shared__ float strands[kStrands][kColumns];
  const unsigned lane = threadIdx.x % kWarp;
  const unsigned strand = threadIdx.x / kWarp;
  const std::size_t column = std::size_t{blockIdx.x} * kColumns + lane * kEight;
  float sums[kEight] = {};
  if (column < width) {
    const std::size_t step = std::size_t{gridDim.y} * kStrands;
    for (std::size_t row = blockIdx.y + std::size_t{strand} * gridDim.y; row < c.rows;
         row += step) {
      float values[kEight];
      device::read(c.x + row * c.x_step + column, values);
      if constexpr (products) {
        float others[kEight];
        device::read(c.y + row * c.y_step + column, others);
        for (unsigned i = 0; i < kEight; ++i) values[i] *= others[i];
      }
      for (unsigned i = 0; i < kEight; ++i) sums[i] += values[i];
    }
  }
  device::write(sums, &strands[strand][lane * kEight]);
  __syncthreads();
  const std::size_t mine = std::size_t{blockIdx.x} * kColumns + threadIdx.x;
  if (mine >= width) return;
  float sum = 0.0F;
  for (unsigned i = 0; i < kStrands; ++i) sum += strands[i][threadIdx.x];
  if constexpr (products) sum *= c.factors[mine];
  partials[blockIdx.y * width + mine] = sum;
}

/// There is one block per kWarp columns of the partial sums. The first `width` columns belong to
/// `gradient`, the others to `second`; null: not wanted.
__global__ void sum_partial_groups(const float* partials, std::size_t groups, std::size_t columns,
                                   std::size_t width, float* gradient, float* second) {
  __shared__ float strands[kStrands][kWarp];
  const unsigned lane = threadIdx.x % kWarp;
  const unsigned strand = threadIdx.x / kWarp;
  const std::size_t column = std::size_t{blockIdx.x} * kWarp + lane;
  float sum = 0.0F;
  if (column < columns) {
    for (std::size_t group = strand; group < groups; group += kStrands) {
      sum += partials[group * columns + column];
    }
  }
  strands[strand][lane] = sum;
  __syncthreads();
  if (strand > 0 || column >= columns) return;
  for (unsigned i = 1; i < kStrands; ++i) sum += strands[i][lane];
  float* const to = column < width ? gradient : second;
  if (to != nullptr) to[column < width ? column : column - width] += sum;
}

template <class T, bool products>
cudaError_t add_columns(cudaStream_t stream, const ColumnProducts<T>& c, float* gradient,
                        float* partials) {
  if (c.rows == 0 || c.width == 0) return cudaSuccess;
  constexpr std::size_t kColumns = std::size_t{kWarp} * kEight;
  const std::size_t groups = std::min((c.rows + kLeastRows - 1) / kLeastRows, kMaxGroups);
  const cudaError_t code =
      device::launch({.stream = stream,
                      .blocks = {static_cast<unsigned>((c.width + kColumns - 1) / kColumns),
                                 static_cast<unsigned>(groups)},
                      .threads = kColumnThreads},
                     &sum_columns<T, products>, c, partials);
  if (code != cudaSuccess) return code;
  return add_partials(stream, {partials, groups, c.width, false}, gradient, nullptr);
}

}  // namespace

cudaError_t add_partials(cudaStream_t stream, const Partials& partials, float* gradient,
                         float* second) {
  if (gradient == nullptr && second == nullptr) return cudaSuccess;
  const std::size_t columns = partials.two ? 2 * partials.width : partials.width;
  return device::launch({.stream = stream,
                         .blocks = static_cast<unsigned>((columns + kWarp - 1) / kWarp),
                         .threads = kColumnThreads},
                        &sum_partial_groups, partials.sums, partials.groups, columns,
                        partials.width, gradient, second);
}

std::size_t partial_floats(Rows most) {
  return 2 * std::min(most.count, kMaxGroups) * most.width;
}

template <class T>
cudaError_t add_column_sums(cudaStream_t stream, const T* x, std::size_t stride, float* gradient,
                            float* partials, Rows rows) {
  return add_columns<T, false>(stream,
                               {.x = x, .x_step = stride, .rows = rows.count, .width = rows.width},
                               gradient, partials);
}

template <class T>
cudaError_t add_column_products(cudaStream_t stream, const ColumnProducts<T>& columns,
                                float* gradient, float* partials) {
  return add_columns<T, true>(stream, columns, gradient, partials);
}

template cudaError_t add_column_products(cudaStream_t, const ColumnProducts<float>&, float*,
                                         float*);
template cudaError_t add_column_products(cudaStream_t, const ColumnProducts<Bf16>&, float*, float*);
template cudaError_t add_column_products(cudaStream_t, const ColumnProducts<F16>&, float*, float*);
template cudaError_t add_column_sums(cudaStream_t, const float*, std::size_t, float*, float*, Rows);
template cudaError_t add_column_sums(cudaStream_t, const Bf16*, std::size_t, float*, float*, Rows);
template cudaError_t add_column_sums(cudaStream_t, const F16*, std::size_t, float*, float*, Rows);

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

namespace {

/// There is one block per row of a part's heads and part of its columns.
template <class T>
__global__ void move_heads(Regrouping how, const T* from, T* to) {
  const std::size_t column = own_column<T>();
  if (column >= how.width()) return;
  const std::size_t row = blockIdx.x;
  device::write(device::read<kOneAccess<T>>(from + how.at(how.from, row, column)),
                to + how.at(how.to, row, column));
}

}  // namespace

template <class T>
cudaError_t regroup(cudaStream_t stream, const Regrouping& how, const T* from, T* to) {
  if (how.rows() == 0 || how.width() == 0) return cudaSuccess;
  return device::launch(by_rows<T>(stream, how.rows(), how.width()), &move_heads<T>, how, from, to);
}

template cudaError_t regroup(cudaStream_t, const Regrouping&, const float*, float*);
template cudaError_t regroup(cudaStream_t, const Regrouping&, const Bf16*, Bf16*);
template cudaError_t regroup(cudaStream_t, const Regrouping&, const F16*, F16*);

}  // namespace ballast::model::cuda

// All kernels have one block per row and part of its columns.

namespace ballast::model::cuda {

namespace {

template <bool adds, class T>
__global__ void put_columns(const T* x, std::size_t step, std::size_t width, float* sums) {
  const std::size_t column = own_column<T>();
  if (column >= width) return;
  float* const to = sums + blockIdx.x * width + column;
  float values[kOneAccess<T>];
  device::read(x + blockIdx.x * step + column, values);
  if constexpr (adds) {
    float sum[kOneAccess<T>];
    device::read(to, sum);
    for (unsigned i = 0; i < kOneAccess<T>; ++i) values[i] += sum[i];
  }
  device::write(values, to);
}

template <class T>
__global__ void add_to_columns(const float* sums, std::size_t width, T* x, std::size_t step) {
  const std::size_t column = own_column<T>();
  if (column >= width) return;
  T* const to = x + blockIdx.x * step + column;
  float values[kOneAccess<T>];
  float sum[kOneAccess<T>];
  device::read(to, values);
  device::read(sums + blockIdx.x * width + column, sum);
  for (unsigned i = 0; i < kOneAccess<T>; ++i) values[i] += sum[i];
  device::write(values, to);
}

template <class T>
__global__ void mix(TokenRows<const T> rows, TokenMix how, const T* x, std::size_t step, T* y) {
  const std::size_t column = own_column<T>();
  if (column >= rows.width) return;
  float row[kOneAccess<T>];
  device::read(rows.rows + blockIdx.x * rows.width + column, row);
  for (float& value : row) value = device::rounded_product(value, how.scale);
  Piece<T> scaled;
  device::narrow(row, scaled);
  device::widen(scaled, row);
  float values[kOneAccess<T>];
  device::read(x + blockIdx.x * step + column, values);
  for (unsigned i = 0; i < kOneAccess<T>; ++i) values[i] = (values[i] + row[i]) * how.factor;
  device::write(values, y + blockIdx.x * rows.width + column);
}

template <class T>
__global__ void mix_backward(const T* dy, std::size_t width, TokenMix how, float* of_rows, T* dx,
                             std::size_t step) {
  const std::size_t column = own_column<T>();
  if (column >= width) return;
  float values[kOneAccess<T>];
  device::read(dy + blockIdx.x * width + column, values);
  if (of_rows != nullptr) {
    float scaled[kOneAccess<T>];
    for (unsigned i = 0; i < kOneAccess<T>; ++i) scaled[i] = values[i] * (how.factor * how.scale);
    device::write(scaled, of_rows + blockIdx.x * width + column);
  }
  if (dx == nullptr) return;
  for (float& value : values) value *= how.factor;
  device::write(values, dx + blockIdx.x * step + column);
}

}  // namespace

template <class T>
cudaError_t put_sums(cudaStream_t stream, const T* x, std::size_t step, Rows rows, bool adds,
                     float* sums) {
  if (rows.count == 0 || rows.width == 0) return cudaSuccess;
  return device::launch(by_rows<T>(stream, rows.count, rows.width),
                        adds ? &put_columns<true, T> : &put_columns<false, T>, x, step, rows.width,
                        sums);
}

template <class T>
cudaError_t add_sums(cudaStream_t stream, const float* sums, Rows rows, T* x, std::size_t step) {
  if (rows.count == 0 || rows.width == 0) return cudaSuccess;
  return device::launch(by_rows<T>(stream, rows.count, rows.width), &add_to_columns<T>, sums,
                        rows.width, x, step);
}

template <class T>
cudaError_t mix_rows(cudaStream_t stream, const TokenRows<const T>& rows, const TokenMix& how,
                     const T* x, std::size_t step, T* y) {
  if (rows.size == 0 || rows.width == 0) return cudaSuccess;
  return device::launch(by_rows<T>(stream, rows.size, rows.width), &mix<T>, rows, how, x, step, y);
}

template <class T>
cudaError_t mix_rows_backward(cudaStream_t stream, const TokenRows<const T>& dy,
                              const TokenMix& how, float* of_rows, T* dx, std::size_t step) {
  if (dy.size == 0 || dy.width == 0) return cudaSuccess;
  return device::launch(by_rows<T>(stream, dy.size, dy.width), &mix_backward<T>, dy.rows, dy.width,
                        how, of_rows, dx, step);
}

#define BALLAST_LINKS(T)                                                                           \
  template cudaError_t put_sums(cudaStream_t, const T*, std::size_t, Rows, bool, float*);          \
  template cudaError_t add_sums(cudaStream_t, const float*, Rows, T*, std::size_t);                \
  template cudaError_t mix_rows(cudaStream_t, const TokenRows<const T>&, const TokenMix&,          \
                                const T*, std::size_t, T*);                                        \
  template cudaError_t mix_rows_backward(cudaStream_t, const TokenRows<const T>&, const TokenMix&, \
                                         float*, T*, std::size_t);
BALLAST_LINKS(float)
BALLAST_LINKS(Bf16)
BALLAST_LINKS(F16)
#undef BALLAST_LINKS

}  // namespace ballast::model::cuda
