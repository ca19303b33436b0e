#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>

#include "src/model/parts.h"

namespace ballast::model {

// Forward and backward of blocks, told once for all devices: `Ops` are the operations of one device
// (host/ops.h, cuda/ops.h), whose arguments are views into its memory. What one device fuses, its
// operations do in one go; what depends on a thread's team or a stream they know themselves.

/// Intermediates of one layer, with N tokens, H hidden_size, I intermediate_size.
template <class T>
struct LayerMemory {
  T* norm1 = nullptr;      ///< [N, H] input of the attention's projection
  T* qkv = nullptr;        ///< [N, queries | keys | values]
  T* attention = nullptr;  ///< [N, H]
  T* middle = nullptr;     ///< [N, H] residual stream between attention and MLP
  T* norm2 = nullptr;      ///< [N, H] input of the MLP
  T* hidden = nullptr;     ///< [N, I] gelu's input, or the gate
  T* up = nullptr;         ///< [N, I] llama
  T* activated = nullptr;  ///< [N, I], later its gradient
  T* dqkv = nullptr;       ///< like qkv, in the place of hidden, up and activated
  T* gradient = nullptr;   ///< [N, H] of norm2, attention, norm1 in turn; in the place of norm2
  float* log_sums = nullptr;
  std::byte* attention_scratch = nullptr;
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
    memory_.norm1 = bump.take<T>(size_);
    memory_.qkv = bump.take<T>(tokens_ * shape_.row());
    memory_.attention = bump.take<T>(size_);
    memory_.middle = bump.take<T>(size_);
    memory_.norm2 = bump.take<T>(size_);
    memory_.gradient = memory_.norm2;
    memory_.log_sums = bump.take<float>(shape_.log_sums());
    memory_.attention_scratch = bump.take<std::byte>(ops_.attention_scratch_bytes());
    const std::size_t wide = tokens_ * intermediate_;
    const std::size_t shared = std::max((gated_ ? 3 : 2) * wide, tokens_ * shape_.row());
    memory_.dqkv = bump.take<T>(shared);
    memory_.hidden = memory_.dqkv;
    memory_.activated = memory_.hidden + wide;
    memory_.up = gated_ ? memory_.activated + wide : nullptr;
  }

  /// Takes memory of what lasts from call to call: between two calls of a layer others use what
  /// take_memory() takes.
  virtual void take_lasting_memory(Bump& /*bump*/) {}

  /// Views as in Compute::layer_forward.
  virtual void forward(const BlockWeights<T>& block, const T* in, T* out) = 0;
  /// Views as in Compute::layer_backward.
  virtual void backward(const BlockWeights<T>& block, const T* in, T* dy) = 0;

 protected:
  void attend() {
    ops_.attention(memory_.qkv, memory_.attention, memory_.log_sums, memory_.attention_scratch);
  }
  /// gradient (of attention) -> dqkv.
  void attend_backward() {
    ops_.attention_backward(memory_.qkv, memory_.attention, memory_.log_sums, memory_.gradient,
                            memory_.dqkv, memory_.attention_scratch);
  }

  AttentionShape shape_;
  std::size_t tokens_;
  std::size_t size_;          ///< N * H
  std::size_t intermediate_;  ///< I
  bool gated_;
  Ops& ops_;
  LayerMemory<T> memory_;
};

}  // namespace ballast::model
