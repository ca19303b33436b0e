#pragma once

#include <cstddef>

#include "ballast/core/kernel_times.h"

#include "src/model/compute/delta_shape.h"
#include "src/model/compute/layer.h"
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
  void gate(const T* x, const T* gate, std::size_t gate_step, T* y, std::size_t rows,
            std::size_t width) const;
  /// Replaces the gate by its gradient and dy by that of x.
  void gate_backward(const T* x, T* gate, std::size_t gate_step, T* dy, std::size_t rows,
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

}  // namespace ballast::model::host
