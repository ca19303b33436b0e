#pragma once

#include <cstddef>
#include <cstdint>

#include "ballast/core/clocks.h"
#include "ballast/model/lora.h"
#include "ballast/model/packed_values.h"

#include "src/model/compute/kernel_arguments.h"
#include "src/model/compute/layer.h"
#include "src/model/compute/routing.h"
#include "src/model/host/delta_rule.h"
#include "src/model/host/kernel_tables.h"

namespace ballast::model::host {

/// The operations of gated delta nets and of gated attention on the host device. Sums over rows
/// have fixed parts, so results do not depend on the number of threads.
template <class T>
class MixerOps {
 public:
  /// `threads`: size of the OpenMP team that runs them. `epsilon`: that of the norms.
  MixerOps(const DeltaShape& shape, const TypeKernels<T>& kernels, std::size_t threads,
           float epsilon);

  /// Bytes of the scratch memory that the functions get.
  [[nodiscard]] std::size_t scratch_bytes() const;

  /// y [N, channels] = SiLU(convolution of x), with rows of x DeltaShape::row() apart.
  void convolve(const Convolution<T>& how, const T* x, T* y, std::byte* scratch) const;
  /// Replaces dy by the gradient of x. Rows of both are DeltaShape::row() apart.
  void convolve_backward(const Convolution<T>& how, const T* x, T* dy, std::byte* scratch) const;
  /// y [N, values] = RMSNorm(x) * SiLU(gate) per head, with rows of the gate DeltaShape::row()
  /// apart.
  void gated_norm(const Norm<T>& weights, const T* x, const T* gate, T* y) const;
  /// Replaces dy by the gradient of x. Rows of both gates are DeltaShape::row() apart.
  void gated_norm_backward(const Norm<T>& weights, const T* x, const T* gate, T* dy, T* dgate,
                           std::byte* scratch) const;
  /// Arguments as for DeltaRule.
  void recur(const DeltaInputs<T>& in, T* out, float* states, std::byte* scratch) {
    const KernelClock clock(KernelGroup::delta_rule);
    rule_.forward(in, out, states, scratch);
  }
  void recur_backward(const DeltaInputs<T>& in, const float* states, const T* dout,
                      const DeltaGradients<T>& to, std::byte* scratch) {
    const KernelClock clock(KernelGroup::delta_rule);
    rule_.backward(in, states, dout, to, scratch);
  }
  /// y [rows, width] = x * sigmoid(gate), with rows of the gate `gate_step` apart.
  void output_gate(const T* x, const T* gate, std::size_t gate_step, T* y, std::size_t rows,
                   std::size_t width) const;
  /// Replaces the gate by its gradient and dy by that of x.
  void output_gate_backward(const T* x, T* gate, std::size_t gate_step, T* dy, std::size_t rows,
                            std::size_t width) const;

 private:
  struct Scratch {
    float* weights;  ///< [taps, channels]
    float* sums;     ///< [taps, channels], or [parts, value_width]
  };
  Scratch take_scratch(Bump& bump) const;
  [[nodiscard]] Scratch scratch_of(std::byte* scratch) const;
  void load_taps(const Convolution<T>& how, float* weights) const;
  [[nodiscard]] ConvolvedRows rows_of(const Convolution<T>& how, std::size_t begin,
                                      std::size_t end) const {
    return {begin, end, how.positions, shape_.length, shape_.taps};
  }

  DeltaShape shape_;
  const MixerKernels<T>& kernels_;
  float epsilon_;
  DeltaRule<T> rule_;
};

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

// The part of routing that is in fp32 and double for every training type. Ops adds the rest and
// documents the arguments.

/// Computes scores, choice and weights of one row. `logits`: the row's [experts]; null for a
/// padding row, which chooses nothing. With sigmoid, corrected scores overwrite the logits.
/// `correction`: [experts], or null.
void route_row(const RouterShape& shape, float* logits, const float* correction, std::size_t row,
               const Routing& to);
/// Writes the places of the rows' choices, sorted by expert, then by row. `starts`: see
/// Ops::route().
void place_choices(const RouterShape& shape, const Routing& to, std::int32_t* starts);

void add_router_totals(const RouterShape& shape, const Routing& routing, bool first,
                       const RouterTotals& totals);
void router_losses(const RouterShape& shape, const RouterTotals& totals, double* losses);

/// Gradients of the logits, in double.
class RouterGradient {
 public:
  RouterGradient(const RouterShape& shape, const Routing& routing, const RouterTotals& totals,
                 const RouterLossScales& scales);
  /// Writes the gradients [experts] of one row.
  void differentiate(std::size_t row, double* gradients) const;

 private:
  /// Adds the gradients of the chosen experts' probabilities.
  void add_choices(std::size_t row, double* gradients) const;

  const RouterShape& shape_;
  const Routing& routing_;
  const double* choices_ = nullptr;  ///< null: without router losses
  double rows_ = 0.0;
  double balance_ = 0.0;
  double z_ = 0.0;
};

/// Dequantises all elements of `matrix` in fp32 and rounds them to T (nearest even), on a team of
/// threads. One kernel serves all instruction sets, because elements of a 4-bit block take only 16
/// products.
template <class T>
void dequantize_base(const QuantizedMatrix& matrix, T* out);

/// Copies `size` bytes on a team of threads.
void copy_bytes(const std::byte* from, std::byte* to, std::size_t size);

}  // namespace ballast::model::host
