#pragma once

#include <cstddef>
#include <type_traits>

#include "ballast/core/dtype.h"

namespace ballast::model {

template <class T>
inline constexpr DType kType = std::is_same_v<T, float> ? DType::f32 : DType::bf16;

/// A matrix in device memory: element (r, c) is at r * row_step + c * column_step (elements); one
/// of the two steps is 1.
struct Matrix {
  const void* data = nullptr;
  DType type = DType::f32;
  std::size_t row_step = 0;
  std::size_t column_step = 1;
};

template <class T>
Matrix matrix(const T* data, std::size_t row_step) {
  return {data, kType<T>, row_step, 1};
}
template <class T>
Matrix transposed(const T* data, std::size_t row_step) {
  return {data, kType<T>, 1, row_step};
}

/// Extents of c[m, n] = a[m, k] * b[k, n].
struct Extents {
  std::size_t m = 0;
  std::size_t n = 0;
  std::size_t k = 0;
};

}  // namespace ballast::model
