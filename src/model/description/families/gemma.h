#pragma once

#include <cmath>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <fmt/format.h>

#include "src/model/description/families/decoder.h"
#include "src/model/description/families/llama.h"

namespace ballast::model {

/// Parts that the families of Gemma share: RMSNorms before and after attention and MLP, an MLP with
/// a GELU gate, an embedding that is multiplied by sqrt(hidden_size), windows in some layers.
class Gemma : public Llama {
 public:
  bool ties_embeddings() const override { return true; }
  OuterTensors outer() const override {
    OuterTensors tensors = Llama::outer();
    tensors.norm_offset = norm_offset();
    tensors.scales_tokens = true;
    return tensors;
  }
  DecoderSpec decoder(const ModelConfig& c, std::uint64_t index) const override {
    DecoderSpec spec = Llama::decoder(c, index);
    spec.norm_offset = norm_offset();
    spec.norm_after_attention = "post_attention_layernorm";
    spec.norm_before_mlp = "pre_feedforward_layernorm";
    spec.norm_after_mlp = "post_feedforward_layernorm";
    spec.activation = Activation::gelu_tanh;
    return spec;
  }
  std::vector<CheckpointKey> checkpoint_keys() const override {
    std::vector<CheckpointKey> keys = Llama::checkpoint_keys();
    std::erase_if(keys, [](const CheckpointKey& key) { return key.name == "hidden_act"; });
    keys.insert(keys.end(),
                {{"hidden_activation", "", {"gelu_pytorch_tanh", "gelu_new", "gelu_fast"}},
                 {"use_bidirectional_attention", "", {"false"}}});
    return keys;
  }

 protected:
  using Llama::Llama;
  /// Added to the weights of all norms.
  [[nodiscard]] virtual float norm_offset() const { return 1.0F; }
  /// Checks a key that must be above 0. `nullable`: whether it may be missing.
  static void check_above_zero(const ModelConfig& c, std::string_view key, const Refuse& refuse,
                               bool nullable = false) {
    const text::Json& value = c.detail(key);
    if (nullable && value.is_null()) return;
    if (value.is_number() && value.number() > 0.0) return;
    refuse(key, fmt::format("must be above 0, got {}", value.described()));
  }
  /// Returns a cap (AttentionShape::cap) that a key gives; 0 if it is null.
  static double cap_of(const ModelConfig& c, std::string_view key) {
    const text::Json& value = c.detail(key);
    return value.is_null() ? 0.0 : value.number();
  }
};

/// The text models of Gemma 4. Layers without a window have other heads: wider ones, whose keys may
/// be values, too, and whose rotary positions turn a part of each head. Heads of queries, keys and
/// values have norms instead of a factor of the scores. A stored number multiplies the result of
/// each layer. In E2B and E4B the last layers attend to keys and values of earlier layers, and each
/// layer has an embedding.
class Gemma4 final : public Gemma {
 public:
  Gemma4()
      : Gemma({.name = "gemma4",
               .checkpoint_class = "Gemma4ForCausalLM",
               .details = {{"rope_theta", 1000000.0},
                           {"rope_scaling", {}},
                           {"attention_bias", false},
                           {"rope_local_base_freq", 10000.0},
                           {"sliding_window", 512},
                           {"layer_types", {}},
                           {"global_head_dim", 512},
                           {"num_global_key_value_heads", {}},
                           {"attention_k_eq_v", false},
                           {"final_logit_softcapping", {}},
                           {"num_kv_shared_layers", 0},
                           {"use_double_wide_mlp", false},
                           {"hidden_size_per_layer_input", 0},
                           {"vocab_size_per_layer_input", 262144},
                           {"enable_moe_block", false},
                           {"num_experts", {}},
                           {"top_k_experts", {}},
                           {"moe_intermediate_size", {}}},
               .rules = {.rope = {.longest = 131072,
                                  .by_layer_type = true,
                                  .local_theta = "",
                                  .standard = usual_scaling()},
                         .without_effect = {"hidden_act"},
                         .of_full_layers = {{"head_dim", "global_head_dim"},
                                            {"num_key_value_heads", "num_global_key_value_heads"}}},
               .standards = {{"num_key_value_heads", 4},
                             {"head_dim", 256},
                             {"intermediate_size", 9216},
                             {"hidden_size_per_layer_input", 256},
                             {kPadToken, 0, true}}}) {}
  std::string_view checkpoint_type() const override { return "gemma4_text"; }
  void complete(ModelConfig& c, const Refuse& refuse) const override;
  std::vector<Rotary> rotaries(const ModelConfig& c, const Refuse& refuse) const override {
    return {rotary_positions(c, refuse, {.width = whole(c, "global_head_dim")}),
            plain_rotary_positions(c, "rope_local_base_freq", refuse)};
  }
  double score_scale(const ModelConfig& /*config*/) const override { return 1.0; }
  double logit_cap(const ModelConfig& c) const override {
    return cap_of(c, "final_logit_softcapping");
  }
  HeadExtents heads(const ModelConfig& c, std::uint64_t index) const override {
    if (slides(c, index)) return Gemma::heads(c, index);
    const text::Json& own = c.detail("num_global_key_value_heads");
    const bool counts = c.flag("attention_k_eq_v") && own.whole().has_value();
    return {c.num_heads, counts ? *own.whole() : c.num_kv_heads, whole(c, "global_head_dim")};
  }
  std::uint64_t keys_of(const ModelConfig& c, std::uint64_t index) const override;
  std::uint64_t layer_input_width(const ModelConfig& c) const override {
    return whole(c, "hidden_size_per_layer_input");
  }
  DecoderSpec decoder(const ModelConfig& c, std::uint64_t index) const override;
  std::vector<CheckpointKey> checkpoint_keys() const override {
    std::vector<CheckpointKey> keys = Gemma::checkpoint_keys();
    for (CheckpointKey& key : keys) {
      // Text is always causal. With "vision", tokens of an image see each other.
      if (key.name == "use_bidirectional_attention") key.supported = {"vision"};
    }
    return keys;
  }

