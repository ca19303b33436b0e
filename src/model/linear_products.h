#pragma once

#include <cstddef>

#include "src/model/matrix.h"
#include "src/model/parts.h"

namespace ballast::model {

/// c[m, n] = a[m, k] * b[k, n].
struct Product {
  Extents extents;
  Matrix a;
  Matrix b;
  Matrix c;
};

/// y = x W; rows of y are `y_row` apart.
template <class T>
Product forward_product(const Linear<T>& layer, const T* x, T* y, std::size_t y_row,
                        std::size_t rows) {
  return {{rows, layer.out, layer.in},
          matrix(x, layer.in),
          layer.flipped ? transposed(layer.weight, layer.in) : matrix(layer.weight, layer.out),
          matrix(y, y_row)};
}

/// dx = dy W^T; rows of dy are `dy_row` apart.
template <class T>
Product input_product(const Linear<T>& layer, const T* dy, std::size_t dy_row, T* dx,
                      std::size_t rows) {
  return {{rows, layer.in, layer.out},
          matrix(dy, dy_row),
          layer.flipped ? matrix(layer.weight, layer.in) : transposed(layer.weight, layer.out),
          matrix(dx, layer.in)};
}

/// dW = x^T dy, as the weight lies in memory.
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

}  // namespace ballast::model
