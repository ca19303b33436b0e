#pragma once

#include <cstddef>
#include <memory>

#include "ballast/core/units.h"
#include "ballast/model/architecture.h"

#include "src/model/host/attention.h"
#include "src/model/host/ops.h"

namespace ballast::model::host {

/// Hands out consecutive, cache-line aligned parts of a memory; without a base it only counts.
class Bump {
 public:
  explicit Bump(std::byte* base = nullptr) : base_(base) {}
  template <class T>
  T* take(std::size_t count) {
    std::byte* const start = base_ == nullptr ? nullptr : base_ + used_;
    used_ += round_up(count * sizeof(T), kCacheLine);
    return reinterpret_cast<T*>(start);
  }
  [[nodiscard]] std::size_t used() const { return used_; }

 private:
  std::byte* base_;
  std::size_t used_ = 0;
};

/// The weights of one block, and where their gradients go (null in a forward pass).
template <class T>
class BlockWeights {
 public:
  BlockWeights(const BlockSpec& spec, const T* weights, float* gradient)
      : spec_(spec), weights_(weights), gradient_(gradient) {}

  /// The norm whose weight (and, right behind it, bias) is tensor `index` of the block.
  [[nodiscard]] Norm<T> norm(std::size_t index, bool with_bias) const;
  /// gpt2's Conv1D: [in, out] and a bias right behind it.
  [[nodiscard]] Linear<T> conv1d(std::size_t index) const;
  /// [out, in], no bias.
  [[nodiscard]] Linear<T> linear(std::size_t index) const;

 private:
  [[nodiscard]] const T* weight(std::size_t index) const {
    return weights_ + spec_.tensors[index].offset;
  }
  [[nodiscard]] float* gradient(std::size_t index) const {
    return gradient_ == nullptr ? nullptr : gradient_ + spec_.tensors[index].offset;
  }

  const BlockSpec& spec_;
  const T* weights_;
  float* gradient_;
};

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
template <class T>
class Layer {
 public:
  Layer(const ModelConfig& config, const AttentionShape& shape, Ops<T>& ops);
  virtual ~Layer() = default;
  Layer(const Layer&) = delete;
  Layer& operator=(const Layer&) = delete;

  /// Takes the memory of a layer.
  virtual void take_memory(Bump& bump);

  /// Views as in Compute::layer_forward.
  virtual void forward(const BlockWeights<T>& block, const T* in, T* out) = 0;
  /// Views as in Compute::layer_backward.
  virtual void backward(const BlockWeights<T>& block, const T* in, T* dy) = 0;

 protected:
  void attend();
  /// gradient (of attention) -> dqkv.
  void attend_backward();

  AttentionShape shape_;
  std::size_t tokens_;
  std::size_t size_;          ///< N * H
  std::size_t intermediate_;  ///< I
  bool gated_;
  Ops<T>& ops_;
  LayerMemory<T> memory_;

 private:
  Attention<T> attention_;
};

template <class T>
class Gpt2Layer final : public Layer<T> {
 public:
  using Layer<T>::Layer;
  void forward(const BlockWeights<T>& block, const T* in, T* out) override;
  void backward(const BlockWeights<T>& block, const T* in, T* dy) override;

 private:
  struct Weights;
  static Weights bind(const BlockWeights<T>& block);
  /// Everything but the last product.
  void compute(const Weights& w, const T* in);
};

template <class T>
class LlamaLayer final : public Layer<T> {
 public:
  LlamaLayer(const ModelConfig& config, const AttentionShape& shape, Ops<T>& ops);
  void take_memory(Bump& bump) override;
  void forward(const BlockWeights<T>& block, const T* in, T* out) override;
  void backward(const BlockWeights<T>& block, const T* in, T* dy) override;

 private:
  struct Weights;
  static Weights bind(const BlockWeights<T>& block);
  /// Everything but the last product.
  void compute(const Weights& w, const T* in);
  void fill_angles();
  /// Turns queries and keys by their positions; `direction` -1 turns back.
  void rotate(T* qkv, float direction);

  double theta_;
  float* cosine_ = nullptr;  ///< [length, head_size / 2]
  float* sine_ = nullptr;
};

}  // namespace ballast::model::host
