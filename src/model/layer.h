#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>

#include "src/model/parts.h"

namespace ballast::model {

// Forward and backward of blocks, told once for all devices: `Ops` are the operations of one device
// (host/ops.h, cuda/ops.h), whose arguments are views into its memory. What one device fuses, its
// operations do in one go; what depends on a thread's team or a stream they know themselves.

/// Intermediates of one layer, with N tokens, H hidden_size, I intermediate_size: what the forward
/// pass leaves is what the backward pass starts from, and destroys.
template <class T>
struct LayerMemory {
  T* norm1 = nullptr;         ///< [N, H] input of the attention's projection
  T* qkv = nullptr;           ///< [N, queries | keys | values]
  T* attention = nullptr;     ///< [N, H]
  T* middle = nullptr;        ///< [N, H] residual stream between attention and MLP
  T* norm2 = nullptr;         ///< [N, H] input of the MLP
  T* hidden = nullptr;        ///< [N, I] gelu's input, or the gate
  T* up = nullptr;            ///< [N, I] llama
  T* activated = nullptr;     ///< [N, I], later its gradient
  T* dqkv = nullptr;          ///< like qkv, in the place of hidden, up and activated
  T* gradient = nullptr;      ///< [N, H] of norm2, attention, norm1 in turn; in the place of norm2
  float* log_sums = nullptr;  ///< of attention
};

/// Forward and backward of one transformer layer.
template <class Ops>
class Layer {
 public:
  using T = typename Ops::Value;

  Layer(const ModelConfig& config, const AttentionShape& shape, Ops& ops)
      : shape_(shape),
        tokens_(shape.tokens()),
        size_(shape.tokens() * config.hidden_size),
        intermediate_(config.intermediate_size),
        gated_(config.family == Family::llama),
        ops_(ops) {}
  virtual ~Layer() = default;
  Layer(const Layer&) = delete;
  Layer& operator=(const Layer&) = delete;

  /// Takes the memory of one call.
  void take_memory(Bump& bump) {
    shared_ = take_intermediates(bump);
    attention_scratch_ = bump.take<std::byte>(ops_.attention_scratch_bytes());
  }

  /// Of one call, where they are kept.
  [[nodiscard]] std::size_t intermediate_bytes() const {
    Bump counting;
    take_intermediates(counting);
    return counting.used();
  }

  /// Takes memory of what lasts from call to call: between two calls of a layer others use what
  /// take_memory() takes.
  virtual void take_lasting_memory(Bump& /*bump*/) {}

  /// Views as in Compute::layer_forward; `kept`: nullptr where nothing is kept.
  void forward(const BlockWeights<T>& block, const T* in, T* out, std::byte* kept) {
    use(kept);
    compute(block, in);
    project(block, out);
  }
  /// Views as in Compute::layer_backward.
  void backward(const BlockWeights<T>& block, const T* in, T* dy, std::byte* kept) {
    use(kept);
    if (kept == nullptr) compute(block, in);
    differentiate(block, in, dy);
  }

 protected:
  /// Everything but the last product: the intermediates.
  virtual void compute(const BlockWeights<T>& block, const T* in) = 0;
  /// The last product.
  virtual void project(const BlockWeights<T>& block, T* out) = 0;
  /// The backward pass, from the intermediates.
  virtual void differentiate(const BlockWeights<T>& block, const T* in, T* dy) = 0;

  void attend() {
    ops_.attention(memory_.qkv, memory_.attention, memory_.log_sums, attention_scratch_);
  }
  /// gradient (of attention) -> dqkv.
  void attend_backward() {
    ops_.attention_backward(memory_.qkv, memory_.attention, memory_.log_sums, memory_.gradient,
                            memory_.dqkv, attention_scratch_);
  }

  AttentionShape shape_;
  std::size_t tokens_;
  std::size_t size_;          ///< N * H
  std::size_t intermediate_;  ///< I
  bool gated_;
  Ops& ops_;
  LayerMemory<T> memory_;  ///< of the call at hand

 private:
  LayerMemory<T> take_intermediates(Bump& bump) const {
    LayerMemory<T> memory;
    memory.norm1 = bump.take<T>(size_);
    memory.qkv = bump.take<T>(tokens_ * shape_.row());
    memory.attention = bump.take<T>(size_);
    memory.middle = bump.take<T>(size_);
    memory.norm2 = bump.take<T>(size_);
    memory.gradient = memory.norm2;
    memory.log_sums = bump.take<float>(shape_.log_sums());
    const std::size_t wide = tokens_ * intermediate_;
    const std::size_t shared = std::max((gated_ ? 3 : 2) * wide, tokens_ * shape_.row());
    memory.dqkv = bump.take<T>(shared);
    // Null where memory is only counted.
    const auto at = [&](std::size_t element) {
      return memory.dqkv == nullptr ? nullptr : memory.dqkv + element;
    };
    memory.hidden = at(0);
    memory.activated = at(wide);
    memory.up = gated_ ? at(2 * wide) : nullptr;
    return memory;
  }

  void use(std::byte* kept) {
    Bump own(kept);
    memory_ = kept == nullptr ? shared_ : take_intermediates(own);
  }

  LayerMemory<T> shared_;  ///< of calls that keep nothing
  std::byte* attention_scratch_ = nullptr;
};

}  // namespace ballast::model
