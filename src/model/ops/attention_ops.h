#pragma once

#include <cstddef>
#include <cstdint>

#include "ballast/model/attention.h"

#include "src/model/compute/kernel_arguments.h"
#include "src/model/description/rotary_angles.h"
#include "src/model/ops/row_arguments.h"

namespace ballast::model {

/// Operations on the heads of queries, keys and values.
template <class T>
class HeadOps {
 public:
  virtual ~HeadOps() = default;

  /// Writes the cosines and sines of position * frequency, times the factor, computed in double and
  /// rounded once: for all positions, or for all rows, given their `positions` as in rotate().
  virtual void fill_angles(const Rotary& rotary, const Angles& angles,
                           const std::int32_t* positions) = 0;
  /// Rotates `heads` heads of qkv, whose first is at `x` in the first row. `x` may be inside of a
  /// head: then the values before it do not rotate. `positions` [tokens] are those in the whole
  /// sequence (null: rows are whole sequences, each one document). `direction` -1 rotates back.
  virtual void rotate(T* x, std::size_t heads, const Angles& angles, const std::int32_t* positions,
                      float direction) = 0;
  /// Copies groups of columns of each row, and writes `zeros` zeros after each.
  virtual void copy_groups(const Groups& groups, const T* from, const GroupSteps& from_steps, T* to,
                           const GroupSteps& to_steps, std::size_t zeros = 0) = 0;
  /// Writes the sums of each row's groups. They are added in order in fp32 and rounded once.
  virtual void sum_groups(const Groups& groups, const T* from, const GroupSteps& steps, T* to,
                          std::size_t to_row) = 0;
  /// Copies rows from one order to another.
  virtual void regroup(const Regrouping& how, const T* from, T* to) = 0;
};

/// softmax(Q K^T * AttentionShape::score_scale()) V under a causal mask.
template <class T>
class AttentionOps {
 public:
  virtual ~AttentionOps() = default;

  /// Selects the shape of heads for the following calls of attention(), attention_backward() and
  /// HeadOps::rotate(): its number in KernelExtents::heads. At first it is 0.
  virtual void use_heads(std::size_t number) = 0;
  /// Bytes of the scratch memory that the functions get.
  [[nodiscard]] virtual std::size_t attention_scratch_bytes() const = 0;
  /// qkv [tokens, row()], out [tokens, width()]. Writes log_sums [sequences, heads, length] for
  /// attention_backward(); they include sinks.
  virtual void attention(const AttentionMask& mask, const AttentionSinks<T>& sinks, const T* qkv,
                         T* out, float* log_sums, std::byte* scratch) = 0;
  /// out and log_sums: results of attention(). dout: gradient of out. Writes dqkv.
  virtual void attention_backward(const AttentionMask& mask, const AttentionSinks<T>& sinks,
                                  const T* qkv, const T* out, const float* log_sums, const T* dout,
                                  T* dqkv, std::byte* scratch) = 0;
};

/// Operations of gated delta nets, short convolutions and gated attention. Sums over rows have
/// fixed parts, so results do not depend on the number of threads.
template <class T>
class MixerOps {
 public:
  virtual ~MixerOps() = default;

  /// Bytes of the scratch memory that the functions get.
  [[nodiscard]] virtual std::size_t scratch_bytes() const = 0;
  /// Bytes of the scratch memory of a convolution that is not part of a delta net.
  [[nodiscard]] virtual std::size_t convolution_scratch_bytes(
      const ConvolutionShape& shape) const = 0;
  /// y [N, channels] = SiLU(convolution of x), without biases.
  virtual void convolve(const Convolution<T>& how, const T* x, T* y, std::byte* scratch) = 0;
  /// Replaces dy by the gradient of x. Rows of both are x_step apart.
  virtual void convolve_backward(const Convolution<T>& how, const T* x, T* dy,
                                 std::byte* scratch) = 0;
  /// y [N, channels] = C * (convolution of B * x, plus biases), for rows [B | C | x].
  virtual void gated_convolve(const Convolution<T>& how, const T* x, T* y, std::byte* scratch) = 0;
  /// Writes the gradients dx of [B | C | x], with rows x_step apart, for dy [N, channels].
  virtual void gated_convolve_backward(const Convolution<T>& how, const T* x, const T* dy, T* dx,
                                       std::byte* scratch) = 0;
  /// y [N, values] = RMSNorm(x) * SiLU(gate) per head, with rows of the gate DeltaShape::row()
  /// apart.
  virtual void gated_norm(const Norm<T>& weights, const T* x, const T* gate, T* y) = 0;
  /// Replaces dy by the gradient of x. Rows of both gates are DeltaShape::row() apart.
  virtual void gated_norm_backward(const Norm<T>& weights, const T* x, const T* gate, T* dy,
                                   T* dgate, std::byte* scratch) = 0;
  /// The recurrence of a gated delta net (host/delta_rule.h). Writes out [N, values()] and `states`
  /// [states()].
  virtual void recur(const DeltaInputs<T>& in, T* out, float* states, std::byte* scratch) = 0;
  /// `states`: results of recur(). `dout`: gradient of out.
  virtual void recur_backward(const DeltaInputs<T>& in, const float* states, const T* dout,
                              const DeltaGradients<T>& to, std::byte* scratch) = 0;
  /// y [rows, width] = x * sigmoid(gate), with rows of the gate `gate_step` apart.
  virtual void output_gate(const T* x, const T* gate, std::size_t gate_step, T* y, std::size_t rows,
                           std::size_t width) = 0;
  /// Replaces the gate by its gradient and dy by that of x.
  virtual void output_gate_backward(const T* x, T* gate, std::size_t gate_step, T* dy,
                                    std::size_t rows, std::size_t width) = 0;
};

/// Operations of values that layers share besides the residual stream. They are elementwise.
template <class T>
class LinkOps {
 public:
  virtual ~LinkOps() = default;

  /// sums [rows, width] = x, or += x if `adds`. Rows of x are `step` apart.
  virtual void sum_columns(const T* x, std::size_t step, std::size_t rows, std::size_t width,
                           bool adds, float* sums) = 0;
  /// x += sums [rows, width], rounded once. Rows of x are `step` apart.
  virtual void add_sums(const float* sums, std::size_t rows, std::size_t width, T* x,
                        std::size_t step) = 0;
  /// y = (x + scale * rows) * factor. Rows of x are `step` apart.
  virtual void mix_rows(const TokenRows<const T>& rows, const TokenMix& how, const T* x,
                        std::size_t step, T* y) = 0;
  /// Gradients of mix_rows() for its result's gradient dy: of_rows [size, width] = dy * factor *
  /// scale and dx = dy * factor, each unless it is null. Rows of dx are `step` apart.
  virtual void mix_rows_backward(const TokenRows<const T>& dy, const TokenMix& how, float* of_rows,
                                 T* dx, std::size_t step) = 0;
};

}  // namespace ballast::model
