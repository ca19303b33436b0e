#include "src/device/cuda/eight_values.h"
#include "src/device/cuda/kernel_language.h"
#include "src/model/cuda/rows/row_threads.h"
#include "src/model/cuda/rows/rows.h"

namespace ballast::model::cuda {
namespace {

using device::kEight;
using device::narrow;
using device::read;
using device::widen;
using device::write;

/// One element per thread is enough, because the matrices [rows, rank] of adapters are small.
template <class T>
__global__ void scaled(T* x, float factor, std::size_t size) {
  const std::size_t at = std::size_t{blockIdx.x} * kElementThreads + threadIdx.x;
  if (at < size) narrow(widen(x[at]) * factor, x[at]);
}

template <class T>
__global__ void scaled_by(const T* addends, std::size_t count, T* x, std::size_t size) {
  const std::size_t at = std::size_t{blockIdx.x} * kElementThreads + threadIdx.x;
  if (at >= size) return;
  float factor = 0.0F;
  for (std::size_t i = 0; i < count; ++i) factor += widen(addends[i]);
  narrow(widen(x[at]) * factor, x[at]);
}

template <class T>
__global__ void dropped(DropoutMask mask, const T* x, T* y, std::size_t size, bool add_to_y) {
  const std::size_t at = (std::size_t{blockIdx.x} * kElementThreads + threadIdx.x) * kEight;
  if (at >= size) return;
  float values[kEight];
  float sums[kEight] = {};
  read(x + at, values);
  if (add_to_y) read(y + at, sums);
  for (unsigned half = 0; half < 2; ++half) {
    const auto factors = mask.factors(at / 4 + half);
    for (unsigned i = 0; i < 4; ++i) {
      sums[4 * half + i] = device::rounded_sum(
          sums[4 * half + i], device::rounded_product(values[4 * half + i], factors[i]));
    }
  }
  write(sums, y + at);
}

/// Writes the norm of row `row` and its gain, from its squares and the adapter's contribution.
template <class T>
__device__ void put_dora_scale(const AdaptedRows<T>& rows, std::size_t row, float squares,
                               float* scales, float* inverse_norms) {
  const T* const b = rows.b + row * rows.rank;
  const float added = added_square([b](std::size_t k) { return widen(b[k]); },
                                   rows.cross + row * rows.rank, rows.gram, rows.rank, rows.scale);
  const float square = squares + added;
  const float norm = square > 0.0F ? device::rounded_root(square) : 0.0F;
  const float inverse = norm > 0.0F ? device::rounded_quotient(1.0F, norm) : 0.0F;
  inverse_norms[row] = inverse;
  scales[row] = widen(rows.magnitudes[row]) * inverse;
}

/// For W [out, in], with one warp per row. `in` is a multiple of eight.
template <class T>
__global__ void dora_scales_of_rows(AdaptedRows<T> rows, float* scales, float* inverse_norms) {
  const std::size_t row =
      std::size_t{blockIdx.x} * (kElementThreads / device::kWarp) + threadIdx.x / device::kWarp;
  const unsigned lane = threadIdx.x % device::kWarp;
  float squares = 0.0F;
  if (row < rows.map.out) {
    const T* const from = rows.map.weight + row * rows.map.in;
    for (std::size_t at = std::size_t{lane} * kEight; at < rows.map.in;
         at += std::size_t{device::kWarp} * kEight) {
      float values[kEight];
      read(from + at, values);
      for (unsigned i = 0; i < kEight; ++i) squares += values[i] * values[i];
    }
  }
  squares = device::warp_sum(squares);
  if (lane == 0 && row < rows.map.out) put_dora_scale(rows, row, squares, scales, inverse_norms);
}

/// For W [in, out], with one thread per column.
template <class T>
__global__ void dora_scales_of_columns(AdaptedRows<T> rows, float* scales, float* inverse_norms) {
  const std::size_t column = std::size_t{blockIdx.x} * kElementThreads + threadIdx.x;
  if (column >= rows.map.out) return;
  float squares = 0.0F;
  for (std::size_t row = 0; row < rows.map.in; ++row) {
    const float value = widen(rows.map.weight[row * rows.map.out + column]);
    squares += value * value;
  }
  put_dora_scale(rows, column, squares, scales, inverse_norms);
}

/// There is one block per row (x) and part of its columns (y), with eight columns per thread.
template <class T>
__global__ void scaled_columns(ScaledColumns<T> c) {
  const std::size_t row = blockIdx.x;
  const std::size_t at = (std::size_t{blockIdx.y} * kElementThreads + threadIdx.x) * kEight;
  if (at >= c.width) return;
  float values[kEight];
  float others[kEight];
  read(c.x + row * c.x_step + at, values);
  if (c.scales != nullptr) {
    read(c.scales + at, others);
    for (unsigned i = 0; i < kEight; ++i) {
      values[i] = device::rounded_product(values[i], others[i]);
    }
  } else {
    for (float& value : values) value = device::rounded_product(value, c.factor);
  }
  if (c.bias != nullptr) {
    read(c.bias + at, others);
    for (unsigned i = 0; i < kEight; ++i) values[i] = device::rounded_sum(values[i], others[i]);
  }
  if (c.residual != nullptr) {
    read(c.residual + row * c.y_step + at, others);
    for (unsigned i = 0; i < kEight; ++i) values[i] = device::rounded_sum(values[i], others[i]);
  }
  write(values, c.y + row * c.y_step + at);
}

}  // namespace

template <class T>
cudaError_t scale(cudaStream_t stream, T* x, float factor, std::size_t size) {
  if (size == 0) return cudaSuccess;
  return device::launch({.stream = stream, .blocks = blocks_of(size), .threads = kElementThreads},
                        &scaled<T>, x, factor, size);
}

template <class T>
cudaError_t scale_by(cudaStream_t stream, const T* addends, std::size_t count, T* x,
                     std::size_t size) {
  if (size == 0) return cudaSuccess;
  return device::launch({.stream = stream, .blocks = blocks_of(size), .threads = kElementThreads},
                        &scaled_by<T>, addends, count, x, size);
}

template <class T>
cudaError_t drop(cudaStream_t stream, const DropoutMask& mask, const T* x, T* y, std::size_t size,
                 bool add_to_y) {
  if (size == 0) return cudaSuccess;
  return device::launch(
      {.stream = stream, .blocks = blocks_of(size / kEight), .threads = kElementThreads},
      &dropped<T>, mask, x, y, size, add_to_y);
}

template <class T>
cudaError_t compute_dora_scales(cudaStream_t stream, const AdaptedRows<T>& rows, float* scales,
                                float* inverse_norms) {
  const bool flipped = rows.map.flipped;
  const std::size_t threads = rows.map.out * (flipped ? device::kWarp : 1);
  return device::launch(
      {.stream = stream, .blocks = blocks_of(threads), .threads = kElementThreads},
      flipped ? &dora_scales_of_rows<T> : &dora_scales_of_columns<T>, rows, scales, inverse_norms);
}

template <class T>
cudaError_t scale_columns(cudaStream_t stream, const ScaledColumns<T>& columns) {
  if (columns.rows == 0 || columns.width == 0) return cudaSuccess;
  return device::launch(
      {.stream = stream,
       .blocks = {static_cast<unsigned>(columns.rows), blocks_of(columns.width / kEight)},
       .threads = kElementThreads},
      &scaled_columns<T>, columns);
}

template cudaError_t compute_dora_scales(cudaStream_t, const AdaptedRows<float>&, float*, float*);
template cudaError_t compute_dora_scales(cudaStream_t, const AdaptedRows<Bf16>&, float*, float*);
template cudaError_t compute_dora_scales(cudaStream_t, const AdaptedRows<F16>&, float*, float*);
template cudaError_t scale_columns(cudaStream_t, const ScaledColumns<float>&);
template cudaError_t scale_columns(cudaStream_t, const ScaledColumns<Bf16>&);
template cudaError_t scale_columns(cudaStream_t, const ScaledColumns<F16>&);
template cudaError_t scale(cudaStream_t, float*, float, std::size_t);
template cudaError_t scale(cudaStream_t, Bf16*, float, std::size_t);
template cudaError_t scale(cudaStream_t, F16*, float, std::size_t);
template cudaError_t scale_by(cudaStream_t, const float*, std::size_t, float*, std::size_t);
template cudaError_t scale_by(cudaStream_t, const Bf16*, std::size_t, Bf16*, std::size_t);
template cudaError_t scale_by(cudaStream_t, const F16*, std::size_t, F16*, std::size_t);
template cudaError_t drop(cudaStream_t, const DropoutMask&, const float*, float*, std::size_t,
                          bool);
template cudaError_t drop(cudaStream_t, const DropoutMask&, const Bf16*, Bf16*, std::size_t, bool);
template cudaError_t drop(cudaStream_t, const DropoutMask&, const F16*, F16*, std::size_t, bool);

}  // namespace ballast::model::cuda
