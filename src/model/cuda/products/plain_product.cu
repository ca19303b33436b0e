#include "src/device/cuda/eight_values.h"
#include "src/device/cuda/kernel_language.h"
#include "src/model/cuda/products/products.h"

namespace ballast::model::cuda {
namespace {

/// A block computes a square tile of the result, and a thread kProductEach x kProductEach elements
/// of it.
constexpr int kProductTile = 64;
constexpr int kSide = 16;  ///< threads along a side of the tile
constexpr int kProductEach = kProductTile / kSide;
constexpr int kProductThreads = kSide * kSide;
/// Terms of the sums per step.
constexpr int kStep = 16;
/// One more column than a tile, so that neighbours in a column use different banks.
constexpr int kColumns = kProductTile + 1;

/// Part of a matrix in shared memory: [kStep, kProductTile].
using Panel = float[kStep][kColumns];

/// A matrix whose rows are the rows of the result, or its columns. Columns are the summed extent.
template <class T>
struct Side {
  const T* data;
  std::size_t row_step;
  std::size_t column_step;
  std::size_t rows;
};

/// Loads rows first .. first + kProductTile, columns column .. column + kStep, with zeros outside.
/// Neighbouring threads read neighbouring elements.
template <class T>
__device__ void load(Panel& panel, const Side<T>& side, std::size_t first, std::size_t column,
                     std::size_t columns) {
  const bool along_columns = side.column_step == 1;
  for (int i = static_cast<int>(threadIdx.x); i < kProductTile * kStep; i += kProductThreads) {
    const int row = along_columns ? i / kStep : i % kProductTile;
    const int k = along_columns ? i % kStep : i / kProductTile;
    const std::size_t from_row = first + static_cast<std::size_t>(row);
    const std::size_t from_column = column + static_cast<std::size_t>(k);
    float value = 0.0F;
    if (from_row < side.rows && from_column < columns) {
      value = device::widen(side.data[from_row * side.row_step + from_column * side.column_step]);
    }
    panel[k][row] = value;
  }
}

/// The result and what is added to it; null if nothing is.
template <class T, class D>
struct Target {
  D* data;
  std::size_t row_step;
  const D* addend;
  const T* bias;
};

/// Blocks are x: rows, y: columns of the result.
template <class T, class D>
__global__ void __launch_bounds__(kProductThreads)
    multiply_tiles(Side<T> a, Side<T> b, std::size_t terms, Target<T, D> target) {
  __shared__ Panel of_a;
  __shared__ Panel of_b;
  const std::size_t first_row = std::size_t{blockIdx.x} * kProductTile;
  const std::size_t first_column = std::size_t{blockIdx.y} * kProductTile;
  const int own_row = static_cast<int>(threadIdx.x) / kSide;
  const int own_column = static_cast<int>(threadIdx.x) % kSide;
  float sums[kProductEach][kProductEach] = {};
  for (std::size_t at = 0; at < terms; at += kStep) {
    load(of_a, a, first_row, at, terms);
    load(of_b, b, first_column, at, terms);
    __syncthreads();
    float parts[kProductEach][kProductEach] = {};
#pragma unroll
    for (int k = 0; k < kStep; ++k) {
#pragma unroll
      for (int i = 0; i < kProductEach; ++i) {
#pragma unroll
        for (int j = 0; j < kProductEach; ++j) {
          parts[i][j] =
              __fmaf_rn(of_a[k][own_row + i * kSide], of_b[k][own_column + j * kSide], parts[i][j]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kProductEach; ++i) {
#pragma unroll
      for (int j = 0; j < kProductEach; ++j) sums[i][j] = __fadd_rn(sums[i][j], parts[i][j]);
    }
    __syncthreads();
  }
  for (int i = 0; i < kProductEach; ++i) {
    const std::size_t row = first_row + static_cast<std::size_t>(own_row + i * kSide);
    for (int j = 0; j < kProductEach; ++j) {
      const std::size_t column = first_column + static_cast<std::size_t>(own_column + j * kSide);
      if (row >= a.rows || column >= b.rows) continue;
      const std::size_t place = row * target.row_step + column;
      float value = sums[i][j];
      if (target.addend != nullptr) value += device::widen(target.addend[place]);
      if (target.bias != nullptr) value += device::widen(target.bias[column]);
      device::narrow(value, target.data[place]);
    }
  }
}

template <class T>
Side<T> side_of(const Matrix& matrix, std::size_t row_step, std::size_t column_step,
                std::size_t rows) {
  return {static_cast<const T*>(matrix.data), row_step, column_step, rows};
}

template <class T, class D>
cudaError_t start_tiles(cudaStream_t stream, const Extents& e, const Matrix& a, const Matrix& b,
                        const Matrix& d, const void* addend, const void* bias) {
  const Target<T, D> target = {static_cast<D*>(const_cast<void*>(d.data)), d.row_step,
                               static_cast<const D*>(addend), static_cast<const T*>(bias)};
  const auto tiles = [](std::size_t extent) {
    return static_cast<unsigned>((extent + kProductTile - 1) / kProductTile);
  };
  return device::launch(
      {.stream = stream, .blocks = {tiles(e.m), tiles(e.n), 1}, .threads = kProductThreads},
      &multiply_tiles<T, D>, side_of<T>(a, a.row_step, a.column_step, e.m),
      side_of<T>(b, b.column_step, b.row_step, e.n), e.k, target);
}

template <class T>
cudaError_t start_of_type(cudaStream_t stream, const Extents& e, const Matrix& a, const Matrix& b,
                          const Matrix& d, const void* addend, const void* bias) {
  return d.type == DType::f32 ? start_tiles<T, float>(stream, e, a, b, d, addend, bias)
                              : start_tiles<T, T>(stream, e, a, b, d, addend, bias);
}

}  // namespace

cudaError_t plain_product(cudaStream_t stream, const Extents& extents, const Matrix& a,
                          const Matrix& b, const Matrix& d, const void* addend, const void* bias) {
  if (extents.m == 0 || extents.n == 0) return cudaSuccess;
  switch (a.type) {
    case DType::f32:
      return start_of_type<float>(stream, extents, a, b, d, addend, bias);
    case DType::bf16:
      return start_of_type<Bf16>(stream, extents, a, b, d, addend, bias);
    case DType::f16:
      break;
  }
  return start_of_type<F16>(stream, extents, a, b, d, addend, bias);
}

}  // namespace ballast::model::cuda
