#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "ballast/core/error.h"

#include "src/model/description/families/decoder.h"

namespace ballast::model {

/// LayerNorm, learned positions, GELU (tanh form) and biases. Weights of products are [in, out].
class Gpt2 final : public DecoderFamily {
 public:
  std::string_view name() const override { return "gpt2"; }
  std::string_view checkpoint_class() const override { return "GPT2LMHeadModel"; }
  bool ties_embeddings() const override { return true; }
  void complete(ModelConfig& c, const Refuse& refuse) const override {
    if (c.intermediate_size == 0) c.intermediate_size = 4 * c.hidden_size;
    if (c.num_kv_heads != c.num_heads) {
      refuse("num_kv_heads", fmt::format("gpt2 needs the value of num_heads ({}), got {}",
                                         c.num_heads, c.num_kv_heads));
    }
  }
  OuterTensors outer() const override {
    return {.tokens = "transformer.wte.weight",
            .positions = "transformer.wpe.weight",
            .norm = "transformer.ln_f"};
  }
  DecoderSpec decoder(const ModelConfig& c, std::uint64_t /*index*/) const override {
    return {
        .layer_norm = true,
        .norm_before_attention = "ln_1",
        .norm_before_mlp = "ln_2",
        .qkv = {"attn.c_attn"},
        .rotates = false,
        .attention_out = "attn.c_proj",
        .gated = false,
        .activation = Activation::gelu_tanh,
        .mlp_in = {"mlp.c_fc"},
        .mlp_out = "mlp.c_proj",
        .conv1d = true,
        .qkv_bias = true,
        .attention_out_bias = true,
        .mlp_bias = true,
        // Projections that add to the residual stream start with smaller weights, scaled by the
        // number of such additions, like in Hugging Face's GPT-2 (and section 2.3 of its paper).
        .residual_factor = 1.0 / std::sqrt(2.0 * static_cast<double>(c.num_layers))};
  }
  std::vector<CheckpointKey> checkpoint_keys() const override {
    std::vector<CheckpointKey> keys = {
        {"model_type", "family"},
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
    set_standards(
        keys, {{"n_positions", 1024}, {"layer_norm_epsilon", 1e-5}, {"tie_word_embeddings", true}});
    return keys;
  }
  CheckpointRules checkpoint_rules() const override {
    return {.aliases = {{"hidden_size", "n_embd"},
                        {"num_hidden_layers", "n_layer"},
                        {"num_attention_heads", "n_head"},
                        {"max_position_embeddings", "n_positions"}},
            .without_effect = {"n_ctx", "reorder_and_upcast_attn", "summary_activation",
                               "summary_first_dropout", "summary_proj_to_labels", "summary_type",
                               "summary_use_proj"}};
  }
  /// The causal mask, and the value of masked scores.
  std::vector<CheckpointBuffer> checkpoint_buffers(const ModelConfig& c) const override {
    return {{".attn.bias", {1, 1, c.max_sequence, c.max_sequence}}, {".attn.masked_bias", {}}};
  }

 protected:
  std::string prefix(std::uint64_t index) const override {
    return fmt::format("transformer.h.{}.", index);
  }
};

/// LayerNorm, rotary positions in a part of each head, and biases. Attention and MLP read the same
/// residual stream, unless use_parallel_residual is false. Source: Black et al., "GPT-NeoX-20B",
/// 2022, section 2.
class GptNeoX final : public DecoderFamily {
 public:
  std::string_view name() const override { return "gpt_neox"; }
  std::string_view checkpoint_class() const override { return "GPTNeoXForCausalLM"; }
  std::vector<DetailKey> details() const override {
    return {{"rope_theta", 10000.0},  {"rope_scaling", {}},
            {"attention_bias", true}, {"partial_rotary_factor", 0.25},
            {"hidden_act", "gelu"},   {"use_parallel_residual", true}};
  }
  void complete(ModelConfig& c, const Refuse& refuse) const override {
    if (c.intermediate_size == 0) c.intermediate_size = 4 * c.hidden_size;
    if (c.num_kv_heads != c.num_heads) {
      refuse("num_kv_heads", fmt::format("gpt_neox needs the value of num_heads ({}), got {}",
                                         c.num_heads, c.num_kv_heads));
    }
    if (c.head_dim * c.num_heads != c.hidden_size) {
      refuse("head_dim", fmt::format("gpt_neox needs hidden_size ({}) / num_heads ({}), got {}",
                                     c.hidden_size, c.num_heads, c.head_dim));
    }
    const std::string& activation = c.detail("hidden_act").text();
    const bool tanh_form =
        std::find(kTanhForms.begin(), kTanhForms.end(), activation) != kTanhForms.end();
    if (activation != kExact && !tanh_form) {
      refuse("hidden_act", fmt::format("'{}' is not supported; gpt_neox supports {}, {}",
                                       text::printable(activation), kExact, listed(kTanhForms)));
    }
    rotaries(c, refuse);
  }
  std::vector<Rotary> rotaries(const ModelConfig& c, const Refuse& refuse) const override {
    return {rotary_positions(c, refuse)};
  }
  OuterTensors outer() const override {
    return {.tokens = "gpt_neox.embed_in.weight",
            .norm = "gpt_neox.final_layer_norm",
            .output = "embed_out.weight"};
  }
  DecoderSpec decoder(const ModelConfig& c, std::uint64_t /*index*/) const override {
    const bool biased = c.flag("attention_bias");
    return {
        .layer_norm = true,
        .norm_before_attention = "input_layernorm",
        .norm_before_mlp = "post_attention_layernorm",
        .parallel = c.flag("use_parallel_residual"),
        .qkv = {"attention.query_key_value"},
        .attention_out = "attention.dense",
        .gated = false,
        .activation = c.detail("hidden_act") == kExact ? Activation::gelu : Activation::gelu_tanh,
        .mlp_in = {"mlp.dense_h_to_4h"},
        .mlp_out = "mlp.dense_4h_to_h",
        .interleaved_qkv = true,
        .qkv_bias = biased,
        .attention_out_bias = biased,
        .mlp_bias = true};
  }
  std::vector<CheckpointKey> checkpoint_keys() const override {
    std::vector<CheckpointKey> keys = {{"model_type", "family", {}},
                                       {"vocab_size", "vocab_size", {}},
                                       {"hidden_size", "hidden_size", {}},
                                       {"num_hidden_layers", "num_layers", {}},
                                       {"num_attention_heads", "num_heads", {}},
                                       {"intermediate_size", "intermediate_size", {}},
                                       {"layer_norm_eps", "norm_epsilon", {}},
                                       {"tie_word_embeddings", "tie_embeddings", {}}};
    for (const DetailKey& detail : details()) keys.push_back(checkpoint_key(detail));
    set_standards(
        keys,
        {{"intermediate_size", 24576}, {"layer_norm_eps", 1e-5}, {"tie_word_embeddings", false}});
    return keys;
  }
  CheckpointRules checkpoint_rules() const override {
    return {.rope = {.longest = 2048, .theta = "rotary_emb_base", .part = "rotary_pct"}};
  }
  /// The causal mask, the value of masked scores, and frequencies.
  std::vector<CheckpointBuffer> checkpoint_buffers(const ModelConfig& /*c*/) const override {
    return {{".attention.bias", {1, 1, 0, 0}},
            {".attention.masked_bias", {}},
            {".attention.rotary_emb.inv_freq", {0}}};
  }

 protected:
  std::string prefix(std::uint64_t index) const override {
    return fmt::format("gpt_neox.layers.{}.", index);
  }

 private:
  /// Values of hidden_act for the exact GELU and for its tanh form.
  static constexpr const char* kExact = "gelu";
  static inline const std::vector<std::string> kTanhForms = {"gelu_new", "gelu_fast",
                                                             "gelu_pytorch_tanh"};
};

}  // namespace ballast::model
