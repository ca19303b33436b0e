#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <type_traits>

#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/model/family.h"

#include "src/model/compute/decoder_layer.h"
#include "src/model/compute/layer.h"
#include "src/model/description/families/decoder.h"

// The members of DecoderLayer for layers that are cut into tiles.

namespace ballast::model {

template <class Ops>
void DecoderLayer<Ops>::append_head_norms(const BlockWeights<T>& block, T* normed) {
  T* const to = this->head_norms_.weights(normed);
  const auto copy = [&](const NormAt& at, std::size_t place, std::size_t width) {
    this->ops_.elementwise->copy_bytes(reinterpret_cast<const std::byte*>(block[at].weight),
                                       reinterpret_cast<std::byte*>(to + place), width * sizeof(T));
  };
  for_head_norms(bound_[block.layer], copy);
}

template <class Ops>
void DecoderLayer<Ops>::add_head_norm_gradients(const BlockWeights<T>& block, const float* sums) {
  const Bound& b = bound_[block.layer];
  for (std::size_t tile = 0; tile < b.attention_tiles; ++tile) {
    const float* const slice = this->head_norms_.slice(sums, tile);
    for_head_norms(b, [&](const NormAt& at, std::size_t place, std::size_t width) {
      float* const gradient = block[at].weight_gradient;
      if (gradient != nullptr) this->ops_.elementwise->accumulate(slice + place, gradient, width);
    });
  }
}

template <class Ops>
void DecoderLayer<Ops>::mix_tile(const BlockWeights<T>& block, const T* x) {
  const Bound& b = bound_[block.layer];
  project_qkv(block, x);
  if (!b.delta) return this->attend(b.window);
  delta_.convolve(block, *b.delta, this->sequences_.documents, this->memory_);
  delta_.recur(block, *b.delta, this->sequences_.documents, this->memory_);
}

template <class Ops>
void DecoderLayer<Ops>::compute_tile(const BlockWeights<T>& block, const T* x, float* part) {
  const Bound& b = bound_[block.layer];
  if (b.content == BlockContent::attention) {
    mix_tile(block, x);
    this->ops_.products->linear_part(block[b.attention_out], attention_results(block, x), part,
                                     this->rows_);
    return;
  }
  this->by_chunks(b.mlp_out.in, [&](const MlpChunk<T>& chunk) {
    compute_mlp(block, chunk, x);
    this->ops_.products->linear_part(block[b.mlp_out], chunk.activated,
                                     part + chunk.first * this->width_, chunk.rows);
  });
}

template <class Ops>
void DecoderLayer<Ops>::differentiate_tile(const BlockWeights<T>& block, const T* x, const T* dy,
                                           float* part) {
  const Bound& b = bound_[block.layer];
  if (b.content == BlockContent::attention) {
    mix_tile(block, x);
    if (b.query_norm || b.delta)
      this->ops_.elementwise->zero(this->head_gradient_, this->head_norms_.size());
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

// Makers of the families' layers. A DecoderFamily has DecoderLayers; every other family has a
// template F::LayerOf<Ops>.

template <class Ops>
using MakeLayer = std::unique_ptr<Layer<Ops>> (*)(const Architecture&, const AttentionShape&, Ops&);

template <class L, class Ops>
std::unique_ptr<Layer<Ops>> make_layer_of(const Architecture& model, const AttentionShape& shape,
                                          Ops& ops) {
  return std::make_unique<L>(model, shape, ops);
}

/// Makers of layers that are not DecoderLayers, by family name.
template <class Ops>
std::map<std::string, MakeLayer<Ops>, std::less<>>& own_layer_makers() {
  static std::map<std::string, MakeLayer<Ops>, std::less<>> makers;
  return makers;
}

/// Registers a family and its layer for the operations `Ops`. Call it before other threads use
/// models.
template <class F, class... Ops>
void register_family() {
  add_family(std::make_unique<const F>());
  if constexpr (!std::is_base_of_v<DecoderFamily, F>) {
    (own_layer_makers<Ops>().emplace(F().name(),
                                     &make_layer_of<typename F::template LayerOf<Ops>, Ops>),
     ...);
  }
}

/// Makes the layers of the model's family. Throws Error(config) if there are none for these
/// operations.
template <class Ops>
std::unique_ptr<Layer<Ops>> make_layer(const Architecture& model, const AttentionShape& shape,
                                       Ops& ops) {
  const std::string& name = model.config.family;
  if (dynamic_cast<const DecoderFamily*>(&family(name)) != nullptr) {
    return make_layer_of<DecoderLayer<Ops>>(model, shape, ops);
  }
  const auto found = own_layer_makers<Ops>().find(name);
  if (found == own_layer_makers<Ops>().end()) {
    throw Error(ErrorCategory::config,
                fmt::format("model.family: '{}' has no kernels for this device", name));
  }
  return found->second(model, shape, ops);
}

}  // namespace ballast::model
