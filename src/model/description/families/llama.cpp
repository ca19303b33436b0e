#include "src/model/description/families/llama.h"

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "src/model/description/families/families.h"

namespace ballast::model {
namespace {

/// Returns the detail with this name, or nullptr if the family lacks it or it is null.
const text::Json* given_detail(const ModelConfig& c, std::string_view name) {
  const auto found = c.details.find(name);
  return found == c.details.end() || found->second.is_null() ? nullptr : &found->second;
}

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

/// Has an MLP without a gate, with squared ReLU.
class Arcee final : public Llama {
 public:
  Arcee()
      : Llama({.name = "arcee",
               .checkpoint_class = "ArceeForCausalLM",
               .details = {{"rope_theta", 10000.0},
                           {"rope_scaling", {}},
                           {"attention_bias", false},
                           {"mlp_bias", false}},
               .rules = {.rope = {.longest = 4096}},
               .standards = {{"rms_norm_eps", 1e-5}, {"intermediate_size", 18432}}}) {}
  LayerSpec layer(const ModelConfig& c, std::uint64_t index) const override {
    LayerSpec layer = Llama::layer(c, index);
    MlpSpec& mlp = mlp_of(layer);
    mlp.in.erase(mlp.in.begin());
    mlp.gated = false;
    mlp.activation = Activation::relu_squared;
    return layer;
  }
  std::vector<CheckpointKey> checkpoint_keys() const override {
    std::vector<CheckpointKey> keys = Llama::checkpoint_keys();
    for (CheckpointKey& key : keys) {
      if (key.name == "hidden_act") key.supported = {"relu2"};
    }
    return keys;
  }
};

/// Has biases of queries, keys and values, and its own key for that of the results of attention.
class SeedOss final : public Llama {
 public:
  SeedOss()
      : Llama({.name = "seed_oss",
               .checkpoint_class = "SeedOssForCausalLM",
               .details = {{"rope_theta", 10000.0},
                           {"rope_scaling", {}},
                           {"attention_bias", true},
                           {"attention_out_bias", false},
                           {"mlp_bias", false}},
               .rules = {.rope = {.longest = 524288}, .without_effect = {"pretraining_tp"}},
               .standards = {{"num_key_value_heads", 8, true},
                             {"head_dim", 128, true},
                             {"intermediate_size", 27648},
                             {kPadToken, 1, true}}}) {}
  LayerSpec layer(const ModelConfig& c, std::uint64_t index) const override {
    LayerSpec layer = Llama::layer(c, index);
    attention_of(layer).out.bias = c.flag("attention_out_bias");
    return layer;
  }
};

/// The dense models of Hunyuan: norms of the query and key heads after rotary positions, whose base
/// grows with a key alpha.
class HunYuanDense final : public Llama {
 public:
  HunYuanDense()
      : Llama(
            {.name = "hunyuan_v1_dense",
             .checkpoint_class = "HunYuanDenseV1ForCausalLM",
             .details = {{"rope_theta", 10000.0}, {"rope_scaling", {}}, {"attention_bias", false}},
             .rules = {.rope = {.longest = 2048, .alpha = true},
                       .without_effect = {"attention_head_dim", "eod_token_id", "pretraining_tp",
                                          "use_qk_norm"}},
             .standards = {
                 {"rms_norm_eps", 1e-5}, {"intermediate_size", 11008}, {kPadToken, 0, true}}}) {}
  std::vector<Rotary> rotaries(const ModelConfig& c, const Refuse& refuse) const override {
    return {rotary_positions(c, refuse, {.alpha = true})};
  }
  LayerSpec layer(const ModelConfig& c, std::uint64_t index) const override {
    LayerSpec layer = Llama::layer(c, index);
    HeadMaps& maps = maps_of(layer);
    maps.query_norm = NormSpec{"self_attn.query_layernorm"};
    maps.key_norm = NormSpec{"self_attn.key_layernorm"};
    maps.rotates_first = true;
    return layer;
  }
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
  LayerSpec layer(const ModelConfig& c, std::uint64_t index) const override {
    LayerSpec layer = Llama::layer(c, index);
    attention_of(layer).rotary = RotarySpec{.keys = 0, .queries = 1};
    return layer;
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
  LayerSpec layer(const ModelConfig& c, std::uint64_t index) const override {
    LayerSpec layer = Llama::layer(c, index);
    if (!rotates(c, index)) attention_of(layer).rotary.reset();
    return layer;
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
  LayerSpec layer(const ModelConfig& c, std::uint64_t index) const override {
    LayerSpec layer = Llama::layer(c, index);
    maps_of(layer).maps = {{"self_attn.qkv_proj"}};
    mlp_of(layer).in = {{"mlp.gate_up_proj"}};
    return layer;
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
  LayerSpec layer(const ModelConfig& c, std::uint64_t index) const override {
    LayerSpec layer = Llama::layer(c, index);
    layer.sublayers[0].before.reset();
    layer.sublayers[0].after = NormSpec{"post_attention_layernorm"};
    layer.sublayers[1].before.reset();
    layer.sublayers[1].after = NormSpec{"post_feedforward_layernorm"};
    add_head_norms(layer, 0.0F, true);
    return layer;
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
  LayerSpec layer(const ModelConfig& c, std::uint64_t index) const override {
    LayerSpec layer = Olmo2::layer(c, index);
    const std::size_t rotary = is_sliding(c, index) ? 1 : 0;
    attention_of(layer).rotary = RotarySpec{.keys = rotary, .queries = rotary};
    return layer;
  }

 protected:
  bool is_windowed(const ModelConfig& /*config*/, std::uint64_t index) const override {
    return (index + 1) % 4 != 0;
  }
};

/// EXAONE 4: the layers of OLMo 2 with norms of the query and key heads. In models with a window,
/// layers without it have no positions.
class Exaone4 final : public Olmo2 {
 public:
  Exaone4()
      : Olmo2({.name = "exaone4",
               .checkpoint_class = "Exaone4ForCausalLM",
               .details = {{"rope_theta", 10000.0},
                           {"rope_scaling", {}},
                           {"sliding_window", {}},
                           {"layer_types", {}}},
               .rules = {.rope = {.longest = 2048}},
               .standards = {{"num_key_value_heads", 32},
                             {"rms_norm_eps", 1e-5},
                             {"intermediate_size", 16384},
                             {"sliding_window", 4096, true}}}) {}
  LayerSpec layer(const ModelConfig& c, std::uint64_t index) const override {
    LayerSpec layer = Olmo2::layer(c, index);
    maps_of(layer).whole_rows = false;
    const bool any_window = !c.detail("sliding_window").is_null();
    if (any_window && !is_sliding(c, index)) attention_of(layer).rotary.reset();
    return layer;
  }
  std::vector<CheckpointKey> checkpoint_keys() const override {
    std::vector<CheckpointKey> keys = Olmo2::checkpoint_keys();
    keys.push_back({"sliding_window_pattern", "", {"4", "LLLG"}});
    return keys;
  }

 protected:
  bool is_windowed(const ModelConfig& /*config*/, std::uint64_t index) const override {
    return (index + 1) % 4 != 0;
  }
};

}  // namespace

bool Llama::is_sliding(const ModelConfig& c, std::uint64_t index) const {
  const text::Json* const types = given_detail(c, "layer_types");
  return types == nullptr ? is_windowed(c, index) : types->elements()[index] == "sliding_attention";
}

std::uint64_t Llama::window(const ModelConfig& c, std::uint64_t index) const {
  const text::Json* const tokens = given_detail(c, "sliding_window");
  const text::Json* const used = given_detail(c, "use_sliding_window");
  if (tokens == nullptr || (used != nullptr && !used->flag())) return 0;
  return is_sliding(c, index) ? *tokens->whole() : 0;
}

void Llama::check_windows(const ModelConfig& c, const Refuse& refuse) {
  const text::Json* const tokens = given_detail(c, "sliding_window");
  const text::Json* const used = given_detail(c, "use_sliding_window");
  const bool unused = used != nullptr && !used->flag();  // transformers then writes 0
  if (tokens != nullptr && (!tokens->whole() || (*tokens->whole() == 0 && !unused))) {
    refuse("sliding_window",
           fmt::format("must be a number of tokens, got {}", tokens->described()));
  }
  const text::Json* const types = given_detail(c, "layer_types");
  if (types == nullptr) return;
  bool known = types->is_array() && types->elements().size() == c.num_layers;
  for (const text::Json& type : types->elements()) {
    known = known && (type == "sliding_attention" || type == "full_attention");
  }
  if (known) return;
  refuse("layer_types",
         fmt::format("must be a list of num_layers ({}) words, \"full_attention\" or "
                     "\"sliding_attention\"",
                     c.num_layers));
}

std::unique_ptr<const Family> families::llama() {
  return std::make_unique<const Llama>();
}
std::unique_ptr<const Family> families::mistral() {
  return std::make_unique<const Mistral>();
}
std::unique_ptr<const Family> families::arcee() {
  return std::make_unique<const Arcee>();
}
std::unique_ptr<const Family> families::seed_oss() {
  return std::make_unique<const SeedOss>();
}
std::unique_ptr<const Family> families::hunyuan_v1_dense() {
  return std::make_unique<const HunYuanDense>();
}
std::unique_ptr<const Family> families::ministral3() {
  return std::make_unique<const Ministral3>();
}
std::unique_ptr<const Family> families::smollm3() {
  return std::make_unique<const SmolLm3>();
}
std::unique_ptr<const Family> families::phi3() {
  return std::make_unique<const Phi3>();
}
std::unique_ptr<const Family> families::olmo2() {
  return std::make_unique<const Olmo2>();
}
std::unique_ptr<const Family> families::olmo3() {
  return std::make_unique<const Olmo3>();
}
std::unique_ptr<const Family> families::exaone4() {
  return std::make_unique<const Exaone4>();
}

}  // namespace ballast::model
