#include "src/model/host/layer.h"

namespace ballast::model::host {

template <class T>
struct Gpt2Layer<T>::Weights {
  Norm<T> norm1;
  Linear<T> attention;
  Linear<T> attention_out;
  Norm<T> norm2;
  Linear<T> mlp_in;
  Linear<T> mlp_out;
};

/// Tensors in the order of build_architecture().
template <class T>
auto Gpt2Layer<T>::bind(const BlockWeights<T>& block) -> Weights {
  return {block.norm(0, true), block.conv1d(2), block.conv1d(4),
          block.norm(6, true), block.conv1d(8), block.conv1d(10)};
}

template <class T>
void Gpt2Layer<T>::compute(const Weights& w, const T* in) {
  auto& ops = this->ops_;
  auto& m = this->memory_;
  const std::size_t rows = this->tokens_;
  const std::size_t width = this->shape_.hidden();
  ops.norm(w.norm1, in, m.norm1, rows);
  ops.linear(w.attention, m.norm1, m.qkv, this->shape_.row(), rows);
  this->attend();
  ops.copy(in, m.middle, this->size_);
  ops.linear(w.attention_out, m.attention, m.middle, width, rows, true);
  ops.norm(w.norm2, m.middle, m.norm2, rows);
  ops.linear(w.mlp_in, m.norm2, m.hidden, this->intermediate_, rows);
  ops.gelu(m.hidden, m.activated, rows * this->intermediate_);
}

template <class T>
void Gpt2Layer<T>::forward(const BlockWeights<T>& block, const T* in, T* out) {
  const Weights w = bind(block);
  compute(w, in);
  this->ops_.copy(this->memory_.middle, out, this->size_);
  this->ops_.linear(w.mlp_out, this->memory_.activated, out, this->shape_.hidden(), this->tokens_,
                    true);
}

template <class T>
void Gpt2Layer<T>::backward(const BlockWeights<T>& block, const T* in, T* dy) {
  auto& ops = this->ops_;
  auto& m = this->memory_;
  const std::size_t rows = this->tokens_;
  const std::size_t width = this->shape_.hidden();
  const std::size_t wide = this->intermediate_;
  const std::size_t qkv_row = this->shape_.row();
  const Weights w = bind(block);
  compute(w, in);

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

template class Gpt2Layer<float>;
template class Gpt2Layer<Bf16>;

}  // namespace ballast::model::host
