#pragma once

#include <cstddef>
#include <vector>

#include <fmt/format.h>

#include "ballast/model/family.h"

#include "src/model/layer.h"

namespace ballast::model {

template <class Ops>
class LlamaLayer final : public Layer<Ops> {
 public:
  using T = typename Ops::Value;
  LlamaLayer(const Architecture& model, const AttentionShape& shape, Ops& ops)
      : Layer<Ops>(model, shape, ops, 3),
        tensors_(this->bind_layers(model, bind)),
        theta_(model.config.number("rope_theta")) {}
  void take_lasting_memory(Bump& bump) override;

 private:
  struct Tensors {
    NormAt norm1;
    std::vector<LinearAt> qkv;  ///< side by side
    LinearAt attention_out;
    NormAt norm2;
    std::vector<LinearAt> gate_up;  ///< both, or both in one
    LinearAt gate;
    LinearAt up;
    LinearAt down;
  };
  static Tensors bind(const BlockSpec& block) {
    return {find_norm(block, "input_layernorm"),
            find_joined(block, {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"}),
            find_linear(block, "self_attn.o_proj"),
            find_norm(block, "post_attention_layernorm"),
            find_gate_up(block),
            find_linear(block, "mlp.gate_proj"),
            find_linear(block, "mlp.up_proj"),
            find_linear(block, "mlp.down_proj")};
  }
  void compute(const BlockWeights<T>& block, const T* in) override;
  void project(const BlockWeights<T>& block, T* out) override;
  void differentiate(const BlockWeights<T>& block, const T* in, T* dy) override;
  static std::vector<LinearAt> find_gate_up(const BlockSpec& block) {
    if (Ops::kJoinsGateAndUp) return find_joined(block, {"mlp.gate_proj", "mlp.up_proj"});
    return {find_linear(block, "mlp.gate_proj"), find_linear(block, "mlp.up_proj")};
  }
  /// Where gate and up are: row by row side by side if one product makes both, else one after the
  /// other.
  [[nodiscard]] GateUp<T> gate_up(const Tensors& t) const {
    const bool joined = t.gate_up.size() == 1;
    T* const gate = this->memory_.hidden;
    const std::size_t wide = this->wide_;
    return {gate, gate + (joined ? wide : this->rows_ * wide), joined ? 2 * wide : wide,
            this->rows_, wide};
  }
  /// Rotates queries and keys by their positions; `direction` -1 rotates back. They lie side by
  /// side in a row and are rotated as one row of heads.
  void rotate(T* qkv, float direction);

  std::vector<Tensors> tensors_;
  double theta_;
  float* cosine_ = nullptr;  ///< [length, head_dim / 2]
  float* sine_ = nullptr;
  bool angles_filled_ = false;
};

/// RMSNorm, rotary positions, grouped-query attention, SwiGLU, no biases.
class Llama final : public Family {
 public:
  template <class Ops>
  using LayerOf = LlamaLayer<Ops>;

  std::string_view name() const override { return "llama"; }
  std::vector<NumberKey> numbers() const override { return {{"rope_theta", 10000.0}}; }
  void complete(ModelConfig& c, const Refuse& refuse) const override {
    if (c.intermediate_size == 0) {
      c.intermediate_size = round_up((8 * c.hidden_size + 2) / 3, 64);
    }
    if (c.head_dim % 2 != 0) {
      refuse("head_dim", fmt::format("{} is odd; rotary positions need an even one", c.head_dim));
    }
    if (const double theta = c.number("rope_theta"); !(theta > 0.0)) {
      refuse("rope_theta", fmt::format("must be above 0, got {}", theta));
    }
  }
  OuterTensors outer() const override {
    return {.tokens = "model.embed_tokens.weight", .norm = "model.norm", .norm_has_bias = false};
  }
  BlockSpec layer(const ModelConfig& c, std::uint64_t index) const override {
    const auto h = c.hidden_size;
    const auto i = c.intermediate_size;
    const auto a = c.num_heads * c.head_dim;
    const auto kv = c.num_kv_heads * c.head_dim;
    const double stddev = c.init_stddev;
    return BlockBuilder(BlockKind::layer, fmt::format("layer {}", index),
                        fmt::format("model.layers.{}.", index))
        .add("input_layernorm.weight", {h}, Init::ones)
        .add("self_attn.q_proj.weight", {a, h}, Init::normal, stddev)
        .add("self_attn.k_proj.weight", {kv, h}, Init::normal, stddev)
        .add("self_attn.v_proj.weight", {kv, h}, Init::normal, stddev)
        .attend(a)
        .add("self_attn.o_proj.weight", {h, a}, Init::normal, stddev)
        .add("post_attention_layernorm.weight", {h}, Init::ones)
        .add("mlp.gate_proj.weight", {i, h}, Init::normal, stddev)
        .add("mlp.up_proj.weight", {i, h}, Init::normal, stddev)
        .add_last_product("mlp.down_proj.weight", {h, i}, stddev)
        .finish();
  }
  std::vector<CheckpointKey> checkpoint_keys() const override {
    return {{"model_type", "family"},
            {"vocab_size", "vocab_size"},
            {"hidden_size", "hidden_size"},
            {"num_hidden_layers", "num_layers"},
            {"num_attention_heads", "num_heads"},
            {"num_key_value_heads", "num_kv_heads"},
            {"head_dim", "head_dim"},
            {"intermediate_size", "intermediate_size"},
            {"rms_norm_eps", "norm_epsilon"},
            {"tie_word_embeddings", "tie_embeddings"},
            {"rope_theta", "rope_theta"},
            {"rope_parameters.rope_theta", "rope_theta"},  // of Transformers 5
            {"rope_parameters.rope_type", "", {"default"}},
            {"rope_scaling", ""},
            {"hidden_act", "", {"silu", "swish"}},
            {"attention_bias", "", {"false"}},
            {"mlp_bias", "", {"false"}}};
  }
  /// Frequencies of the rotary positions.
  std::vector<CheckpointBuffer> checkpoint_buffers(const ModelConfig& c) const override {
    return {{".rotary_emb.inv_freq", {c.head_dim / 2}}};
  }
};

template <class Ops>
void LlamaLayer<Ops>::take_lasting_memory(Bump& bump) {
  const std::size_t angles = this->shape_.length * (this->shape_.head_dim / 2);
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
  const Tensors& t = tensors_[block.layer];
  auto& ops = this->ops_;
  auto& m = this->memory_;
  const std::size_t rows = this->rows_;
  ops.norm(block[t.norm1], in, m.norm1, rows);
  T* to = m.qkv;
  for (const LinearAt& part : t.qkv) {
    ops.linear(block[part], m.norm1, to, this->shape_.row(), rows);
    to += part.out;
  }
  rotate(m.qkv, 1.0F);
  this->attend();
  ops.linear_onto(block[t.attention_out], m.attention, in, m.middle, rows);
  ops.norm(block[t.norm2], m.middle, m.norm2, rows);
  const GateUp<T> middle = gate_up(t);
  T* part_of_middle = middle.gate;
  for (const LinearAt& part : t.gate_up) {
    ops.linear(block[part], m.norm2, part_of_middle, middle.step, rows);
    part_of_middle = middle.up;
  }
  ops.swiglu(middle, m.activated);
}

template <class Ops>
void LlamaLayer<Ops>::project(const BlockWeights<T>& block, T* out) {
  const LayerMemory<T>& m = this->memory_;
  this->ops_.linear_onto(block[tensors_[block.layer].down], m.activated, m.middle, out,
                         this->rows_);
}

template <class Ops>
void LlamaLayer<Ops>::differentiate(const BlockWeights<T>& block, const T* in, T* dy) {
  const Tensors& t = tensors_[block.layer];
  auto& ops = this->ops_;
  auto& m = this->memory_;
  const std::size_t rows = this->rows_;
  const std::size_t row = this->shape_.row();
  const std::size_t width = this->width_;
  const Linear<T> attention_out = block[t.attention_out];
  const Linear<T> down = block[t.down];

  ops.linear_weight(down, m.activated, dy, width, rows);
  ops.linear_input(down, dy, width, m.activated, rows);
  const GateUp<T> middle = gate_up(t);
  ops.swiglu_backward(middle, m.activated);
  const T* part_of_middle = middle.gate;
  for (const LinearAt& part : t.gate_up) {
    ops.linear_weight(block[part], m.norm2, part_of_middle, middle.step, rows);
    part_of_middle = middle.up;
  }
  ops.linear_input(block[t.gate], middle.gate, middle.step, m.gradient, rows);
  ops.linear_input(block[t.up], middle.up, middle.step, m.gradient, rows, true);
  ops.norm_backward(block[t.norm2], m.middle, m.gradient, dy, dy, rows);

  ops.linear_weight(attention_out, m.attention, dy, width, rows);
  ops.linear_input(attention_out, dy, width, m.gradient, rows);
  this->attend_backward();
  rotate(m.dqkv, -1.0F);
  const T* from = m.dqkv;
  for (const LinearAt& part : t.qkv) {
    ops.linear_weight(block[part], m.norm1, from, row, rows);
    ops.linear_input(block[part], from, row, m.gradient, rows, from != m.dqkv);
    from += part.out;
  }
  ops.norm_backward(block[t.norm1], in, m.gradient, dy, dy, rows);
}

}  // namespace ballast::model
