#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "ballast/core/error.h"

#include "src/model/compute/adapted_maps.h"
#include "src/model/compute/decoder_tensors.h"
#include "src/model/compute/delta_net.h"
#include "src/model/compute/latent_attention.h"
#include "src/model/compute/layer.h"
#include "src/model/compute/layer_qkv.h"
#include "src/model/description/families/decoder.h"

namespace ballast::model {

/// Forward and backward passes of the layers that a DecoderSpec describes, and of their tiles. Both
/// run the same steps. A layer writes rounded results to its own memory or to the residual stream;
/// a tile writes its part of the half's result in fp32.
template <class Ops>
class DecoderLayer final : public Layer<Ops> {
 public:
  using T = typename Ops::Value;
  DecoderLayer(const Architecture& model, const AttentionShape& shape, Ops& ops)
      : Layer<Ops>(model, shape, ops, decoder_arrays(model, shape)),
        bound_(Layer<Ops>::bind_layers(
            model,
            [&](const BlockSpec& block) {
              return find_decoder_tensors(model.config, block, ops.traits.mlp, this->head_norms_);
            })),
        rotation_(decoder_family(model.config).rotaries_of(model.config), shape, ops),
        maps_(model, ops),
        latent_(shape, ops, maps_),
        experts_(decoder_family(model.config).decoder(model.config, 0).layer_experts,
                 shape.tokens(), model.config.hidden_size, ops),
        inputs_(decoder_family(model.config).decoder(model.config, 0).inputs, model.config,
                this->rows_, this->mlp_rows_, ops, maps_),
        shared_keys_(ops),
        value_norms_(this->shapes_, ops),
        delta_(this->arrays_.delta, this->arrays_.tiles, ops, maps_),
        gate_(shape, ops) {}
  void take_memory(Bump& bump) override;
  void take_lasting_memory(Bump& bump) override {
    rotation_.take_memory(bump);
    if (this->arrays_.projected_values) value_norms_.take_memory(bump);
  }
  [[nodiscard]] NormAt norm_of(std::size_t layer) const override;
  void append_head_norms(const BlockWeights<T>& block, T* normed) override;
  void add_head_norm_gradients(const BlockWeights<T>& block, const float* sums) override;

 private:
  using Bound = DecoderTensors;

  void compute(const BlockWeights<T>& block, const T* in) override;
  void project(const BlockWeights<T>& block, const T* in, T* out) override;
  [[nodiscard]] BlockContent part_of(const BlockWeights<T>& block) const override {
    return bound_[block.layer].content;
  }
  [[nodiscard]] Mixer mixer_of(std::size_t layer) const override {
    return bound_[layer].delta ? Mixer::delta_net : Mixer::attention;
  }
  [[nodiscard]] std::size_t mlp_width_of(std::size_t layer) const override {
    return bound_[layer].mlp_out.in;
  }
  void differentiate(const BlockWeights<T>& block, const T* in, T* dy) override;
  void differentiate_mlp(const BlockWeights<T>& block, const T* in, T* dy);
  void differentiate_attention(const BlockWeights<T>& block, const T* in, T* dy);
  void compute_tile(const BlockWeights<T>& block, const T* x, float* part) override;
  void differentiate_tile(const BlockWeights<T>& block, const T* x, const T* dy,
                          float* part) override;
  /// Computes the intermediates of a tile of attention.
  void mix_tile(const BlockWeights<T>& block, const T* x);

  // Steps of layers and tiles. `x` [N, H] is the input of the first maps. `dx` (training type or
  // fp32) receives the gradient of x, which is written or added.

