#include <algorithm>
#include <array>
#include <cstddef>
#include <memory>
#include <string>
#include <utility>

#include <fmt/format.h>

#include "ballast/core/error.h"

#include "src/model/cuda/attention/attention.h"
#include "src/model/cuda/mixers/mixers.h"
#include "src/model/cuda/ops.h"
#include "src/model/cuda/rows/rows.h"

namespace ballast::model::cuda {
namespace {

void log_own_attention(const Error& reason) {
  log(LogLevel::info, fmt::format("attention: using Ballast's kernels, because {}", reason.what()));
}

template <class T>
class CudaHeads final : public HeadOps<T>, OnStream {
 public:
  explicit CudaHeads(const State& state) : OnStream(state) {}

  void fill_angles(const Rotary& rotary, const Angles& angles,
                   const std::int32_t* positions) override {
    const AngleRows rows = {
        .count = angles.by_row ? extents_.shape.tokens() : extents_.shape.whole_length(),
        .length = extents_.shape.whole_length(),
        .positions = angles.by_row ? positions : nullptr,
        .by_document = angles.by_row};
    check(cuda::fill_angles(queue(), rotary, rows, angles.cosine, angles.sine),
          "angles of rotary positions", {rows.count, angles.half});
  }
  void rotate(T* x, std::size_t heads, const Angles& angles, const std::int32_t* positions,
              float direction) override {
    const AttentionShape& shape = state_->heads();
    const Rotation rotation = {
        .length = angles.by_row ? extents_.shape.tokens() : extents_.shape.whole_length(),
        .positions = angles.by_row ? nullptr : positions,
        .heads = heads,
        .head_dim = shape.head_dim,
        .half = angles.half,
        .interleaved = angles.interleaved,
        .cosine = angles.cosine,
        .sine = angles.sine,
        .direction = direction};
    check(cuda::rotate(queue(), x, shape.row(), rotation,
                       {extents_.shape.tokens(), heads * shape.head_dim}),
          "rotary positions", {extents_.shape.tokens(), heads, shape.head_dim});
  }
  void copy_groups(const Groups& groups, const T* from, const GroupSteps& from_steps, T* to,
                   const GroupSteps& to_steps, std::size_t zeros) override {
    check(cuda::copy_groups(queue(), {groups.rows, groups.count, groups.width, zeros}, from,
                            {from_steps.row, from_steps.group}, to, {to_steps.row, to_steps.group}),
          "copy of heads", {groups.rows, groups.count, groups.width});
  }
  void sum_groups(const Groups& groups, const T* from, const GroupSteps& steps, T* to,
                  std::size_t to_row) override {
    check(cuda::sum_groups(queue(), {groups.rows, groups.count, groups.width, 0}, from,
                           {steps.row, steps.group}, to, to_row),
          "sum of heads", {groups.rows, groups.count, groups.width});
  }
  void regroup(const Regrouping& how, const T* from, T* to) override {
    check(cuda::regroup(queue(), how, from, to), "exchange of heads", {how.rows(), how.width()});
  }
};

template <class T>
class CudaAttention final : public AttentionOps<T>, OnStream {
 public:
  explicit CudaAttention(const State& state) : OnStream(state) {}

  void use_heads(std::size_t number) override { state_->selected = number; }
  [[nodiscard]] std::size_t attention_scratch_bytes() const override {
    std::size_t most = 0;
    for (const AttentionShape& one : extents_.heads) {
      most = std::max(most, cuda::attention_scratch_bytes(one.by_heads(), sizeof(T)));
    }
    return most;
  }
  void attention(const AttentionMask& mask, const AttentionSinks<T>& sinks, const T* qkv, T* out,
                 float* log_sums, std::byte*) override {
    AttentionShape shape = state_->heads().by_heads();
    shape.mask = mask;
    bool done = false;
    if constexpr (kFusable<T>) {
      done = mask.window == 0 && mask.positions == nullptr && run_fused(qkv, out, log_sums);
    }
    if (!done) {
      const auto kernel =
          state_->options.set == KernelSet::plain ? &plain_attention<T> : &cuda::attention<T>;
      check(kernel(queue(), shape, qkv, out, log_sums), "attention", extents_of(shape));
    }
    if (sinks.logits == nullptr) return;
    check(cuda::add_sinks(queue(), shape, sinks.logits, out, log_sums), "sinks of attention",
          extents_of(shape));
  }
  void attention_backward(const AttentionMask& mask, const AttentionSinks<T>& sinks, const T* qkv,
                          const T* out, const float* log_sums, const T* dout, T* dqkv,
                          std::byte* scratch) override {
    AttentionShape shape = state_->heads().by_heads();
    shape.mask = mask;
    const auto kernel = state_->options.set == KernelSet::plain ? &plain_attention_backward<T>
                                                                : &cuda::attention_backward<T>;
    check(kernel(queue(), shape, qkv, out, log_sums, dout, dqkv, scratch), "gradient of attention",
          extents_of(shape));
    if (sinks.gradient == nullptr) return;
    check(cuda::add_sink_gradients(queue(), shape, sinks.logits, scratch, sinks.gradient),
          "gradient of the sinks of attention", extents_of(shape));
  }

