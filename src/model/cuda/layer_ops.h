#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "ballast/device/streams.h"

#include "src/model/compute/kernel_arguments.h"
#include "src/model/compute/layer.h"
#include "src/model/cuda/mixers/mixers.h"
#include "src/model/cuda/rows/rows.h"
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
  void output_gate(const T* x, const T* gate, std::size_t gate_step, T* y, std::size_t rows,
                   std::size_t width) const {
    check(cuda::sigmoid_gate(queue(), {rows, width, gate_step}, x, gate, y), "gate of attention");
  }
  void output_gate_backward(const T* x, T* gate, std::size_t gate_step, T* dy, std::size_t rows,
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

/// The operations of values that layers share besides the residual stream on the CUDA device,
/// documented at host::LinkOps. Each enqueues kernels on a stream.
template <class T>
class LinkOps {
 public:
  /// `links`: scratch memory for 2 values per token. `checks`: wait for each kernel and check it.
  LinkOps(device::CudaStream& stream, bool checks) : stream_(stream), checks_(checks) {}

  void sum_columns(const T* x, std::size_t step, std::size_t rows, std::size_t width, bool adds,
                   float* sums) const {
    check(put_sums(stream_.native(), x, step, {rows, width}, adds, sums),
          "sum of the gradients of shared keys and values", {rows, width});
  }
  void add_sums(const float* sums, std::size_t rows, std::size_t width, T* x,
                std::size_t step) const {
    check(cuda::add_sums(stream_.native(), sums, {rows, width}, x, step),
          "gradient of shared keys and values", {rows, width});
  }
  void mix_rows(const TokenRows<const T>& rows, const TokenMix& how, const T* x, std::size_t step,
                T* y) const {
    check(cuda::mix_rows(stream_.native(), rows, how, x, step, y), "inputs of a layer",
          {rows.size, rows.width});
  }
  void mix_rows_backward(const TokenRows<const T>& dy, const TokenMix& how, float* of_rows, T* dx,
                         std::size_t step) const {
    check(cuda::mix_rows_backward(stream_.native(), dy, how, of_rows, dx, step),
          "gradient of the inputs of a layer", {dy.size, dy.width});
  }

 private:
  void check(cudaError_t code, const char* what, ShapeOfWork shape) const {
    if (code == cudaSuccess && !checks_) return;
    check_work(code, what, shape, stream_);
  }

  device::CudaStream& stream_;
  bool checks_;
};

}  // namespace ballast::model::cuda
