#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "ballast/core/dtype.h"
#include "ballast/model/kernels.h"
#include "ballast/model/packed_values.h"

#include "src/model/compute/formulas.h"
#include "src/model/compute/kernel_arguments.h"
#include "src/model/ops/row_arguments.h"

namespace ballast::device {
class Stream;
}  // namespace ballast::device

namespace ballast::model {

/// Norms of rows and of parts of rows.
template <class T>
class NormOps {
 public:
  virtual ~NormOps() = default;

  /// y = residual (null: 0) + norm(x).
  virtual void norm(const Norm<T>& weights, const T* x, T* y, std::size_t rows,
                    const T* residual = nullptr) = 0;
  /// dx = residual (null: 0) + gradient of x; dx may be residual, dy or x.
  virtual void norm_backward(const Norm<T>& weights, const T* x, const T* dy, const T* residual,
                             T* dx, std::size_t rows) = 0;
  /// Applies RMSNorm to each group of each row.
  virtual void norm_groups(const Norm<T>& weights, const Groups& groups, const T* x,
                           std::size_t x_step, T* y, std::size_t y_step) = 0;
  /// Replaces dy by the gradient of x.
  virtual void norm_groups_backward(const Norm<T>& weights, const Groups& groups, const T* x,
                                    std::size_t x_step, T* dy, std::size_t dy_step) = 0;
};

/// Operations on single elements of activations and gradients, and sums of columns.
template <class T>
class ElementwiseOps {
 public:
  virtual ~ElementwiseOps() = default;

  /// y = f(x).
  virtual void activate(Activation f, const T* x, T* y, std::size_t size) = 0;
  /// d *= f'(x). Adds column sums to `bias_gradient` unless it is null.
  virtual void activate_backward(Activation f, const T* x, T* d, float* bias_gradient,
                                 std::size_t rows, std::size_t width) = 0;
  /// y = `how` applied to gate and up. y has no gaps.
  virtual void glu(const Gating& how, const GateUp<T>& in, T* y) = 0;
  /// Replaces gate and up by their gradients, given dy.
  virtual void glu_backward(const Gating& how, const GateUp<T>& in, const T* dy) = 0;
  /// Adds column sums of x to `gradient`. Rows of x are `step` apart.
  virtual void add_column_sums(const T* x, std::size_t step, float* gradient, std::size_t rows,
                               std::size_t width) = 0;
  /// y [rows, width] += bias (null: 0).
  virtual void add_bias(const T* bias, float* y, std::size_t rows, std::size_t width) = 0;
  /// x *= factor.
  virtual void scale(T* x, float factor, std::size_t size) = 0;
  /// x *= the sum of the `addends`.
  virtual void scale_by(const T* addends, std::size_t count, T* x, std::size_t size) = 0;
  /// y = x * (the mask's factors) (+ y).
  virtual void drop(const DropoutMask& mask, const T* x, T* y, std::size_t size, bool add_to_y) = 0;
  virtual void zero(float* values, std::size_t size) = 0;
  /// Converts x to fp32.
  virtual void widen(const T* x, float* y, std::size_t size) = 0;
  /// sums += part.
  virtual void accumulate(const float* part, float* sums, std::size_t size) = 0;
  /// sum += the sum of the values, in double, rounded once.
  virtual void add_sum(const float* values, std::size_t count, float* sum) = 0;
  /// Copies values from host memory.
  virtual void put(std::span<const float> values, float* to) = 0;
  virtual void copy_bytes(const std::byte* from, std::byte* to, std::size_t size) = 0;
};

/// Operations that pack gradients and decode weights.
template <class T>
class PackingOps {
 public:
  virtual ~PackingOps() = default;

  /// Gives no row a sum row.
  virtual void forget_sum_rows(std::uint32_t* sum_row_of, std::size_t rows) = 0;
  /// Writes the sum rows of tokens [first, first + rows) of a micro-batch to the rows of the
  /// tokens.
  virtual void find_sum_rows(const Ids& ids, std::size_t first, std::size_t rows,
                             std::uint32_t* sum_row_of) = 0;
  /// Packs a gradient, see Compute::pack_gradient(). `partial`: one GradientStats per kStatsChunk
  /// values. `stats` may be null.
  virtual void pack(const UnpackedGradient& from, T* packed, std::size_t size,
                    GradientStats* partial, GradientStats* stats) = 0;
  /// Dequantises a matrix of a quantised base; ElementwiseOps::copy_bytes() copies the rest.
  virtual void dequantize_base(const QuantizedMatrix& matrix, T* out) = 0;

  // The following functions enqueue themselves on `stream`. Collectives call them, too, on threads
  // and streams that differ from those of WorkQueue::run().

  virtual void zero(device::Stream& stream, float* values, std::size_t size) = 0;
  /// See Compute::measure_gradient().
  virtual void measure(device::Stream& stream, const T* packed, std::size_t size,
                       GradientStats* partial, GradientStats* stats) = 0;
  /// See Compute::quantize_weights(). A scale per block of WeightCodes::kBlock elements.
  virtual void encode(device::Stream& stream, const T* weights, std::size_t blocks,
                      std::int8_t* codes, float* scales) = 0;
  /// See Compute::dequantize_weights().
  virtual void decode(device::Stream& stream, const std::int8_t* codes, const float* scales,
                      std::size_t blocks, T* weights) = 0;
};

}  // namespace ballast::model
