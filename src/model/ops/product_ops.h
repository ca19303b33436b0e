#pragma once

#include <cstddef>

#include "src/model/compute/kernel_arguments.h"
#include "src/model/compute/matrix.h"

namespace ballast::model {

/// Matrix products.
template <class T>
class ProductOps {
 public:
  virtual ~ProductOps() = default;

  /// y = x W (+ bias), with rows of y `y_row` apart.
  virtual void linear(const Linear<T>& map, const T* x, T* y, std::size_t y_row,
                      std::size_t rows) = 0;
  /// y = residual + x W (+ bias), rows without gaps.
  virtual void linear_onto(const Linear<T>& map, const T* x, const T* residual, T* y,
                           std::size_t rows) = 0;
  /// part = x W (+ bias) in fp32, rows without gaps.
  virtual void linear_part(const Linear<T>& map, const T* x, float* part, std::size_t rows) = 0;
  /// dx = dy W^T (+ dx), with rows of dy `dy_row` apart.
  virtual void linear_input(const Linear<T>& map, const T* dy, std::size_t dy_row, T* dx,
                            std::size_t rows, bool add_to_dx = false) {
    const Product p = input_product(map, dy, dy_row, dx, rows);
    multiply(p.extents, p.a, p.b, p.c, add_to_dx);
  }
  /// Variant of linear_input() whose result is in fp32.
  virtual void linear_input_part(const Linear<T>& map, const T* dy, std::size_t dy_row, float* dx,
                                 std::size_t rows, bool add_to_dx = false) {
    const Product p = input_product(map, dy, dy_row, dx, rows);
    multiply(p.extents, p.a, p.b, p.c, add_to_dx);
  }
  /// Adds x^T dy to the weight's gradient, or overwrites it (Linear::overwrites_gradient). Does
  /// nothing if the gradient is not wanted.
  virtual void linear_weight(const Linear<T>& map, const T* x, const T* dy, std::size_t dy_row,
                             std::size_t rows) {
    if (map.weight_gradient == nullptr) return;
    const Product p = weight_product(map, x, dy, dy_row, rows);
    multiply(p.extents, p.a, p.b, p.c, !map.overwrites_gradient);
  }
  /// c = a * b (+ c).
  virtual void multiply(const Extents& extents, const Matrix& a, const Matrix& b, const Matrix& c,
                        bool add_to_c = false) = 0;
};

/// Scales and sums of maps with adapters, for DoRA.
template <class T>
class AdapterOps {
 public:
  virtual ~AdapterOps() = default;

  /// For row i: inverse_norms[i] = 1 / ||W + s B A|| and scales[i] = magnitude / norm, both 0 for a
  /// row of zeros. The order in which squares are summed depends only on the shape.
  virtual void compute_dora_scales(const AdaptedRows<T>& rows, float* scales,
                                   float* inverse_norms) = 0;
  virtual void scale_columns(const ScaledColumns<T>& columns) = 0;
  virtual void add_column_products(const ColumnProducts<T>& columns, float* gradient) = 0;
};

}  // namespace ballast::model
