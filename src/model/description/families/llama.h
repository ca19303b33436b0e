#pragma once

#include <cmath>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "ballast/model/block_layout.h"

#include "src/model/description/families/families.h"
#include "src/model/description/layer_spec.h"

namespace ballast::model {

/// Largest width of a head, and largest rank of a map of latent attention.
constexpr std::uint64_t kMaxHeadWidth = std::uint64_t{1} << 16U;

/// Returns whether `number` is a multiple of `interval`, like % in Python, for intervals of any
/// size.
inline bool is_multiple(std::uint64_t number, double interval) {
  return std::fmod(static_cast<double>(number), interval) == 0.0;
}

/// RMSNorm, rotary positions, grouped-query attention and SwiGLU. Other families derive from it and
/// override the differences.
class Llama : public Family {
 public:
  Llama()
      : Llama({.name = "llama",
               .checkpoint_class = "LlamaForCausalLM",
               .details = {{"rope_theta", 10000.0},
                           {"rope_scaling", {}},
                           {"attention_bias", false},
                           {"mlp_bias", false}},
               // Values of SmolLM2.
               .rules = {.rope = {.longest = 2048},
                         .without_effect = {"is_llama_config", "pretraining_tp"}},
               .standards = {{"intermediate_size", 11008}}}) {}
  std::string_view name() const override { return facts_.name; }
  std::string_view checkpoint_class() const override { return facts_.checkpoint_class; }
  std::vector<DetailKey> details() const override {
    std::vector<DetailKey> keys = facts_.details;
    keys.push_back({kPadToken, {}});
    return keys;
  }
  CheckpointRules checkpoint_rules() const override { return facts_.rules; }
  void complete(ModelConfig& c, const Refuse& refuse) const override {
    if (c.intermediate_size == 0) {
      c.intermediate_size = round_up((8 * c.hidden_size + 2) / 3, 64);
    }
    rotaries(c, refuse);
    check_windows(c, refuse);
  }
  std::vector<Rotary> rotaries(const ModelConfig& c, const Refuse& refuse) const override {
    return {rotary_positions(c, refuse)};
  }
  OuterSpec outer(const ModelConfig& /*config*/) const override {
    return {.tokens = "model.embed_tokens.weight", .norm = NormSpec{"model.norm"}};
  }
  LayerSpec layer(const ModelConfig& c, std::uint64_t index) const override {
    const bool biased = c.details.contains("attention_bias") && c.flag("attention_bias");
    const bool mlp_biased = c.details.contains("mlp_bias") && c.flag("mlp_bias");
    AttentionSpec attention = {.heads = {c.num_heads, c.num_kv_heads, c.head_dim},
                               .maps = HeadMaps{.maps = {{"self_attn.q_proj", biased},
                                                         {"self_attn.k_proj", biased},
                                                         {"self_attn.v_proj", biased}}},
                               .rotary = RotarySpec{},
                               .window = window(c, index),
                               .out = {"self_attn.o_proj", biased}};
    MlpSpec mlp = {.in = {{"mlp.gate_proj", mlp_biased}, {"mlp.up_proj", mlp_biased}},
                   .out = {"mlp.down_proj", mlp_biased},
                   .width = c.intermediate_size};
    return {
        .prefix = fmt::format("model.layers.{}.", index),
        .sublayers = {{.before = NormSpec{"input_layernorm"}, .body = std::move(attention)},
                      {.before = NormSpec{"post_attention_layernorm"}, .body = std::move(mlp)}}};
  }
  std::vector<CheckpointKey> checkpoint_keys() const override {
    std::vector<CheckpointKey> keys = {{"model_type", "family"},
                                       {"vocab_size", "vocab_size"},
                                       {"hidden_size", "hidden_size"},
                                       {"num_hidden_layers", "num_layers"},
                                       {"num_attention_heads", "num_heads"},
                                       {"num_key_value_heads", "num_kv_heads"},
                                       {"head_dim", "head_dim"},
                                       {"intermediate_size", "intermediate_size"},
                                       {"rms_norm_eps", "norm_epsilon", {}, 1e-6, false},
                                       {"tie_word_embeddings", "tie_embeddings"},
                                       {"hidden_act", "", {"silu", "swish"}}};
    for (const DetailKey& detail : details()) keys.push_back(checkpoint_key(detail));
    set_standards(keys, {{"tie_word_embeddings", ties_embeddings()}});
    set_standards(keys, facts_.standards);
    return keys;
  }
  /// Frequencies of the rotary positions.
  std::vector<CheckpointBuffer> checkpoint_buffers(const ModelConfig& c) const override {
    return {{".rotary_emb.inv_freq", {c.head_dim / 2}}};
  }

 protected:
  /// Differences between families that need no code.
  struct Facts {
    std::string_view name;
    std::string_view checkpoint_class;
    std::vector<DetailKey> details;
    CheckpointRules rules;
    /// Values that the class of transformers assumes for missing keys, if they differ from the
    /// details' defaults.
    std::vector<CheckpointStandard> standards;
  };
  explicit Llama(Facts facts) : facts_(std::move(facts)) {}
  /// Gives heads of queries and keys norms. `whole_rows`: HeadMaps::whole_rows.
  static void add_head_norms(LayerSpec& layer, float offset = 0.0F, bool whole_rows = false) {
    HeadMaps& maps = maps_of(layer);
    maps.query_norm = NormSpec{"self_attn.q_norm", offset};
    maps.key_norm = NormSpec{"self_attn.k_norm", offset};
    maps.whole_rows = whole_rows;
  }
  /// Returns whether a layer has the window if the config has one but no layer_types.
  virtual bool is_windowed(const ModelConfig& /*config*/, std::uint64_t /*index*/) const {
    return true;
  }
  /// Returns whether the layer has a window by layer_types or, without them, by is_windowed().
  [[nodiscard]] bool is_sliding(const ModelConfig& c, std::uint64_t index) const;

 private:
  /// Returns sliding_window if the layer has one, else 0.
  [[nodiscard]] std::uint64_t window(const ModelConfig& c, std::uint64_t index) const;
  static void check_windows(const ModelConfig& c, const Refuse& refuse);

  Facts facts_;
};

}  // namespace ballast::model