 protected:
  [[nodiscard]] float norm_offset() const override { return 0.0F; }
  bool is_windowed(const ModelConfig& /*config*/, std::uint64_t index) const override {
    return (index + 1) % 6 != 0;
  }

 private:
  void check_sharing(const ModelConfig& c, const Refuse& refuse) const;
  /// Returns the number of the first layer that attends to keys of another one.
  static std::uint64_t first_sharing(const ModelConfig& c) {
    return c.num_layers - whole(c, "num_kv_shared_layers");
  }
  static text::Json usual_scaling() {
    return text::Json::object({{"rope_type", "proportional"}, {"partial_rotary_factor", 0.25}});
  }
  static std::uint64_t whole(const ModelConfig& c, std::string_view key) {
    return c.detail(key).whole().value_or(0);
  }
  /// Returns whether the layer has a window. The last one never has.
  [[nodiscard]] bool slides(const ModelConfig& c, std::uint64_t index) const {
    return index + 1 < c.num_layers && is_sliding(c, index);
  }
};

/// Has soft caps of attention scores and logits. Every second layer has a window.
class Gemma2 final : public Gemma {
 public:
  Gemma2()
      : Gemma({.name = "gemma2",
               .checkpoint_class = "Gemma2ForCausalLM",
               .details = {{"rope_theta", 10000.0},
                           {"rope_scaling", {}},
                           {"attention_bias", false},
                           {"sliding_window", 4096},
                           {"layer_types", {}},
                           {"query_pre_attn_scalar", 256},
                           {"attn_logit_softcapping", {}},
                           {"final_logit_softcapping", {}}},
               .rules = {.rope = {.longest = 8192},
                         .without_effect = {"hidden_act", "cache_implementation"}},
               .standards = {{"num_key_value_heads", 4},
                             {"head_dim", 256},
                             {"intermediate_size", 9216},
                             {"attn_logit_softcapping", 50.0, true},
                             {"final_logit_softcapping", 30.0, true},
                             {kPadToken, 0, true}}}) {}
  void complete(ModelConfig& c, const Refuse& refuse) const override {
    Llama::complete(c, refuse);
    check_above_zero(c, "query_pre_attn_scalar", refuse);
    check_above_zero(c, "attn_logit_softcapping", refuse, true);
    check_above_zero(c, "final_logit_softcapping", refuse, true);
  }
  double score_scale(const ModelConfig& c) const override {
    return 1.0 / std::sqrt(c.number("query_pre_attn_scalar"));
  }
  double score_cap(const ModelConfig& c) const override {
    return cap_of(c, "attn_logit_softcapping");
  }
  double logit_cap(const ModelConfig& c) const override {
    return cap_of(c, "final_logit_softcapping");
  }

