#pragma once

#include <array>
#include <cstddef>

#include "ballast/core/dtype.h"

namespace ballast::model {

/// A matrix in device memory. Element (r, c) is at r * row_step + c * column_step (in elements).
/// One of the steps is 1.
struct Matrix {
  const void* data = nullptr;
  DType type = DType::f32;
  std::size_t row_step = 0;
  std::size_t column_step = 1;
};

template <class T>
Matrix matrix(const T* data, std::size_t row_step) {
  return {data, kTypeOf<T>, row_step, 1};
}
template <class T>
Matrix transposed(const T* data, std::size_t row_step) {
  return {data, kTypeOf<T>, 1, row_step};
}

/// The part of a matrix that begins at `row` and `column`.
inline Matrix part_of(const Matrix& m, std::size_t row, std::size_t column) {
  Matrix part = m;
  part.data = static_cast<const std::byte*>(m.data) +
              (row * m.row_step + column * m.column_step) * size_of(m.type);
  return part;
}

/// Extents of c[m, n] = a[m, k] * b[k, n].
struct Extents {
  std::size_t m = 0;
  std::size_t n = 0;
  std::size_t k = 0;
};

/// c[m, n] = a[m, k] * b[k, n].
struct Product {
  Extents extents;
  Matrix a;
  Matrix b;
  Matrix c;
};

/// A weight matrix with its bias. Gradients are null in a forward pass.
template <class T>
struct Linear {
  const T* weight = nullptr;  ///< [in, out], or [out, in] when `flipped`
  const T* bias = nullptr;    ///< [out] or null
  float* weight_gradient = nullptr;
  float* bias_gradient = nullptr;
  std::size_t in = 0;
  std::size_t out = 0;
  bool flipped = false;
  bool overwrites_gradient = false;  ///< overwrite the weight's gradient, do not add
};

/// y = x W, with rows of y `y_row` apart. Y: the training type or float.
template <class T, class Y>
Product forward_product(const Linear<T>& layer, const T* x, Y* y, std::size_t y_row,
                        std::size_t rows) {
  return {{rows, layer.out, layer.in},
          matrix(x, layer.in),
          layer.flipped ? transposed(layer.weight, layer.in) : matrix(layer.weight, layer.out),
          matrix(y, y_row)};
}

/// dx = dy W^T, with rows of dy `dy_row` apart. D: the training type or float.
template <class T, class D>
Product input_product(const Linear<T>& layer, const T* dy, std::size_t dy_row, D* dx,
                      std::size_t rows) {
  return {{rows, layer.in, layer.out},
          matrix(dy, dy_row),
          layer.flipped ? matrix(layer.weight, layer.in) : transposed(layer.weight, layer.out),
          matrix(dx, layer.in)};
}

/// dW = x^T dy, in the layout of the weight.
template <class T>
Product weight_product(const Linear<T>& layer, const T* x, const T* dy, std::size_t dy_row,
                       std::size_t rows) {
  if (layer.flipped) {
    return {{layer.out, layer.in, rows},
            transposed(dy, dy_row),
            matrix(x, layer.in),
            matrix(layer.weight_gradient, layer.in)};
  }
  return {{layer.in, layer.out, rows},
          transposed(x, layer.in),
          matrix(dy, dy_row),
          matrix(layer.weight_gradient, layer.out)};
}

/// Cache key of a prepared product: everything that it depends on.
struct ProductKey {
  std::array<std::size_t, 9> values;
  friend bool operator==(const ProductKey&, const ProductKey&) = default;
};

/// `flags`: up to 15 bits from the caller.
inline ProductKey product_key(const Extents& e, const Matrix& a, const Matrix& b, const Matrix& c,
                              std::size_t flags) {
  const auto type = [](const Matrix& m) { return static_cast<std::size_t>(m.type); };
  const std::size_t rest = type(a) | type(b) << 4U | type(c) << 8U | flags << 12U;
  return {{e.m, e.n, e.k, a.row_step, a.column_step, b.row_step, b.column_step, c.row_step, rest}};
}

/// FNV-1a over the values.
struct ProductKeyHash {
  std::size_t operator()(const ProductKey& key) const {
    std::size_t hash = 0xcbf29ce484222325U;
    for (const std::size_t value : key.values) hash = (hash ^ value) * 0x100000001b3U;
    return hash ^ (hash >> 29);
  }
};

}  // namespace ballast::model
