#pragma once

#include <cstddef>

#include "src/model/compute/decoder_layer.h"

// The members of DecoderLayer for layers that are cut into tiles.

namespace ballast::model {

template <class Ops>
void DecoderLayer<Ops>::append_head_norms(const BlockWeights<T>& block, T* normed) {
  const Bound& b = bound_[block.layer];
  T* const to = this->head_norms_.weights(normed);
  const auto copy = [&](const NormAt& at, T* copied) {
    this->ops_.copy_bytes(reinterpret_cast<const std::byte*>(block[at].weight),
                          reinterpret_cast<std::byte*>(copied), this->shape_.head_dim * sizeof(T));
  };
  copy(*b.query_norm, to);
  copy(*b.key_norm, to + this->head_norms_.keys());
}

template <class Ops>
void DecoderLayer<Ops>::add_head_norm_gradients(const BlockWeights<T>& block, const float* sums) {
  const Bound& b = bound_[block.layer];
  const auto add = [&](float* gradient, const float* slice) {
    if (gradient != nullptr) this->ops_.accumulate(slice, gradient, this->shape_.head_dim);
  };
  for (std::size_t tile = 0; tile < this->head_norms_.tiles(); ++tile) {
    const float* const slice = this->head_norms_.slice(sums, tile);
    add(block[*b.query_norm].weight_gradient, slice);
    add(block[*b.key_norm].weight_gradient, slice + this->head_norms_.keys());
  }
}

template <class Ops>
void DecoderLayer<Ops>::compute_tile(const BlockWeights<T>& block, const T* x, float* part) {
  const Bound& b = bound_[block.layer];
  if (b.part == LayerPart::attention) {
    project_qkv(block, x);
    this->attend(b.window);
    this->ops_.linear_part(block[b.attention_out], this->memory_.attention, part, this->rows_);
    return;
  }
  this->by_chunks(b.mlp_out.in, [&](const MlpChunk<T>& chunk) {
    compute_mlp(block, chunk, x);
    this->ops_.linear_part(block[b.mlp_out], chunk.activated, part + chunk.first * this->width_,
                           chunk.rows);
  });
}

template <class Ops>
void DecoderLayer<Ops>::differentiate_tile(const BlockWeights<T>& block, const T* x, const T* dy,
                                           float* part) {
  const Bound& b = bound_[block.layer];
  if (b.part == LayerPart::attention) {
    project_qkv(block, x);
    this->attend(b.window);
    if (b.query_norm) this->ops_.zero(this->head_gradient_, this->head_norms_.size());
    attention_backward(block, x, dy, part, false);
    return;
  }
  BlockWeights<T> weights = block;
  this->by_chunks(b.mlp_out.in, [&](const MlpChunk<T>& chunk) {
    compute_mlp(weights, chunk, x);
    mlp_backward(weights, chunk, x, dy + chunk.first * this->width_, part, false);
    weights.accumulation = Accumulation::later;
  });
}

}  // namespace ballast::model