  void project_qkv(const BlockWeights<T>& block, const T* x);
  /// Writes the residual stream after attention. `in`: the stream before the layer.
  void project_attention(const BlockWeights<T>& block, const T* in);
  /// Adds the results of the MLP and of its experts to rows of the residual stream. `out`: the
  /// first of these rows.
  void add_mlp(const BlockWeights<T>& block, const MlpChunk<T>& chunk, T* out);
  /// Computes the intermediates of the MLP.
  void compute_mlp(const BlockWeights<T>& block, const MlpChunk<T>& chunk, const T* x);
  /// `dout`: gradient of the output of attention's last map.
  template <class D>
  void attention_backward(const BlockWeights<T>& block, const T* x, const T* dout, D* dx,
                          bool add_to_dx);
  /// `dout`: gradient of the MLP's output, from the chunk's first row on. `x` and `dx` have all
  /// rows.
  template <class D>
  void mlp_backward(const BlockWeights<T>& block, const MlpChunk<T>& chunk, const T* x,
                    const T* dout, D* dx, bool add_to_dx);
  /// Views of gate and up: side by side in each row if one product makes both, else consecutive
  /// arrays.
  [[nodiscard]] GateUp<T> gate_up(const Bound& b, const MlpChunk<T>& chunk) const {
    const bool joined = b.mlp_in.size() == 1;
    const std::size_t wide = chunk.width;
    return {chunk.hidden, chunk.hidden + (joined ? wide : chunk.rows * wide),
            joined ? 2 * wide : wide, chunk.rows, wide};
  }
  [[nodiscard]] Groups heads(const Bound& b, std::size_t count) const {
    const std::size_t width = this->shape_.head_dim;
    if (b.norms_whole_rows) return {this->rows_, 1, count * width};
    return {this->rows_, count, width};
  }
  [[nodiscard]] std::size_t projected_row() const {
    return Layer<Ops>::projected_row(this->shape_);
  }
  /// Column of the keys in LayerMemory::projected.
  [[nodiscard]] std::size_t projected_keys(const Bound& b) const {
    return (b.output_gate ? 2 : 1) * this->shape_.width();
  }
  /// Multiplies the layer's result, or its gradient, by the scale of the result, if there is one.
  void scale_result(const BlockWeights<T>& block, T* result) {
    const Bound& b = bound_[block.layer];
    if (!b.result_scale) return;
    this->ops_.elementwise->scale_by(block.weights + *b.result_scale, kAddends, result,
                                     this->rows_ * this->width_);
  }
  /// Rotates queries and keys by their positions; `direction` -1 rotates back.
  void rotate(const Bound& b, T* qkv, float direction) {
    const RotaryAt at = {b.rotary, b.query_rotary, b.query_growth, b.latent ? b.latent->plain : 0,
                         b.shared_keys.reads};
    rotation_.rotate(this->shape_, at, qkv, this->sequences_.positions, direction);
  }
  /// Returns the residual stream before the MLP.
  [[nodiscard]] const T* mlp_input(const Bound& b, const T* in) const {
    return b.parallel ? in : this->memory_.middle;
  }
  /// Returns the input of the first products of a layer's MLP.
  [[nodiscard]] const T* mlp_x(const Bound& b) const {
    return b.norm_before_mlp ? this->memory_.norm2 : this->memory_.middle;
  }

  /// Calls visit(norm, place in HeadNorms, width) for the norms of heads in the block of the norm
  /// before tiles.
  template <class Visit>
  void for_head_norms(const Bound& b, const Visit& visit) const {
    if (b.delta_norm) return visit(*b.delta_norm, 0, this->arrays_.delta.value_width);
    visit(*b.query_norm, 0, this->shape_.head_dim);
    visit(*b.key_norm, this->head_norms_.keys(), this->shape_.head_dim);
  }
  /// Returns the weights and gradients that query_norm, key_norm and DeltaAt::norm refer to. `x`:
  /// input of the first maps.
  [[nodiscard]] BlockWeights<T> head_norm_weights(const BlockWeights<T>& block, const T* x) const {
    if (bound_[block.layer].content != BlockContent::attention) return block;
    const HeadNorms& norms = this->head_norms_;
    BlockWeights<T> own = {.weights = norms.weights(x)};
    if (this->head_gradient_ != nullptr) own.gradient = {this->head_gradient_, norms.size()};
    return own;
  }
  /// Returns the input of the map after attention. `x`: input of the first maps; only tiles need
  /// it.
  const T* attention_results(const BlockWeights<T>& block, const T* x = nullptr) {
    const Bound& b = bound_[block.layer];
    if (b.delta) {
      return delta_.results(head_norm_weights(block, x)[b.delta->norm], this->memory_);
    }
    if (b.output_gate) return gate_.results(this->memory_);
    return b.latent ? latent_.results(*b.latent, this->memory_) : this->memory_.attention;
  }