 private:
  /// Returns cuDNN's attention, planned at the first call; null if Ballast's kernels run.
  FusedAttention* fused() {
    // Plans of cuDNN are for one shape.
    if (state_->attention == AttentionBackend::own || extents_.heads.size() > 1) return nullptr;
    if (fused_) return fused_.get();
    try {
      fused_ = std::make_unique<FusedAttention>(state_->heads().by_heads());
    } catch (const Error& error) {
      const std::string reason = error.what();
      if (state_->attention == AttentionBackend::cudnn)
        throw Error(ErrorCategory::device, "ballast.attention is \"cudnn\", but " + reason);
      state_->attention = AttentionBackend::own;
      log_own_attention(error);
    }
    return fused_.get();
  }
  /// Enqueues cuDNN's attention. Returns false if Ballast's kernels must run instead: also if the
  /// first execution fails, unless cuDNN was requested.
  bool run_fused([[maybe_unused]] const T* qkv, [[maybe_unused]] T* out,
                 [[maybe_unused]] float* log_sums) {
    FusedAttention* const engine = fused();
    if (engine == nullptr) return false;
    try {
      if constexpr (kFusable<T>)
        engine->forward(queue(), qkv, out, log_sums, state_->fused_workspace);
      check(cudaSuccess, "attention of cuDNN", extents_of(state_->heads().by_heads()));
    } catch (const Error& error) {
      if (fused_has_run_ || state_->attention == AttentionBackend::cudnn) throw;
      static_cast<void>(cudaGetLastError());  // the next check would report it
      state_->attention = AttentionBackend::own;
      fused_.reset();
      log_own_attention(error);
      return false;
    }
    fused_has_run_ = true;
    return true;
  }
  std::unique_ptr<FusedAttention> fused_;
  bool fused_has_run_ = false;
};

template <class T>
class CudaMixers final : public MixerOps<T>, OnStream {
 public:
  explicit CudaMixers(const State& state) : OnStream(state), shape_(extents_.delta) {}

