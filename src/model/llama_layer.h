#pragma once

#include <cstddef>
#include <vector>

#include "src/model/layer.h"

namespace ballast::model {

template <class Ops>
class LlamaLayer final : public Layer<Ops> {
 public:
  using T = typename Ops::Value;
  LlamaLayer(const ModelConfig& config, const AttentionShape& shape, Ops& ops)
      : Layer<Ops>(config, shape, ops), theta_(config.rope_theta) {}
  void take_lasting_memory(Bump& bump) override;

 private:
  struct Weights {
    Norm<T> norm1;
    std::vector<Linear<T>> qkv;  ///< side by side
    Linear<T> attention_out;
    Norm<T> norm2;
    Linear<T> gate;
    Linear<T> up;
    Linear<T> down;
  };
  /// Tensors in the order of build_architecture().
  static Weights bind(const BlockWeights<T>& block) {
    return {block.norm(0, false), block.joined(1, 3), block.linear(4), block.norm(5, false),
            block.linear(6),      block.linear(7),    block.linear(8)};
  }
  void compute(const BlockWeights<T>& block, const T* in) override;
  void project(const BlockWeights<T>& block, T* out) override;
  void differentiate(const BlockWeights<T>& block, const T* in, T* dy) override;
  /// Turns queries and keys by their positions; `direction` -1 turns back. They lie side by side in
  /// a row, so they are turned as one row of heads.
  void rotate(T* qkv, float direction);

  double theta_;
  float* cosine_ = nullptr;  ///< [length, head_size / 2]
  float* sine_ = nullptr;
  bool angles_filled_ = false;
};

template <class Ops>
void LlamaLayer<Ops>::take_lasting_memory(Bump& bump) {
  const std::size_t angles = this->shape_.length * (this->shape_.head_size / 2);
  cosine_ = bump.take<float>(angles);
  sine_ = bump.take<float>(angles);
  angles_filled_ = false;
}

template <class Ops>
void LlamaLayer<Ops>::rotate(T* qkv, float direction) {
  if (!angles_filled_) this->ops_.fill_angles(theta_, cosine_, sine_);
  angles_filled_ = true;
  this->ops_.rotate(qkv, cosine_, sine_, direction);
}

template <class Ops>
void LlamaLayer<Ops>::compute(const BlockWeights<T>& block, const T* in) {
  const Weights w = bind(block);
  auto& ops = this->ops_;
  auto& m = this->memory_;
  const std::size_t rows = this->tokens_;
  const std::size_t row = this->shape_.row();
  const std::size_t wide = this->intermediate_;
  ops.norm(w.norm1, in, m.norm1, rows);
  T* to = m.qkv;
  for (const Linear<T>& part : w.qkv) {
    ops.linear(part, m.norm1, to, row, rows);
    to += part.out;
  }
  rotate(m.qkv, 1.0F);
  this->attend();
  ops.linear_onto(w.attention_out, m.attention, in, m.middle, rows);
  ops.norm(w.norm2, m.middle, m.norm2, rows);
  ops.linear(w.gate, m.norm2, m.hidden, wide, rows);
  ops.linear(w.up, m.norm2, m.up, wide, rows);
  ops.swiglu(m.hidden, m.up, m.activated, rows * wide);
}

template <class Ops>
void LlamaLayer<Ops>::project(const BlockWeights<T>& block, T* out) {
  const Weights w = bind(block);
  const LayerMemory<T>& m = this->memory_;
  this->ops_.linear_onto(w.down, m.activated, m.middle, out, this->tokens_);
}

template <class Ops>
void LlamaLayer<Ops>::differentiate(const BlockWeights<T>& block, const T* in, T* dy) {
  auto& ops = this->ops_;
  auto& m = this->memory_;
  const std::size_t rows = this->tokens_;
  const std::size_t row = this->shape_.row();
  const std::size_t width = this->shape_.hidden();
  const std::size_t wide = this->intermediate_;
  const Weights w = bind(block);

  ops.linear_weight(w.down, m.activated, dy, width, rows);
  ops.linear_input(w.down, dy, width, m.activated, rows);
  ops.swiglu_backward(m.hidden, m.up, m.activated, rows * wide);
  ops.linear_weight(w.gate, m.norm2, m.hidden, wide, rows);
  ops.linear_weight(w.up, m.norm2, m.up, wide, rows);
  ops.linear_input(w.gate, m.hidden, wide, m.gradient, rows);
  ops.linear_input(w.up, m.up, wide, m.gradient, rows, true);
  ops.norm_backward(w.norm2, m.middle, m.gradient, dy, dy, rows);

  ops.linear_weight(w.attention_out, m.attention, dy, width, rows);
  ops.linear_input(w.attention_out, dy, width, m.gradient, rows);
  this->attend_backward();
  rotate(m.dqkv, -1.0F);
  const T* from = m.dqkv;
  for (const Linear<T>& part : w.qkv) {
    ops.linear_weight(part, m.norm1, from, row, rows);
    ops.linear_input(part, from, row, m.gradient, rows, from != m.dqkv);
    from += part.out;
  }
  ops.norm_backward(w.norm1, in, m.gradient, dy, dy, rows);
}

}  // namespace ballast::model