  [[nodiscard]] MapRows all_rows() const { return {0, this->rows_}; }
  static MapRows rows_of(const MlpChunk<T>& chunk) { return {chunk.first, chunk.rows}; }

  std::vector<Bound> bound_;
  LayerRotation<Ops> rotation_;
  AdaptedMaps<T> maps_;
  LatentAttention<Ops> latent_;
  LayerExperts<Ops> experts_;
  LayerEmbedding<Ops> inputs_;
  SharedKeys<Ops> shared_keys_;
  ValueNorms<Ops> value_norms_;
  DeltaNet<Ops> delta_;
  AttentionGate<Ops> gate_;
};

template <class Ops>
NormAt DecoderLayer<Ops>::norm_of(std::size_t layer) const {
  const Bound& b = bound_[layer];
  expects(b.content == BlockContent::norm || b.content == BlockContent::router,
          "the block is not a norm before tiles");
  return b.norm_before_attention ? *b.norm_before_attention : *b.norm_before_mlp;
}

template <class Ops>
void DecoderLayer<Ops>::take_memory(Bump& bump) {
  Layer<Ops>::take_memory(bump);
  typename AdaptedMaps<T>::Most most;
  for (const Bound& b : bound_) {
    for (const LinearAt& map : b.qkv) most.add(map, this->rows_);
    if (b.delta) {
      for (const LinearAt& map : b.delta->maps) most.add(map, this->rows_);
    }
    if (b.latent) {
      if (b.latent->query_down) most.add(*b.latent->query_down, this->rows_);
      for (const LinearAt* map : {&b.latent->query, &b.latent->down, &b.latent->up}) {
        most.add(*map, this->rows_);
      }
    }
    most.add(b.attention_out, this->rows_);
    if (b.inputs) {
      most.add(b.inputs->gate, this->mlp_rows_);
      most.add(b.inputs->out, this->mlp_rows_);
      if (b.inputs->projection) most.add(b.inputs->projection->map, this->rows_);
    }
    for (const LinearAt& map : b.mlp_in) most.add(map, this->mlp_rows_);
    most.add(b.mlp_out, this->mlp_rows_);
  }
  maps_.take_memory(bump, most);
  experts_.take_memory(bump);
  inputs_.take_memory(bump);
  delta_.take_memory(bump);
}

template <class Ops>
void DecoderLayer<Ops>::project_qkv(const BlockWeights<T>& block, const T* x) {
  const Bound& b = bound_[block.layer];
  auto& ops = this->ops_;
  const LayerMemory<T>& m = this->memory_;
  const std::size_t row = this->shape_.row();
  if (b.latent) latent_.project(block, *b.latent, x, m);
  if (b.delta) return delta_.project(block, *b.delta, x, m);
  const std::size_t keys = this->shape_.width();
  std::size_t column = 0;
  for (const LinearAt& part : b.qkv) {
    const bool normed = b.query_norm && column < projected_row();
    const std::size_t gates = normed ? 0 : projected_keys(b) - keys;
    maps_.linear(block, part, x, (normed ? m.projected : m.qkv) + column - gates,
                 normed ? projected_row() : row, all_rows());
    column += part.out;
  }
  if (b.query_norm) {
    const BlockWeights<T> norms = head_norm_weights(block, x);
    ops.norms->norm_groups(norms[*b.query_norm], heads(b, this->shape_.heads), m.projected,
                           projected_row(), m.qkv, row);
    if (b.key_norm) {
      ops.norms->norm_groups(norms[*b.key_norm], heads(b, this->shape_.kv_heads),
                             m.projected + projected_keys(b), projected_row(), m.qkv + keys, row);
    }
    if (b.key_norm && b.norms_values) value_norms_.forward(this->shape_, b.keys_are_values, m);
  }
  if (b.rotates) rotate(b, m.qkv, 1.0F);
  shared_keys_.forward(this->shape_, b.shared_keys, this->links_, m);
}

template <class Ops>
void DecoderLayer<Ops>::compute(const BlockWeights<T>& block, const T* in) {
  const Bound& b = bound_[block.layer];
  auto& ops = this->ops_;
  const LayerMemory<T>& m = this->memory_;
  const std::size_t rows = this->rows_;
  if (b.norm_before_attention) ops.norms->norm(block[*b.norm_before_attention], in, m.norm1, rows);
  project_qkv(block, b.norm_before_attention ? m.norm1 : in);
  const bool half = b.content == BlockContent::attention_half;  // only the last product remains
  if (b.delta) delta_.convolve(block, *b.delta, this->sequences_.documents, m);
  if (this->has_kept_attention()) {
    if (!b.delta) this->exchange_projections();
  } else {
    if (b.delta) {
      delta_.recur(block, *b.delta, this->sequences_.documents, m);
    } else {
      this->attend(b.window, block.sinks(b.sinks));
    }
    if (!half) project_attention(block, in);
  }
  if (half) return;
  if (b.norm_before_mlp)
    ops.norms->norm(block[*b.norm_before_mlp], mlp_input(b, in), m.norm2, rows);
}

template <class Ops>
void DecoderLayer<Ops>::project_attention(const BlockWeights<T>& block, const T* in) {
  const Bound& b = bound_[block.layer];
  const LayerMemory<T>& m = this->memory_;
  if (b.norm_after_attention) {
    maps_.linear(block, b.attention_out, attention_results(block), m.attention_out, this->width_,
                 all_rows());
    this->ops_.norms->norm(block[*b.norm_after_attention], m.attention_out, m.middle, this->rows_,
                           in);
  } else {
    maps_.linear_onto(block, b.attention_out, attention_results(block), in, m.middle, all_rows());
  }
}

template <class Ops>
void DecoderLayer<Ops>::compute_mlp(const BlockWeights<T>& block, const MlpChunk<T>& chunk,
                                    const T* x) {
  const Bound& b = bound_[block.layer];
  auto& ops = this->ops_;
  const MapRows rows = rows_of(chunk);
  x += chunk.first * this->width_;
  if (b.gated) {
    const GateUp<T> pair = gate_up(b, chunk);
    T* to = pair.gate;
    for (const LinearAt& part : b.mlp_in) {
      maps_.linear(block, part, x, to, pair.step, rows);
      to = pair.up;
    }
    ops.elementwise->glu({b.activation}, pair, chunk.activated);
  } else {
    maps_.linear(block, b.mlp_in.front(), x, chunk.hidden, chunk.width, rows);
    ops.elementwise->activate(b.activation, chunk.hidden, chunk.activated,
                              chunk.rows * chunk.width);
  }
  if (b.norm_after_mlp) {
    maps_.linear(block, b.mlp_out, chunk.activated, chunk.mlp_out, this->width_, rows);
  }
}

template <class Ops>
void DecoderLayer<Ops>::project(const BlockWeights<T>& block, const T* in, T* out) {
  const Bound& b = bound_[block.layer];
  if (b.content == BlockContent::attention_half) {
    maps_.linear_onto(block, b.attention_out, attention_results(block), in, out, all_rows());
    return;
  }
  if (b.inputs && this->links_.inputs != nullptr) {
    inputs_.project(block, *b.inputs, in, this->links_.inputs);
  }
  if (b.experts) experts_.forward(block, *b.experts, this->memory_.middle);
  this->by_chunks(b.mlp_out.in, [&](const MlpChunk<T>& chunk) {
    compute_mlp(block, chunk, mlp_x(b));
    T* const to = out + chunk.first * this->width_;
    add_mlp(block, chunk, to);
    if (!b.inputs) return;
    inputs_.forward(block, *b.inputs, rows_of(chunk), this->links_, to);
  });
  scale_result(block, out);
}

template <class Ops>
void DecoderLayer<Ops>::add_mlp(const BlockWeights<T>& block, const MlpChunk<T>& chunk, T* out) {
  const Bound& b = bound_[block.layer];
  const T* const residual = this->memory_.middle + chunk.first * this->width_;
  if (b.experts) {
    experts_.join(block, *b.experts, block[*b.norm_after_mlp], rows_of(chunk), chunk.mlp_out,
                  residual, out);
  } else if (b.norm_after_mlp) {
    this->ops_.norms->norm(block[*b.norm_after_mlp], chunk.mlp_out, out, chunk.rows, residual);
  } else {
    maps_.linear_onto(block, b.mlp_out, chunk.activated, residual, out, rows_of(chunk));
  }
}

template <class Ops>
void DecoderLayer<Ops>::differentiate(const BlockWeights<T>& block, const T* in, T* dy) {
  scale_result(block, dy);
  if (bound_[block.layer].content == BlockContent::whole) differentiate_mlp(block, in, dy);
  differentiate_attention(block, in, dy);
  const Bound& b = bound_[block.layer];
  if (b.inputs) inputs_.project_backward(block, *b.inputs, in, this->links_.inputs_gradient, dy);
}

template <class Ops>
void DecoderLayer<Ops>::differentiate_mlp(const BlockWeights<T>& block, const T* in, T* dy) {
  const Bound& b = bound_[block.layer];
  const LayerMemory<T>& m = this->memory_;
  const bool normed = b.norm_before_mlp.has_value();
  // Later chunks add to the sums of the first.
  BlockWeights<T> weights = block;
  if (b.experts) experts_.forward(block, *b.experts, m.middle);
  this->by_chunks(b.mlp_out.in, [&](const MlpChunk<T>& chunk) {
    if (!this->kept_) compute_mlp(weights, chunk, mlp_x(b));
    T* const dresult = dy + chunk.first * this->width_;
    const T* dout = dresult;
    if (b.inputs) {
      add_mlp(block, chunk, inputs_.stream());
      inputs_.backward(weights, *b.inputs, rows_of(chunk), this->links_, inputs_.stream(), dresult);
    }
    if (b.experts) {
      experts_.join_backward(block, *b.experts, block[*b.norm_after_mlp], {chunk.first, chunk.rows},
                             chunk.mlp_out, dout);
      dout = chunk.mlp_out;
    } else if (b.norm_after_mlp) {
      this->ops_.norms->norm_backward(block[*b.norm_after_mlp], chunk.mlp_out, dout, nullptr,
                                      chunk.mlp_out, chunk.rows);
      dout = chunk.mlp_out;
    }
    mlp_backward(weights, chunk, mlp_x(b), dout, normed ? m.gradient : dy, !normed);
    weights.accumulation = Accumulation::later;
  });
  if (normed) {
    // Attention needs the gradient of the sum.
    this->ops_.norms->norm_backward(block[*b.norm_before_mlp], mlp_input(b, in), m.gradient, dy,
                                    b.parallel ? m.middle : dy, this->rows_);
  }
  if (b.experts) experts_.backward(block, *b.experts, m.middle, dy);
}

template <class Ops>
template <class D>
void DecoderLayer<Ops>::mlp_backward(const BlockWeights<T>& block, const MlpChunk<T>& chunk,
                                     const T* x, const T* dout, D* dx, bool add_to_dx) {
  const Bound& b = bound_[block.layer];
  auto& ops = this->ops_;
  const MapRows rows = rows_of(chunk);
  const std::size_t width = this->width_;
  add_bias_gradient(ops, block[b.mlp_out], dout, width, rows.count);
  maps_.linear_weight(block, b.mlp_out, chunk.activated, dout, width, rows);
  maps_.linear_input(block, b.mlp_out, dout, width, chunk.activated, rows);

  x += chunk.first * width;
  dx += chunk.first * width;
  if (b.gated) {
    const GateUp<T> pair = gate_up(b, chunk);
    ops.elementwise->glu_backward({b.activation}, pair, chunk.activated);
    const T* from = pair.gate;
    for (const LinearAt& part : b.mlp_in) {
      add_bias_gradient(ops, block[part], from, pair.step, rows.count);
      maps_.linear_weight(block, part, x, from, pair.step, rows);
      from = pair.up;
    }
    from = pair.gate;
    for (const LinearAt& part : b.mlp_in) {
      maps_.linear_input(block, part, from, pair.step, dx, rows, from != pair.gate || add_to_dx);
      from = pair.up;
    }
  } else {
    const LinearAt& map = b.mlp_in.front();
    ops.elementwise->activate_backward(b.activation, chunk.hidden, chunk.activated,
                                       block[map].bias_gradient, rows.count, chunk.width);
    maps_.linear_weight(block, map, x, chunk.activated, chunk.width, rows);
    maps_.linear_input(block, map, chunk.activated, chunk.width, dx, rows, add_to_dx);
  }
}

template <class Ops>
void DecoderLayer<Ops>::differentiate_attention(const BlockWeights<T>& block, const T* in, T* dy) {
  const Bound& b = bound_[block.layer];
  auto& ops = this->ops_;
  auto& m = this->memory_;
  const T* dout = dy;
  if (b.norm_after_attention) {
    ops.norms->norm_backward(block[*b.norm_after_attention], m.attention_out, dy, nullptr,
                             m.attention_out, this->rows_);
    dout = m.attention_out;
  }
  if (b.norm_before_attention) {
    attention_backward(block, m.norm1, dout, m.gradient, false);
    ops.norms->norm_backward(block[*b.norm_before_attention], in, m.gradient,
                             b.parallel ? m.middle : dy, dy, this->rows_);
  } else {
    attention_backward(block, in, dout, dy, true);
  }
}

template <class Ops>
template <class D>
void DecoderLayer<Ops>::attention_backward(const BlockWeights<T>& block, const T* x, const T* dout,
                                           D* dx, bool add_to_dx) {
  const Bound& b = bound_[block.layer];
  auto& ops = this->ops_;
  auto& m = this->memory_;
  const MapRows rows = all_rows();
  const std::size_t row = this->shape_.row();
  add_bias_gradient(ops, block[b.attention_out], dout, this->width_, rows.count);
  maps_.linear_weight(block, b.attention_out, attention_results(block, x), dout, this->width_,
                      rows);
  T* const dresults = b.latent ? latent_.results_gradient(*b.latent, m) : m.gradient;
  maps_.linear_input(block, b.attention_out, dout, this->width_, dresults, rows);
  if (b.delta) {
    const std::int32_t* const documents = this->sequences_.documents;
    const Norm<T> norm = head_norm_weights(block, x)[b.delta->norm];
    return delta_.backward(block, *b.delta, norm, x, documents, m, dx, add_to_dx);
  }
  if (b.latent) latent_.pad_results_gradient(*b.latent, m);
  if (b.output_gate) gate_.backward(m);
  this->attend_backward(b.window, block.sinks(b.sinks));
  shared_keys_.backward(this->shape_, b.shared_keys, this->links_, m);
  if (b.rotates) rotate(b, m.dqkv, -1.0F);
  if (b.query_norm) {
    const std::size_t keys = this->shape_.width();
    const BlockWeights<T> norms = head_norm_weights(block, x);
    ops.norms->norm_groups_backward(norms[*b.query_norm], heads(b, this->shape_.heads), m.projected,
                                    projected_row(), m.dqkv, row);
    if (b.key_norm) {
      ops.norms->norm_groups_backward(norms[*b.key_norm], heads(b, this->shape_.kv_heads),
                                      m.projected + projected_keys(b), projected_row(),
                                      m.dqkv + keys, row);
    }
    if (b.key_norm && b.norms_values) value_norms_.backward(this->shape_, b.keys_are_values, m);
  }
  if (b.latent) latent_.backward(block, *b.latent, x, m, dx, add_to_dx);
  const T* from = m.dqkv;
  for (const LinearAt& part : b.qkv) {
    const bool gated = b.output_gate && from == m.dqkv;
    const T* const d = gated ? gate_.query_gradient(m) : from;
    const std::size_t step = gated ? gate_.row() : row;
    add_bias_gradient(ops, block[part], d, step, rows.count);
    maps_.linear_weight(block, part, x, d, step, rows);
    maps_.linear_input(block, part, d, step, dx, rows, from != m.dqkv || add_to_dx);
    from += gated ? this->shape_.width() : part.out;
  }
}

}  // namespace ballast::model
