#pragma once

#include <cstddef>

#include "src/model/compute/matrix.h"

namespace ballast::model {

/// Tensors from which kernels compute the norms ||W + s B A|| of a map's outputs.
template <class T>
struct AdaptedRows {
  Linear<T> map;                  ///< W
  const T* b = nullptr;           ///< [out, rank]
  const T* magnitudes = nullptr;  ///< [out]
  const float* cross = nullptr;   ///< W A^T [out, rank]
  const float* gram = nullptr;    ///< A A^T [rank, rank]
  std::size_t rank = 0;
  float scale = 1.0F;  ///< s
};

/// The adapter's contribution to the squared norm of a row: 2 s b . (A w) + s^2 ||b A||^2 (arXiv
/// 2402.09353, equation 5, expanded). `b(k)`: element k of the row of B; `cross`: the row of W A^T.
template <class Row>
constexpr float added_square(const Row& b, const float* cross, const float* gram, std::size_t rank,
                             float scale) {
  float mixed = 0.0F;
  float square = 0.0F;
  for (std::size_t k = 0; k < rank; ++k) {
    float inner = 0.0F;
    for (std::size_t l = 0; l < rank; ++l) inner += gram[k * rank + l] * b(l);
    mixed += b(k) * cross[k];
    square += b(k) * inner;
  }
  return scale * (2.0F * mixed + scale * square);
}

/// y = residual + x * scales + bias by column, for arrays [rows, width]. Null scales are 1; a null
/// bias or residual is 0. y may be x.
template <class T>
struct ScaledColumns {
  const float* scales = nullptr;
  const T* x = nullptr;
  std::size_t x_step = 0;
  T* y = nullptr;
  std::size_t y_step = 0;  ///< stride of y and of the residual
  std::size_t rows = 0;
  std::size_t width = 0;
  const T* bias = nullptr;
  const T* residual = nullptr;
};

/// gradient[c] += factors[c] * sum over the rows r of x[r, c] y[r, c].
template <class T>
struct ColumnProducts {
  const T* x = nullptr;
  std::size_t x_step = 0;
  const T* y = nullptr;
  std::size_t y_step = 0;
  const float* factors = nullptr;
  std::size_t rows = 0;
  std::size_t width = 0;
};

}  // namespace ballast::model
