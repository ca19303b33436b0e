#pragma once

#include <cstddef>
#include <vector>

#include "ballast/core/units.h"
#include "ballast/model/architecture.h"
#include "ballast/model/compute.h"

#include "src/model/attention_shape.h"

namespace ballast::model {

/// Hands out consecutive, cache-line aligned parts of a memory; without a base it only counts.
class Bump {
 public:
  explicit Bump(std::byte* base = nullptr) : base_(base) {}
  template <class T>
  T* take(std::size_t count, std::size_t alignment = kCacheLine) {
    used_ = round_up(used_, alignment);
    std::byte* const start = base_ == nullptr ? nullptr : base_ + used_;
    used_ += round_up(count * sizeof(T), kCacheLine);
    return reinterpret_cast<T*>(start);
  }
  [[nodiscard]] std::size_t used() const { return used_; }

 private:
  std::byte* base_;
  std::size_t used_ = 0;
};

inline AttentionShape attention_shape(const ModelConfig& config, MicroBatchShape shape) {
  return {shape.sequences, shape.length, config.num_heads, config.num_kv_heads, config.head_size()};
}

/// A weight matrix with what belongs to it. Gradients are null in a forward pass.
template <class T>
struct Linear {
  const T* weight = nullptr;  ///< [in, out], or [out, in] when `flipped`
  const T* bias = nullptr;    ///< [out] or null
  float* weight_gradient = nullptr;
  float* bias_gradient = nullptr;
  std::size_t in = 0;
  std::size_t out = 0;
  bool flipped = false;
};

/// A norm's weights.
template <class T>
struct Norm {
  const T* weight = nullptr;
  const T* bias = nullptr;  ///< null: RMSNorm
  float* weight_gradient = nullptr;
  float* bias_gradient = nullptr;
};

/// The weights of one block, and where their gradients go (null in a forward pass).
template <class T>
class BlockWeights {
 public:
  BlockWeights(const BlockSpec& spec, const T* weights, float* gradient)
      : spec_(spec), weights_(weights), gradient_(gradient) {}

  /// The norm whose weight (and, right behind it, bias) is tensor `index` of the block.
  [[nodiscard]] Norm<T> norm(std::size_t index, bool with_bias) const {
    Norm<T> norm{.weight = weight(index), .weight_gradient = gradient(index)};
    if (with_bias) {
      norm.bias = weight(index + 1);
      norm.bias_gradient = gradient(index + 1);
    }
    return norm;
  }
  /// gpt2's Conv1D: [in, out] and a bias right behind it.
  [[nodiscard]] Linear<T> conv1d(std::size_t index) const {
    return {.weight = weight(index),
            .bias = weight(index + 1),
            .weight_gradient = gradient(index),
            .bias_gradient = gradient(index + 1),
            .in = spec_.tensors[index].shape[0],
            .out = spec_.tensors[index].shape[1]};
  }
  /// [out, in], no bias.
  [[nodiscard]] Linear<T> linear(std::size_t index) const {
    return {.weight = weight(index),
            .weight_gradient = gradient(index),
            .in = spec_.tensors[index].shape[1],
            .out = spec_.tensors[index].shape[0],
            .flipped = true};
  }

  /// The linear() of `count` tensors from `index` on, whose inputs are the same; those that lie
  /// behind each other without a gap as one.
  [[nodiscard]] std::vector<Linear<T>> joined(std::size_t index, std::size_t count) const {
    std::vector<Linear<T>> parts;
    for (std::size_t i = index; i < index + count; ++i) {
      const Linear<T> next = linear(i);
      if (!parts.empty() && parts.back().weight + parts.back().out * next.in == next.weight) {
        parts.back().out += next.out;
      } else {
        parts.push_back(next);
      }
    }
    return parts;
  }

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

}  // namespace ballast::model
