#include "src/model/host/layer.h"

#include <algorithm>

namespace ballast::model::host {

template <class T>
Norm<T> BlockWeights<T>::norm(std::size_t index, bool with_bias) const {
  Norm<T> norm;
  norm.weight = weight(index);
  norm.weight_gradient = gradient(index);
  if (with_bias) {
    norm.bias = weight(index + 1);
    norm.bias_gradient = gradient(index + 1);
  }
  return norm;
}

template <class T>
Linear<T> BlockWeights<T>::conv1d(std::size_t index) const {
  Linear<T> layer;
  layer.weight = weight(index);
  layer.weight_gradient = gradient(index);
  layer.bias = weight(index + 1);
  layer.bias_gradient = gradient(index + 1);
  layer.in = spec_.tensors[index].shape[0];
  layer.out = spec_.tensors[index].shape[1];
  return layer;
}

template <class T>
Linear<T> BlockWeights<T>::linear(std::size_t index) const {
  Linear<T> layer;
  layer.weight = weight(index);
  layer.weight_gradient = gradient(index);
  layer.out = spec_.tensors[index].shape[0];
  layer.in = spec_.tensors[index].shape[1];
  layer.flipped = true;
  return layer;
}

template <class T>
Layer<T>::Layer(const ModelConfig& config, const AttentionShape& shape, Ops<T>& ops)
    : shape_(shape),
      tokens_(shape.tokens()),
      size_(shape.tokens() * config.hidden_size),
      intermediate_(config.intermediate_size),
      gated_(config.family == Family::llama),
      ops_(ops),
      attention_(shape, ops.kernels(), ops.threads()) {}

template <class T>
void Layer<T>::take_memory(Bump& bump) {
  memory_.norm1 = bump.take<T>(size_);
  memory_.qkv = bump.take<T>(tokens_ * shape_.row());
  memory_.attention = bump.take<T>(size_);
  memory_.middle = bump.take<T>(size_);
  memory_.norm2 = bump.take<T>(size_);
  memory_.gradient = memory_.norm2;
  memory_.log_sums = bump.take<float>(attention_.log_sums());
  memory_.attention_scratch = bump.take<std::byte>(attention_.scratch_bytes());
  const std::size_t wide = tokens_ * intermediate_;
  const std::size_t shared = std::max((gated_ ? 3 : 2) * wide, tokens_ * shape_.row());
  memory_.dqkv = bump.take<T>(shared);
  memory_.hidden = memory_.dqkv;
  memory_.activated = memory_.hidden + wide;
  memory_.up = gated_ ? memory_.activated + wide : nullptr;
}

template <class T>
void Layer<T>::attend() {
  attention_.forward(memory_.qkv, memory_.attention, memory_.log_sums, memory_.attention_scratch);
}

template <class T>
void Layer<T>::attend_backward() {
  attention_.backward(memory_.qkv, memory_.attention, memory_.log_sums, memory_.gradient,
                      memory_.dqkv, memory_.attention_scratch);
}

template class BlockWeights<float>;
template class BlockWeights<Bf16>;
template class Layer<float>;
template class Layer<Bf16>;

}  // namespace ballast::model::host
