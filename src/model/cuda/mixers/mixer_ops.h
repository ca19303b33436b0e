#pragma once

#include <algorithm>
#include <cstddef>

#include "ballast/device/cuda_stream.h"

#include "src/model/compute/delta_shape.h"
#include "src/model/compute/layer.h"
#include "src/model/cuda/mixers/mixers.h"
#include "src/model/cuda/work_check.h"

namespace ballast::model::cuda {

/// The operations of gated delta nets and of gated attention on the CUDA device, documented at
/// host::MixerOps. Each enqueues kernels on the stream of the last call of use().
template <class T>
class MixerOps {
 public:
  /// `epsilon`: that of the norms. `checks`: wait for each kernel and check it.
  MixerOps(const DeltaShape& shape, float epsilon, bool checks)
      : shape_(shape), epsilon_(epsilon), checks_(checks) {}

  void use(device::CudaStream* stream) { stream_ = stream; }

  [[nodiscard]] std::size_t scratch_bytes() const {
    if (shape_.key_heads == 0) return 0;
    return std::max({delta_scratch_bytes(shape_), convolution_scratch_bytes(shape_),
                     gated_norm_partials(shape_) * sizeof(float)});
  }

  void convolve(const Convolution<T>& how, const T* x, T* y, std::byte* /*scratch*/) const {
    check(cuda::convolve(queue(), shape_, how, x, y), "convolution");
  }
  void convolve_backward(const Convolution<T>& how, const T* x, T* dy, std::byte* scratch) const {
    check(cuda::convolve_backward(queue(), shape_, how, x, dy, scratch),
          "gradient of a convolution");
  }
  void gated_norm(const Norm<T>& weights, const T* x, const T* gate, T* y) const {
    check(cuda::gated_norm(queue(), shape_, of(weights), x, gate, y), "gated norm");
  }
  void gated_norm_backward(const Norm<T>& weights, const T* x, const T* gate, T* dy, T* dgate,
                           std::byte* scratch) const {
    check(cuda::gated_norm_backward(queue(), shape_, of(weights), x, gate, dy, dgate,
                                    reinterpret_cast<float*>(scratch)),
          "gradient of a gated norm");
  }
  void recur(const DeltaInputs<T>& in, T* out, float* states, std::byte* scratch) const {
    check(cuda::recur(queue(), shape_, in, out, states, scratch), "gated delta net");
  }
  void recur_backward(const DeltaInputs<T>& in, const float* states, const T* dout,
                      const DeltaGradients<T>& to, std::byte* scratch) const {
    check(cuda::recur_backward(queue(), shape_, in, states, dout, to, scratch),
          "gradient of a gated delta net");
  }
  void gate(const T* x, const T* gate, std::size_t gate_step, T* y, std::size_t rows,
            std::size_t width) const {
    check(cuda::sigmoid_gate(queue(), {rows, width, gate_step}, x, gate, y), "gate of attention");
  }
  void gate_backward(const T* x, T* gate, std::size_t gate_step, T* dy, std::size_t rows,
                     std::size_t width) const {
    check(cuda::sigmoid_gate_backward(queue(), {rows, width, gate_step}, x, gate, dy),
          "gradient of a gate of attention");
  }

 private:
  [[nodiscard]] cudaStream_t queue() const { return stream_->native(); }
  [[nodiscard]] GatedNorm<T> of(const Norm<T>& weights) const {
    return {weights.weight, weights.weight_gradient, weights.epsilon_or(epsilon_)};
  }
  void check(cudaError_t code, const char* what) const {
    if (code == cudaSuccess && !checks_) return;
    check_work(code, what,
               {shape_.tokens(), shape_.key_heads, shape_.value_heads, shape_.key_width,
                shape_.value_width},
               *stream_);
  }

  DeltaShape shape_;
  float epsilon_;
  bool checks_;
  device::CudaStream* stream_ = nullptr;
};

}  // namespace ballast::model::cuda
