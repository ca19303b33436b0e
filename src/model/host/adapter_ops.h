#pragma once

#include <cstddef>

#include "src/model/compute/dropout.h"
#include "src/model/compute/magnitudes.h"
#include "src/model/host/kernels.h"

namespace ballast::model::host {

/// The operations of adapters, a base of Ops. `T`: the training type.
template <class T>
class AdapterOps {
 public:
  AdapterOps() : scale_(best_kernels<T>().rows.scale) {}

  /// x *= factor.
  void scale(T* x, float factor, std::size_t size) const;
  /// y = x * (the mask's factors) (+ y).
  void drop(const DropoutMask& mask, const T* x, T* y, std::size_t size, bool add_to_y) const;

  /// For row i: inverse_norms[i] = 1 / ||W + s B A|| and gains[i] = magnitude / norm, both 0 for a
  /// row of zeros. The order in which squares are summed depends only on the shape.
  void compute_gains(const AdaptedRows<T>& rows, float* gains, float* inverse_norms) const;
  void scale_columns(const ScaledColumns<T>& columns) const;
  void add_column_products(const ColumnProducts<T>& columns, float* gradient) const;

 private:
  decltype(RowKernels<T>::scale) scale_;
};

}  // namespace ballast::model::host
