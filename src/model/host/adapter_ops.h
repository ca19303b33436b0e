#pragma once

#include <cstddef>

#include "src/model/dropout.h"
#include "src/model/host/kernels.h"

namespace ballast::model::host {

/// The operations of adapters, a part of Ops. `T`: the training type.
template <class T>
class AdapterOps {
 public:
  AdapterOps() : scale_(best_kernels<T>().rows.scale) {}

  /// x *= factor.
  void scale(T* x, float factor, std::size_t size) const;
  /// y = x times the mask's factors (+ y).
  void drop(const DropoutMask& mask, const T* x, T* y, std::size_t size, bool add_to_y) const;

 private:
  decltype(RowKernels<T>::scale) scale_;
};

}  // namespace ballast::model::host
