#pragma once

#include <cstddef>

#include "ballast/core/dtype.h"

#include "src/model/compute/matrix.h"

namespace ballast::model::cuda {

/// Returns `matrix` from element (row, column) on.
inline Matrix from_element(const Matrix& matrix, std::size_t row, std::size_t column) {
  const std::size_t elements = row * matrix.row_step + column * matrix.column_step;
  Matrix part = matrix;
  part.data = static_cast<const std::byte*>(matrix.data) + elements * size_of(matrix.type);
  return part;
}

/// Returns the multiple of 8 at which a product is cut along `extent`, or `extent` if it is not.
constexpr std::size_t whole_eights(std::size_t extent) {
  constexpr std::size_t kLeast = 64;  // a smaller product is not worth a second launch
  return extent >= kLeast ? extent / 8 * 8 : extent;
}

/// Computes d = a * b, or d += a * b with `adds`, by calls of multiply(extents, a, b, d, adds) for
/// parts: an extent of 16-bit matrices along which elements follow each other is cut before its
/// remainder by 8. cuBLASLt's fast kernels load 8 elements at once and exist only for whole eights:
/// on an H200 a product with 50257 columns takes four times as long as one with 50256. Matrices as
/// for Products. Where the summed extent is cut, d is fp32, because the second part adds to it.
template <class Multiply>
void in_whole_eights(const Extents& extents, const Matrix& a, const Matrix& b, const Matrix& d,
                     bool adds, const Multiply& multiply) {
  const auto whole = [&](std::size_t extent, bool in_sequence) {
    return a.type != DType::f32 && in_sequence ? whole_eights(extent) : extent;
  };
  Extents first = extents;
  Extents rest = extents;
  if (const std::size_t n = whole(extents.n, true); n < extents.n) {
    first.n = n;
    rest.n -= n;
    in_whole_eights(first, a, b, d, adds, multiply);
    multiply(rest, a, from_element(b, 0, n), from_element(d, 0, n), adds);
  } else if (const std::size_t m = whole(extents.m, a.row_step == 1); m < extents.m) {
    first.m = m;
    rest.m -= m;
    in_whole_eights(first, a, b, d, adds, multiply);
    multiply(rest, from_element(a, m, 0), b, from_element(d, m, 0), adds);
  } else if (const std::size_t k = whole(extents.k, a.column_step == 1 || b.row_step == 1);
             k < extents.k && d.type == DType::f32) {
    first.k = k;
    rest.k -= k;
    multiply(first, a, b, d, adds);
    multiply(rest, from_element(a, 0, k), from_element(b, k, 0), d, true);
  } else {
    multiply(extents, a, b, d, adds);
  }
}

}  // namespace ballast::model::cuda
