#include <cmath>

#include "src/model/host/layer.h"

namespace ballast::model::host {

template <class T>
struct LlamaLayer<T>::Weights {
  Norm<T> norm1;
  Linear<T> query;
  Linear<T> key;
  Linear<T> value;
  Linear<T> attention_out;
  Norm<T> norm2;
  Linear<T> gate;
  Linear<T> up;
  Linear<T> down;
};

template <class T>
LlamaLayer<T>::LlamaLayer(const ModelConfig& config, const AttentionShape& shape, Ops<T>& ops)
    : Layer<T>(config, shape, ops), theta_(config.rope_theta) {}

/// Tensors in the order of build_architecture().
template <class T>
auto LlamaLayer<T>::bind(const BlockWeights<T>& block) -> Weights {
  return {block.norm(0, false), block.linear(1), block.linear(2), block.linear(3), block.linear(4),
          block.norm(5, false), block.linear(6), block.linear(7), block.linear(8)};
}

template <class T>
void LlamaLayer<T>::take_memory(Bump& bump) {
  Layer<T>::take_memory(bump);
  const std::size_t angles = this->shape_.length * (this->shape_.head_size / 2);
  cosine_ = bump.take<float>(angles);
  sine_ = bump.take<float>(angles);
  if (cosine_ != nullptr) fill_angles();
}

/// position * theta^(-2 i / head_size). Source: Su et al., "RoFormer", 2021, section 3.2.2.
template <class T>
void LlamaLayer<T>::fill_angles() {
  const std::size_t half = this->shape_.head_size / 2;
  for (std::size_t i = 0; i < half; ++i) {
    const double frequency =
        std::pow(theta_, -static_cast<double>(2 * i) / static_cast<double>(2 * half));
    for (std::size_t position = 0; position < this->shape_.length; ++position) {
      const double angle = static_cast<double>(position) * frequency;
      cosine_[position * half + i] = static_cast<float>(std::cos(angle));
      sine_[position * half + i] = static_cast<float>(std::sin(angle));
    }
  }
}

/// Queries and keys lie side by side in a row, so they are turned as one row of heads.
template <class T>
void LlamaLayer<T>::rotate(T* qkv, float direction) {
  const AttentionShape& shape = this->shape_;
  split(this->tokens_, 1, [&](Range r) {
    this->ops_.kernels().rope(qkv + r.begin * shape.row(), shape.row(), r.begin, r.size(),
                              shape.length, shape.heads + shape.kv_heads, shape.head_size, cosine_,
                              sine_, direction);
  });
}

template <class T>
void LlamaLayer<T>::compute(const Weights& w, const T* in) {
  auto& ops = this->ops_;
  auto& m = this->memory_;
  const std::size_t rows = this->tokens_;
  const std::size_t row = this->shape_.row();
  const std::size_t width = this->shape_.hidden();
  const std::size_t wide = this->intermediate_;
  ops.norm(w.norm1, in, m.norm1, rows);
  ops.linear(w.query, m.norm1, m.qkv, row, rows);
  ops.linear(w.key, m.norm1, m.qkv + width, row, rows);
  ops.linear(w.value, m.norm1, m.qkv + width + this->shape_.kv_hidden(), row, rows);
  rotate(m.qkv, 1.0F);
  this->attend();
  ops.copy(in, m.middle, this->size_);
  ops.linear(w.attention_out, m.attention, m.middle, width, rows, true);
  ops.norm(w.norm2, m.middle, m.norm2, rows);
  ops.linear(w.gate, m.norm2, m.hidden, wide, rows);
  ops.linear(w.up, m.norm2, m.up, wide, rows);
  ops.swiglu(m.hidden, m.up, m.activated, rows * wide);
}

template <class T>
void LlamaLayer<T>::forward(const BlockWeights<T>& block, const T* in, T* out) {
  const Weights w = bind(block);
  compute(w, in);
  this->ops_.copy(this->memory_.middle, out, this->size_);
  this->ops_.linear(w.down, this->memory_.activated, out, this->shape_.hidden(), this->tokens_,
                    true);
}

template <class T>
void LlamaLayer<T>::backward(const BlockWeights<T>& block, const T* in, T* dy) {
  auto& ops = this->ops_;
  auto& m = this->memory_;
  const std::size_t rows = this->tokens_;
  const std::size_t row = this->shape_.row();
  const std::size_t width = this->shape_.hidden();
  const std::size_t wide = this->intermediate_;
  const Weights w = bind(block);
  compute(w, in);

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
  const T* const dkey = m.dqkv + width;
  const T* const dvalue = dkey + this->shape_.kv_hidden();
  ops.linear_weight(w.query, m.norm1, m.dqkv, row, rows);
  ops.linear_weight(w.key, m.norm1, dkey, row, rows);
  ops.linear_weight(w.value, m.norm1, dvalue, row, rows);
  ops.linear_input(w.query, m.dqkv, row, m.gradient, rows);
  ops.linear_input(w.key, dkey, row, m.gradient, rows, true);
  ops.linear_input(w.value, dvalue, row, m.gradient, rows, true);
  ops.norm_backward(w.norm1, in, m.gradient, dy, dy, rows);
}

template class LlamaLayer<float>;
template class LlamaLayer<Bf16>;

}  // namespace ballast::model::host
