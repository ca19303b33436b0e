#pragma once

#include <cstddef>

#include "src/model/host/kernels.h"
#include "src/model/host/products.h"
#include "src/model/host/team.h"

namespace ballast::model::host {

/// A weight matrix with what belongs to it. Gradients are null in a forward pass.
template <class T>
struct Linear {
  const T* weight = nullptr;  ///< [in, out], or [out, in] when `flipped`
  const T* bias = nullptr;    ///< [out] or null
  float* weight_gradient = nullptr;
  float* bias_gradient = nullptr;
  std::size_t in = 0;
  std::size_t out = 0;
  bool flipped = false;
};

/// A norm's weights.
template <class T>
struct Norm {
  const T* weight = nullptr;
  const T* bias = nullptr;  ///< null: RMSNorm
  float* weight_gradient = nullptr;
  float* bias_gradient = nullptr;
};

/// Parts of blocks over all rows of a micro-batch, spread over the team. Per-thread sums of weight
/// gradients are added in thread order.
template <class T>
class Ops {
 public:
  /// `widest`: largest number of columns that a sum over rows has.
  Ops(const RowKernels<T>& kernels, std::size_t hidden, std::size_t widest, std::size_t threads,
      float epsilon);

  /// Floats of memory for the sums.
  [[nodiscard]] std::size_t sum_floats() const { return threads_ * 2 * sum_row_; }
  void set_sums(float* sums) { sums_ = sums; }

  void copy(const T* from, T* to, std::size_t size) const;

  void norm(const Norm<T>& weights, const T* x, T* y, std::size_t rows) const;
  /// dx = residual (null: 0) + gradient of x.
  void norm_backward(const Norm<T>& weights, const T* x, const T* dy, const T* residual, T* dx,
                     std::size_t rows) const;

  void gelu(const T* x, T* y, std::size_t size) const;
  /// d *= gelu'(x); adds column sums to `bias_gradient`.
  void gelu_backward(const T* x, T* d, float* bias_gradient, std::size_t rows,
                     std::size_t width) const;
  void swiglu(const T* gate, const T* up, T* y, std::size_t size) const;
  void swiglu_backward(T* gate, T* up, const T* dy, std::size_t size) const;
  void add_column_sums(const T* x, float* gradient, std::size_t rows, std::size_t width) const;

  /// y = x W (+ bias) (+ y); rows of y are `y_row` apart.
  void linear(const Linear<T>& layer, const T* x, T* y, std::size_t y_row, std::size_t rows,
              bool add_to_y = false);
  /// dx = dy W^T (+ dx); rows of dy are `dy_row` apart.
  void linear_input(const Linear<T>& layer, const T* dy, std::size_t dy_row, T* dx,
                    std::size_t rows, bool add_to_dx = false);
  /// Adds x^T dy to the weight's gradient.
  void linear_weight(const Linear<T>& layer, const T* x, const T* dy, std::size_t dy_row,
                     std::size_t rows);

  [[nodiscard]] const RowKernels<T>& kernels() const { return kernels_; }
  Products& products() { return products_; }
  [[nodiscard]] std::size_t threads() const { return threads_; }

 private:
  /// Zeroed sums of thread `part`: the first or second of its two rows.
  [[nodiscard]] float* sum(std::size_t part, std::size_t which) const {
    return sums_ + (2 * part + which) * sum_row_;
  }
  void clear_sums(std::size_t part, std::size_t width) const;
  void add_sums(std::size_t which, float* gradient, std::size_t width) const;

  const RowKernels<T>& kernels_;
  std::size_t hidden_;
  std::size_t sum_row_;
  std::size_t threads_;
  float epsilon_;
  float* sums_ = nullptr;
  Products products_;
};

}  // namespace ballast::model::host
