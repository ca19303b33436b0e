#pragma once

#include <cmath>
#include <cstddef>
#include <vector>

#include <fmt/format.h>

#include "ballast/model/family.h"

#include "src/model/layer.h"

namespace ballast::model {

template <class Ops>
class Gpt2Layer final : public Layer<Ops> {
 public:
  using T = typename Ops::Value;
  Gpt2Layer(const Architecture& model, const AttentionShape& shape, Ops& ops)
      : Layer<Ops>(model, shape, ops, 2), tensors_(this->bind_layers(model, bind)) {}

 private:
  struct Tensors {
    NormAt norm1;
    LinearAt attention;
    LinearAt attention_out;
    NormAt norm2;
    LinearAt mlp_in;
    LinearAt mlp_out;
  };
  static Tensors bind(const BlockSpec& block) {
    return {find_norm(block, "ln_1"),          find_conv1d(block, "attn.c_attn"),
            find_conv1d(block, "attn.c_proj"), find_norm(block, "ln_2"),
            find_conv1d(block, "mlp.c_fc"),    find_conv1d(block, "mlp.c_proj")};
  }
  void compute(const BlockWeights<T>& block, const T* in) override;
  void project(const BlockWeights<T>& block, T* out) override;
  void differentiate(const BlockWeights<T>& block, const T* in, T* dy) override;

  std::vector<Tensors> tensors_;
};

/// LayerNorm, learned positions, GELU (tanh form), biases. Weights of products are [in, out].
class Gpt2 final : public Family {
 public:
  template <class Ops>
  using LayerOf = Gpt2Layer<Ops>;

