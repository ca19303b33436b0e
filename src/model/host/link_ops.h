#pragma once

#include <cstddef>
#include <cstdint>

#include "src/model/compute/token_rows.h"
#include "src/model/host/kernel_tables.h"

namespace ballast::model::host {

/// The operations of values that layers share besides the residual stream, on the host device. They
/// are elementwise, or add in token order, so results do not depend on the number of threads.
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
  /// dx = dy * factor, unless dx is null. Adds dy * factor * scale to the rows of the tokens,
  /// unless the table is null.
  void mix_rows_backward(const TokenRows<float>& table, const TokenMix& how,
                         const std::int32_t* tokens, std::size_t rows, const T* dy, T* dx,
                         std::size_t step) const;

 private:
  const RowKernels<T>& kernels_;
};

}  // namespace ballast::model::host