 protected:
  bool is_windowed(const ModelConfig& /*config*/, std::uint64_t index) const override {
    return index % 2 == 0;
  }
};

/// The text models of Gemma 3. Each head of queries and keys has a norm. Most layers have a window
/// and a smaller base of the rotary positions.
class Gemma3 final : public Gemma {
 public:
  Gemma3()
      : Gemma({.name = "gemma3",
               .checkpoint_class = "Gemma3ForCausalLM",
               .details = {{"rope_theta", 1000000.0},
                           {"rope_scaling", {}},
                           {"attention_bias", false},
                           {"rope_local_base_freq", 10000.0},
                           {"sliding_window", 4096},
                           {"sliding_window_pattern", 6},
                           {"layer_types", {}},
                           {"query_pre_attn_scalar", 256}},
               .rules = {.rope = {.longest = 131072, .by_layer_type = true},
                         .without_effect = {"_sliding_window_pattern", "hidden_act"}},
               .standards = {{"num_key_value_heads", 4},
                             {"head_dim", 256},
                             {"intermediate_size", 9216},
                             {kPadToken, 0, true}}}) {}
  std::string_view checkpoint_type() const override { return "gemma3_text"; }
  void complete(ModelConfig& c, const Refuse& refuse) const override {
    Llama::complete(c, refuse);
    const double pattern = c.number("sliding_window_pattern");
    if (!(pattern >= 1.0) || pattern != std::floor(pattern)) {
      refuse("sliding_window_pattern",
             fmt::format("must be a number of layers, the last of which has no window, got {}",
                         pattern));
    }
    check_above_zero(c, "query_pre_attn_scalar", refuse);
  }
  std::vector<Rotary> rotaries(const ModelConfig& c, const Refuse& refuse) const override {
    return {rotary_positions(c, refuse), plain_rotary_positions(c, "rope_local_base_freq", refuse)};
  }
  double score_scale(const ModelConfig& c) const override {
    return 1.0 / std::sqrt(c.number("query_pre_attn_scalar"));
  }
  DecoderSpec decoder(const ModelConfig& c, std::uint64_t index) const override {
    DecoderSpec spec = Gemma::decoder(c, index);
    spec.query_norm = "self_attn.q_norm";
    spec.key_norm = "self_attn.k_norm";
    spec.rotary = is_sliding(c, index) ? 1 : 0;
    return spec;
  }
  std::vector<CheckpointKey> checkpoint_keys() const override {
    std::vector<CheckpointKey> keys = Gemma::checkpoint_keys();
    keys.insert(keys.end(),
                {{"attn_logit_softcapping", "", {}}, {"final_logit_softcapping", "", {}}});
    return keys;
  }

 protected:
  bool is_windowed(const ModelConfig& c, std::uint64_t index) const override {
    return !is_multiple(index + 1, c.number("sliding_window_pattern"));
  }
};

}  // namespace ballast::model
