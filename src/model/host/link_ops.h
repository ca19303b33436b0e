#pragma once

#include <cstddef>
#include <cstdint>

#include "src/model/compute/token_rows.h"
#include "src/model/host/kernel_tables.h"

namespace ballast::model::host {

/// The operations of values that layers share besides the residual stream, on the host device. They
/// are elementwise, so results do not depend on the number of threads.
template <class T>
class LinkOps {
 public:
  explicit LinkOps(const RowKernels<T>& kernels) : kernels_(kernels) {}

  /// sums [rows, width] = x, or += x if `adds`. Rows of x are `step` apart.
  void sum_columns(const T* x, std::size_t step, std::size_t rows, std::size_t width, bool adds,
                   float* sums) const;
  /// x += sums [rows, width], rounded once. Rows of x are `step` apart.
  void add_sums(const float* sums, std::size_t rows, std::size_t width, T* x,
                std::size_t step) const;
  /// y = (x + scale * rows) * factor. Rows of x are `step` apart.
  void mix_rows(const TokenRows<const T>& rows, const TokenMix& how, const T* x, std::size_t step,
                T* y) const;
  /// Gradients of mix_rows() for its result's gradient dy: of_rows [size, width] = dy * factor *
  /// scale and dx = dy * factor, each unless it is null. Rows of dx are `step` apart.
  void mix_rows_backward(const TokenRows<const T>& dy, const TokenMix& how, float* of_rows, T* dx,
                         std::size_t step) const;

 private:
  const RowKernels<T>& kernels_;
};

}  // namespace ballast::model::host
