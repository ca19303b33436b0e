#pragma once

#include <cstddef>

#include "src/model/layer.h"

namespace ballast::model {

template <class Ops>
class Gpt2Layer final : public Layer<Ops> {
 public:
  using T = typename Ops::Value;
  using Layer<Ops>::Layer;

 private:
  struct Weights {
    Norm<T> norm1;
    Linear<T> attention;
    Linear<T> attention_out;
    Norm<T> norm2;
    Linear<T> mlp_in;
    Linear<T> mlp_out;
  };
  /// Tensors in the order of build_architecture().
  static Weights bind(const BlockWeights<T>& block) {
    return {block.norm(0, true), block.conv1d(2), block.conv1d(4),
            block.norm(6, true), block.conv1d(8), block.conv1d(10)};
  }
  void compute(const BlockWeights<T>& block, const T* in) override;
  void project(const BlockWeights<T>& block, T* out) override;
  void differentiate(const BlockWeights<T>& block, const T* in, T* dy) override;
};

template <class Ops>
void Gpt2Layer<Ops>::compute(const BlockWeights<T>& block, const T* in) {
  const Weights w = bind(block);
  auto& ops = this->ops_;
  auto& m = this->memory_;
  const std::size_t rows = this->tokens_;
  ops.norm(w.norm1, in, m.norm1, rows);
  ops.linear(w.attention, m.norm1, m.qkv, this->shape_.row(), rows);
  this->attend();
  ops.linear_onto(w.attention_out, m.attention, in, m.middle, rows);
  ops.norm(w.norm2, m.middle, m.norm2, rows);
  ops.linear(w.mlp_in, m.norm2, m.hidden, this->intermediate_, rows);
  ops.gelu(m.hidden, m.activated, rows * this->intermediate_);
}

template <class Ops>
void Gpt2Layer<Ops>::project(const BlockWeights<T>& block, T* out) {
  const Weights w = bind(block);
  const LayerMemory<T>& m = this->memory_;
  this->ops_.linear_onto(w.mlp_out, m.activated, m.middle, out, this->tokens_);
}

template <class Ops>
void Gpt2Layer<Ops>::differentiate(const BlockWeights<T>& block, const T* in, T* dy) {
  auto& ops = this->ops_;
  auto& m = this->memory_;
  const std::size_t rows = this->tokens_;
  const std::size_t width = this->shape_.hidden();
  const std::size_t wide = this->intermediate_;
  const std::size_t qkv_row = this->shape_.row();
  const Weights w = bind(block);

  ops.add_column_sums(dy, w.mlp_out.bias_gradient, rows, width);
  ops.linear_weight(w.mlp_out, m.activated, dy, width, rows);
  ops.linear_input(w.mlp_out, dy, width, m.activated, rows);
  ops.gelu_backward(m.hidden, m.activated, w.mlp_in.bias_gradient, rows, wide);
  ops.linear_weight(w.mlp_in, m.norm2, m.activated, wide, rows);
  ops.linear_input(w.mlp_in, m.activated, wide, m.gradient, rows);
  ops.norm_backward(w.norm2, m.middle, m.gradient, dy, dy, rows);

  ops.add_column_sums(dy, w.attention_out.bias_gradient, rows, width);
  ops.linear_weight(w.attention_out, m.attention, dy, width, rows);
  ops.linear_input(w.attention_out, dy, width, m.gradient, rows);
  this->attend_backward();
  ops.add_column_sums(m.dqkv, w.attention.bias_gradient, rows, qkv_row);
  ops.linear_weight(w.attention, m.norm1, m.dqkv, qkv_row, rows);
  ops.linear_input(w.attention, m.dqkv, qkv_row, m.gradient, rows);
  ops.norm_backward(w.norm1, in, m.gradient, dy, dy, rows);
}

}  // namespace ballast::model