  std::string_view name() const override { return "gpt2"; }
  bool ties_embeddings() const override { return true; }
  void complete(ModelConfig& c, const Refuse& refuse) const override {
    if (c.intermediate_size == 0) c.intermediate_size = 4 * c.hidden_size;
    if (c.num_kv_heads != c.num_heads) {
      refuse("num_kv_heads", fmt::format("gpt2 has as many as num_heads ({}), got {}", c.num_heads,
                                         c.num_kv_heads));
    }
  }
  OuterTensors outer() const override {
    return {.tokens = "transformer.wte.weight",
            .positions = "transformer.wpe.weight",
            .norm = "transformer.ln_f"};
  }
  BlockSpec layer(const ModelConfig& c, std::uint64_t index) const override {
    const auto h = c.hidden_size;
    const auto i = c.intermediate_size;
    const auto a = c.num_heads * c.head_dim;
    const double stddev = c.init_stddev;
    // As in Hugging Face's GPT-2 (and section 2.3 of its paper): projections that add to the
    // residual stream start with smaller weights, scaled by the number of such additions.
    const double residual = stddev / std::sqrt(2.0 * static_cast<double>(c.num_layers));
    return BlockBuilder(BlockKind::layer, fmt::format("layer {}", index),
                        fmt::format("transformer.h.{}.", index))
        .add("ln_1.weight", {h}, Init::ones)
        .add("ln_1.bias", {h}, Init::zeros)
        .add("attn.c_attn.weight", {h, 3 * a}, Init::normal, stddev)
        .add("attn.c_attn.bias", {3 * a}, Init::zeros)
        .attend(a)
        .add("attn.c_proj.weight", {a, h}, Init::normal, residual)
        .add("attn.c_proj.bias", {h}, Init::zeros)
        .add("ln_2.weight", {h}, Init::ones)
        .add("ln_2.bias", {h}, Init::zeros)
        .add("mlp.c_fc.weight", {h, i}, Init::normal, stddev)
        .add("mlp.c_fc.bias", {i}, Init::zeros)
        .add_last_product("mlp.c_proj.weight", {i, h}, residual)
        .add("mlp.c_proj.bias", {h}, Init::zeros)
        .finish();
  }
  std::vector<CheckpointKey> checkpoint_keys() const override {
    return {{"model_type", "family"},
            {"vocab_size", "vocab_size"},
            {"n_embd", "hidden_size"},
            {"n_layer", "num_layers"},
            {"n_head", "num_heads"},
            {"n_inner", "intermediate_size"},
            {"n_positions", "max_sequence"},
            {"layer_norm_epsilon", "norm_epsilon"},
            {"tie_word_embeddings", "tie_embeddings"},
            {"activation_function", "", {"gelu_new", "gelu_pytorch_tanh", "gelu_fast"}},
            {"scale_attn_weights", "", {"true"}},
            {"scale_attn_by_inverse_layer_idx", "", {"false"}}};
  }
  /// The causal mask, and the value of masked scores.
  std::vector<CheckpointBuffer> checkpoint_buffers(const ModelConfig& c) const override {
    return {{".attn.bias", {1, 1, c.max_sequence, c.max_sequence}}, {".attn.masked_bias", {}}};
  }
};

template <class Ops>
void Gpt2Layer<Ops>::compute(const BlockWeights<T>& block, const T* in) {
  const Tensors& t = tensors_[block.layer];
  auto& ops = this->ops_;
  auto& m = this->memory_;
  const std::size_t rows = this->rows_;
  const std::size_t wide = this->wide_;
  ops.norm(block[t.norm1], in, m.norm1, rows);
  ops.linear(block[t.attention], m.norm1, m.qkv, this->shape_.row(), rows);
  this->attend();
  ops.linear_onto(block[t.attention_out], m.attention, in, m.middle, rows);
  ops.norm(block[t.norm2], m.middle, m.norm2, rows);
  ops.linear(block[t.mlp_in], m.norm2, m.hidden, wide, rows);
  ops.gelu(m.hidden, m.activated, rows * wide);
}

template <class Ops>
void Gpt2Layer<Ops>::project(const BlockWeights<T>& block, T* out) {
  const LayerMemory<T>& m = this->memory_;
  this->ops_.linear_onto(block[tensors_[block.layer].mlp_out], m.activated, m.middle, out,
                         this->rows_);
}

template <class Ops>
void Gpt2Layer<Ops>::differentiate(const BlockWeights<T>& block, const T* in, T* dy) {
  const Tensors& t = tensors_[block.layer];
  auto& ops = this->ops_;
  auto& m = this->memory_;
  const std::size_t rows = this->rows_;
  const std::size_t width = this->width_;
  const std::size_t wide = this->wide_;
  const std::size_t qkv_row = this->shape_.row();
  const Linear<T> attention = block[t.attention];
  const Linear<T> attention_out = block[t.attention_out];
  const Linear<T> mlp_in = block[t.mlp_in];
  const Linear<T> mlp_out = block[t.mlp_out];

  ops.add_column_sums(dy, mlp_out.bias_gradient, rows, width);
  ops.linear_weight(mlp_out, m.activated, dy, width, rows);
  ops.linear_input(mlp_out, dy, width, m.activated, rows);
  ops.gelu_backward(m.hidden, m.activated, mlp_in.bias_gradient, rows, wide);
  ops.linear_weight(mlp_in, m.norm2, m.activated, wide, rows);
  ops.linear_input(mlp_in, m.activated, wide, m.gradient, rows);
  ops.norm_backward(block[t.norm2], m.middle, m.gradient, dy, dy, rows);

  ops.add_column_sums(dy, attention_out.bias_gradient, rows, width);
  ops.linear_weight(attention_out, m.attention, dy, width, rows);
  ops.linear_input(attention_out, dy, width, m.gradient, rows);
  this->attend_backward();
  ops.add_column_sums(m.dqkv, attention.bias_gradient, rows, qkv_row);
  ops.linear_weight(attention, m.norm1, m.dqkv, qkv_row, rows);
  ops.linear_input(attention, m.dqkv, qkv_row, m.gradient, rows);
  ops.norm_backward(block[t.norm1], in, m.gradient, dy, dy, rows);
}

}  // namespace ballast::model
