#pragma once

#include <cmath>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "ballast/model/block_layout.h"

#include "src/model/description/families/decoder.h"

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
class Llama : public DecoderFamily {
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
  OuterTensors outer() const override {
    return {.tokens = "model.embed_tokens.weight", .norm = "model.norm", .norm_has_bias = false};
  }
  DecoderSpec decoder(const ModelConfig& c, std::uint64_t index) const override {
    const bool biased = c.details.contains("attention_bias") && c.flag("attention_bias");
    return {.norm_before_attention = "input_layernorm",
            .norm_before_mlp = "post_attention_layernorm",
            .qkv = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"},
            .window = window(c, index),
            .attention_out = "self_attn.o_proj",
            .mlp_in = {"mlp.gate_proj", "mlp.up_proj"},
            .mlp_out = "mlp.down_proj",
            .qkv_bias = biased,
            .attention_out_bias = biased,
            .mlp_bias = c.details.contains("mlp_bias") && c.flag("mlp_bias")};
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
                                       {"rms_norm_eps", "norm_epsilon"},
                                       {"tie_word_embeddings", "tie_embeddings"},
                                       {"hidden_act", "", {"silu", "swish"}}};
    for (const DetailKey& detail : details()) keys.push_back(checkpoint_key(detail));
    set_standards(keys, {{"rms_norm_eps", 1e-6}, {"tie_word_embeddings", ties_embeddings()}});
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
  std::string prefix(std::uint64_t index) const override {
    return fmt::format("model.layers.{}.", index);
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

// Families that differ from Llama in a few points, named after the classes in Hugging Face's
// transformers.

class Mistral final : public Llama {
 public:
  Mistral()
      : Llama({.name = "mistral",
               .checkpoint_class = "MistralForCausalLM",
               .details = {{"rope_theta", 10000.0}, {"rope_scaling", {}}, {"sliding_window", {}}},
               .rules = {.rope = {.longest = 131072}},
               .standards = {{"num_key_value_heads", 8},
                             {"intermediate_size", 14336},
                             {"sliding_window", 4096, true}}}) {}
};

/// Queries grow with their position (factor_at()).
class Ministral3 final : public Llama {
 public:
  Ministral3()
      : Llama({.name = "ministral3",
               .checkpoint_class = "Ministral3ForCausalLM",
               .details = {{"rope_theta", 1000000.0}, {"rope_scaling", {}}, {"sliding_window", {}}},
               .rules = {.rope = {.longest = 262144,
                                  .standard = text::Json::object(
                                      {{"rope_type", "yarn"},
                                       {"rope_theta", 1000000.0},
                                       {"factor", 16.0},
                                       {"original_max_position_embeddings", 16384},
                                       {"beta_fast", 32.0},
                                       {"beta_slow", 1.0},
                                       {"mscale_all_dim", 1.0},
                                       {"mscale", 1.0},
                                       {"llama_4_scaling_beta", 0.1}}),
                                  .unread = {"max_position_embeddings"}}},
               .standards = {{"num_key_value_heads", 8},
                             {"head_dim", 128},
                             {"intermediate_size", 14336},
                             {"rms_norm_eps", 1e-5},
                             {kPadToken, 11, true}}}) {}
  void complete(ModelConfig& c, const Refuse& refuse) const override {
    Llama::complete(c, refuse);
    // transformers scales positions if config.json does not mention them, and reads these keys.
    text::Json& scaling = c.details["rope_scaling"];
    if (!scaling.is_null()) return;
    scaling = text::Json::object({{"rope_type", "default"},
                                  {"llama_4_scaling_beta", 0.0},
                                  {"original_max_position_embeddings", 16384}});
  }
  std::vector<Rotary> rotaries(const ModelConfig& c, const Refuse& refuse) const override {
    const Rotary of_queries = rotary_positions(c, refuse, {.grows = true});
    Rotary of_keys = of_queries;
    of_keys.slope = 0.0;
    return {of_keys, of_queries};
  }
  DecoderSpec decoder(const ModelConfig& c, std::uint64_t index) const override {
    DecoderSpec spec = Llama::decoder(c, index);
    spec.query_rotary = 1;
    return spec;
  }
};

/// Has biases for queries, keys and values.
class Qwen2 final : public Llama {
 public:
  Qwen2()
      : Llama({.name = "qwen2",
               .checkpoint_class = "Qwen2ForCausalLM",
               .details = {{"rope_theta", 10000.0},
                           {"rope_scaling", {}},
                           {"use_sliding_window", false},
                           {"sliding_window", {}},
                           {"max_window_layers", 28},
                           {"layer_types", {}}},
               .rules = {.rope = {.longest = 32768}},
               .standards = {{"num_key_value_heads", 32, true},
                             {"intermediate_size", 22016},
                             {"sliding_window", 4096, true}}}) {}
  DecoderSpec decoder(const ModelConfig& c, std::uint64_t index) const override {
    DecoderSpec spec = Llama::decoder(c, index);
    spec.qkv_bias = true;
    return spec;
  }

 protected:
  bool is_windowed(const ModelConfig& c, std::uint64_t index) const override {
    return static_cast<double>(index) >= c.number("max_window_layers");
  }
};

/// Has norms for each head of queries and keys.
class Qwen3 : public Llama {
 public:
  Qwen3()
      : Llama({.name = "qwen3",
               .checkpoint_class = "Qwen3ForCausalLM",
               .details = keys(),
               .rules = {.rope = {.longest = 32768}},
               .standards = {{"num_key_value_heads", 32, true},
                             {"head_dim", 128},
                             {"intermediate_size", 22016},
                             {"sliding_window", 4096, true}}}) {}
  DecoderSpec decoder(const ModelConfig& c, std::uint64_t index) const override {
    DecoderSpec spec = Llama::decoder(c, index);
    spec.query_norm = "self_attn.q_norm";
    spec.key_norm = "self_attn.k_norm";
    return spec;
  }

 protected:
  using Llama::Llama;
  static std::vector<DetailKey> keys() {
    return {{"rope_theta", 10000.0},   {"rope_scaling", {}},
            {"attention_bias", false}, {"use_sliding_window", false},
            {"sliding_window", {}},    {"max_window_layers", 28},
            {"layer_types", {}}};
  }
  bool is_windowed(const ModelConfig& c, std::uint64_t index) const override {
    return static_cast<double>(index) >= c.number("max_window_layers");
  }
};

/// Some layers have no positions.
class SmolLm3 final : public Llama {
 public:
  SmolLm3()
      : Llama({.name = "smollm3",
               .checkpoint_class = "SmolLM3ForCausalLM",
               .details = {{"rope_theta", 2000000.0},
                           {"rope_scaling", {}},
                           {"attention_bias", false},
                           {"mlp_bias", false},
                           {"use_sliding_window", false},
                           {"sliding_window", {}},
                           {"layer_types", {}},
                           {"no_rope_layers", {}},
                           {"no_rope_layer_interval", 4}},
               .rules = {.rope = {.longest = 32768},
                         .without_effect = {"max_window_layers", "pretraining_tp"}},
               .standards = {{"num_key_value_heads", 4, true},
                             {"intermediate_size", 11008},
                             {"tie_word_embeddings", true},
                             {kPadToken, 128004, true}}}) {}
  void complete(ModelConfig& c, const Refuse& refuse) const override {
    Llama::complete(c, refuse);
    const text::Json& layers = c.detail("no_rope_layers");
    if (layers.is_null()) {
      const double interval = c.number("no_rope_layer_interval");
      if (interval < 1.0) {
        refuse("no_rope_layer_interval", fmt::format("must be at least 1, got {}", interval));
      }
      return;
    }
    bool flags = layers.is_array() && layers.elements().size() == c.num_layers;
    for (const text::Json& one : layers.elements())
      flags = flags && one.whole() && *one.whole() <= 1;
    if (!flags) {
      refuse("no_rope_layers",
             fmt::format("must be a list of num_layers ({}) numbers: 1 for a layer with rotary "
                         "positions, 0 for one without",
                         c.num_layers));
    }
  }
  DecoderSpec decoder(const ModelConfig& c, std::uint64_t index) const override {
    DecoderSpec spec = Llama::decoder(c, index);
    spec.rotates = rotates(c, index);
    return spec;
  }

 protected:
  bool is_windowed(const ModelConfig& c, std::uint64_t index) const override {
    return !rotates(c, index);
  }

 private:
  static bool rotates(const ModelConfig& c, std::uint64_t index) {
    const text::Json& layers = c.detail("no_rope_layers");
    if (layers.is_array()) return *layers.elements()[index].whole() != 0;
    return !is_multiple(index + 1, c.number("no_rope_layer_interval"));
  }
};

/// Has fused maps and rotates a part of each head.
class Phi3 final : public Llama {
 public:
  Phi3()
      : Llama(
            {.name = "phi3",
             .checkpoint_class = "Phi3ForCausalLM",
             .details = {{"rope_theta", 10000.0},
                         {"rope_scaling", {}},
                         {"partial_rotary_factor", 1.0},
                         {"sliding_window", {}}},
             .rules = {.rope = {.longest = 4096, .part = "partial_rotary_factor", .trained = 4096},
                       .without_effect = {"full_attn_mod", "interpolate_factor"}},
             .standards = {
                 {"rms_norm_eps", 1e-5}, {"intermediate_size", 8192}, {kPadToken, 32000, true}}}) {}
  DecoderSpec decoder(const ModelConfig& c, std::uint64_t index) const override {
    DecoderSpec spec = Llama::decoder(c, index);
    spec.qkv = {"self_attn.qkv_proj"};
    spec.mlp_in = {"mlp.gate_up_proj"};
    return spec;
  }
};

/// Has norms after attention and MLP instead of before, and norms over whole queries and keys.
class Olmo2 : public Llama {
 public:
  Olmo2()
      : Llama(
            {.name = "olmo2",
             .checkpoint_class = "Olmo2ForCausalLM",
             .details = {{"rope_theta", 10000.0}, {"rope_scaling", {}}, {"attention_bias", false}},
             .rules = {.rope = {.longest = 2048}},
             .standards = {
                 {"rms_norm_eps", 1e-5}, {"intermediate_size", 11008}, {kPadToken, 1, true}}}) {}
  DecoderSpec decoder(const ModelConfig& c, std::uint64_t index) const override {
    DecoderSpec spec = Llama::decoder(c, index);
    spec.norm_before_attention = "";
    spec.norm_after_attention = "post_attention_layernorm";
    spec.norm_before_mlp = "";
    spec.norm_after_mlp = "post_feedforward_layernorm";
    spec.query_norm = "self_attn.q_norm";
    spec.key_norm = "self_attn.k_norm";
    spec.norms_whole_rows = true;
    return spec;
  }

 protected:
  using Llama::Llama;
};

/// OLMo 2 with a window in three of four layers, whose rotary positions have their own base and are
/// not scaled.
class Olmo3 final : public Olmo2 {
 public:
  Olmo3()
      : Olmo2({.name = "olmo3",
               .checkpoint_class = "Olmo3ForCausalLM",
               .details = {{"rope_theta", 500000.0},
                           {"rope_scaling", {}},
                           {"attention_bias", false},
                           {"rope_local_base_freq", 500000.0},
                           {"sliding_window", 4096},
                           {"layer_types", {}}},
               .rules = {.rope = {.longest = 2048, .by_layer_type = true, .local_theta = ""}},
               .standards = {
                   {"rms_norm_eps", 1e-5}, {"intermediate_size", 11008}, {kPadToken, 1, true}}}) {}
  std::vector<Rotary> rotaries(const ModelConfig& c, const Refuse& refuse) const override {
    return {rotary_positions(c, refuse), plain_rotary_positions(c, "rope_local_base_freq", refuse)};
  }
  DecoderSpec decoder(const ModelConfig& c, std::uint64_t index) const override {
    DecoderSpec spec = Olmo2::decoder(c, index);
    spec.rotary = is_sliding(c, index) ? 1 : 0;
    return spec;
  }

 protected:
  bool is_windowed(const ModelConfig& /*config*/, std::uint64_t index) const override {
    return (index + 1) % 4 != 0;
  }
};

}  // namespace ballast::model
