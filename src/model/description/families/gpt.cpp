#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "ballast/core/error.h"

#include "src/model/description/families/families.h"
#include "src/model/description/layer_spec.h"

namespace ballast::model {
namespace {

NormSpec layer_norm(const char* name) {
  return {.name = name, .layer_norm = true};
}

/// LayerNorm, learned positions, GELU (tanh form) and biases. Weights of products are [in, out].
class Gpt2 final : public Family {
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
  OuterSpec outer(const ModelConfig& /*config*/) const override {
    return {.tokens = "transformer.wte.weight",
            .positions = "transformer.wpe.weight",
            .norm = layer_norm("transformer.ln_f")};
  }
  LayerSpec layer(const ModelConfig& c, std::uint64_t index) const override {
    // Projections that add to the residual stream start with smaller weights, scaled by the number
    // of such additions, like in Hugging Face's GPT-2 (and section 2.3 of its paper).
    const double factor = 1.0 / std::sqrt(2.0 * static_cast<double>(c.num_layers));
    const auto last = [&](const char* name) {
      return MapSpec{.name = name, .bias = true, .init_factor = factor};
    };
    AttentionSpec attention = {.heads = {c.num_heads, c.num_kv_heads, c.head_dim},
                               .maps = HeadMaps{.maps = {{"attn.c_attn", true}}},
                               .out = last("attn.c_proj")};
    MlpSpec mlp = {.in = {{"mlp.c_fc", true}},
                   .out = last("mlp.c_proj"),
                   .width = c.intermediate_size,
                   .gated = false,
                   .activation = Activation::gelu_tanh};
    return {.prefix = fmt::format("transformer.h.{}.", index),
            .sublayers = {{.before = layer_norm("ln_1"), .body = std::move(attention)},
                          {.before = layer_norm("ln_2"), .body = std::move(mlp)}},
            .input_first = true};
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
};

/// LayerNorm, rotary positions in a part of each head, and biases. Attention and MLP read the same
/// residual stream, unless use_parallel_residual is false. Source: Black et al., "GPT-NeoX-20B",
/// 2022, section 2.
class GptNeoX final : public Family {
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
  OuterSpec outer(const ModelConfig& /*config*/) const override {
    return {.tokens = "gpt_neox.embed_in.weight",
            .norm = layer_norm("gpt_neox.final_layer_norm"),
            .output = "embed_out.weight"};
  }
  LayerSpec layer(const ModelConfig& c, std::uint64_t index) const override {
    const bool biased = c.flag("attention_bias");
    const bool exact = c.detail("hidden_act") == kExact;
    AttentionSpec attention = {
        .heads = {c.num_heads, c.num_kv_heads, c.head_dim},
        .maps = HeadMaps{.maps = {{"attention.query_key_value", biased}}, .interleaved = true},
        .rotary = RotarySpec{},
        .out = {"attention.dense", biased}};
    MlpSpec mlp = {.in = {{"mlp.dense_h_to_4h", true}},
                   .out = {"mlp.dense_4h_to_h", true},
                   .width = c.intermediate_size,
                   .gated = false,
                   .activation = exact ? Activation::gelu : Activation::gelu_tanh};
    const Reads reads = c.flag("use_parallel_residual") ? Reads::layer_input : Reads::stream;
    return {.prefix = fmt::format("gpt_neox.layers.{}.", index),
            .sublayers = {{.before = layer_norm("input_layernorm"), .body = std::move(attention)},
                          {.before = layer_norm("post_attention_layernorm"),
                           .body = std::move(mlp),
                           .reads = reads}}};
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

 private:
  /// Values of hidden_act for the exact GELU and for its tanh form.
  static constexpr const char* kExact = "gelu";
  static inline const std::vector<std::string> kTanhForms = {"gelu_new", "gelu_fast",
                                                             "gelu_pytorch_tanh"};
};

}  // namespace

std::unique_ptr<const Family> families::gpt2() {
  return std::make_unique<const Gpt2>();
}
std::unique_ptr<const Family> families::gpt_neox() {
  return std::make_unique<const GptNeoX>();
}

}  // namespace ballast::model