  [[nodiscard]] std::size_t scratch_bytes() const override {
    if (shape_.key_heads == 0) return 0;
    return std::max({delta_scratch_bytes(shape_),
                     cuda::convolution_scratch_bytes(shape_.convolution()),
                     gated_norm_partials(shape_) * sizeof(float)});
  }
  [[nodiscard]] std::size_t convolution_scratch_bytes(
      const ConvolutionShape& shape) const override {
    return cuda::convolution_scratch_bytes(shape);
  }
  void convolve(const Convolution<T>& how, const T* x, T* y, std::byte* /*scratch*/) override {
    check(cuda::convolve(queue(), how, x, y), "convolution");
  }
  void convolve_backward(const Convolution<T>& how, const T* x, T* dy,
                         std::byte* scratch) override {
    check(cuda::convolve_backward(queue(), how, x, dy, scratch), "gradient of a convolution");
  }
  void gated_convolve(const Convolution<T>& how, const T* x, T* y,
                      std::byte* /*scratch*/) override {
    OnStream::check(cuda::gated_convolve(queue(), how, x, y), "short convolution",
                    {how.shape.tokens(), how.shape.channels, how.shape.taps});
  }
  void gated_convolve_backward(const Convolution<T>& how, const T* x, const T* dy, T* dx,
                               std::byte* scratch) override {
    OnStream::check(cuda::gated_convolve_backward(queue(), how, x, dy, dx, scratch),
                    "gradient of a short convolution",
                    {how.shape.tokens(), how.shape.channels, how.shape.taps});
  }
  void gated_norm(const Norm<T>& weights, const T* x, const T* gate, T* y) override {
    check(cuda::gated_norm(queue(), shape_, of(weights), x, gate, y), "gated norm");
  }
  void gated_norm_backward(const Norm<T>& weights, const T* x, const T* gate, T* dy, T* dgate,
                           std::byte* scratch) override {
    check(cuda::gated_norm_backward(queue(), shape_, of(weights), x, gate, dy, dgate,
                                    reinterpret_cast<float*>(scratch)),
          "gradient of a gated norm");
  }
  void recur(const DeltaInputs<T>& in, T* out, float* states, std::byte* scratch) override {
    check(cuda::recur(queue(), shape_, in, out, states, scratch), "gated delta net");
  }
  void recur_backward(const DeltaInputs<T>& in, const float* states, const T* dout,
                      const DeltaGradients<T>& to, std::byte* scratch) override {
    check(cuda::recur_backward(queue(), shape_, in, states, dout, to, scratch),
          "gradient of a gated delta net");
  }
  void output_gate(const T* x, const T* gate, std::size_t gate_step, T* y, std::size_t rows,
                   std::size_t width) override {
    check(cuda::sigmoid_gate(queue(), {rows, width, gate_step}, x, gate, y), "gate of attention");
  }
  void output_gate_backward(const T* x, T* gate, std::size_t gate_step, T* dy, std::size_t rows,
                            std::size_t width) override {
    check(cuda::sigmoid_gate_backward(queue(), {rows, width, gate_step}, x, gate, dy),
          "gradient of a gate of attention");
  }

 private:
  [[nodiscard]] GatedNorm<T> of(const Norm<T>& weights) const {
    return {weights.weight, weights.weight_gradient, weights.epsilon_or(extents_.epsilon)};
  }
  void check(cudaError_t code, std::string_view what) const {
    OnStream::check(code, what,
                    {shape_.tokens(), shape_.key_heads, shape_.value_heads, shape_.key_width,
                     shape_.value_width});
  }
  const DeltaShape& shape_;
};

template <class T>
class CudaLinks final : public LinkOps<T>, OnStream {
 public:
  explicit CudaLinks(const State& state) : OnStream(state) {}

  void sum_columns(const T* x, std::size_t step, std::size_t rows, std::size_t width, bool adds,
                   float* sums) override {
    check(put_sums(queue(), x, step, {rows, width}, adds, sums),
          "sum of the gradients of shared keys and values", {rows, width});
  }
  void add_sums(const float* sums, std::size_t rows, std::size_t width, T* x,
                std::size_t step) override {
    check(cuda::add_sums(queue(), sums, {rows, width}, x, step),
          "gradient of shared keys and values", {rows, width});
  }
  void mix_rows(const TokenRows<const T>& rows, const TokenMix& how, const T* x, std::size_t step,
                T* y) override {
    check(cuda::mix_rows(queue(), rows, how, x, step, y), "inputs of a layer",
          {rows.size, rows.width});
  }
  void mix_rows_backward(const TokenRows<const T>& dy, const TokenMix& how, float* of_rows, T* dx,
                         std::size_t step) override {
    check(cuda::mix_rows_backward(queue(), dy, how, of_rows, dx, step),
          "gradient of the inputs of a layer", {dy.size, dy.width});
  }
};

}  // namespace

template <class T>
void add_attention_ops(const State& state, DeviceOps<T>& to) {
  to.heads = std::make_shared<CudaHeads<T>>(state);
  to.attention = std::make_shared<CudaAttention<T>>(state);
  to.mixers = std::make_shared<CudaMixers<T>>(state);
  to.links = std::make_shared<CudaLinks<T>>(state);
}

template void add_attention_ops(const State&, DeviceOps<float>&);
template void add_attention_ops(const State&, DeviceOps<Bf16>&);
template void add_attention_ops(const State&, DeviceOps<F16>&);

}  // namespace ballast::model::cuda
