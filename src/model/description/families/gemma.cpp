#include <array>
#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <fmt/format.h>

#include "src/model/description/families/families.h"
#include "src/model/description/families/llama.h"

namespace ballast::model {
namespace {

/// Parts that the families of Gemma share: RMSNorms before and after attention and MLP, an MLP with
/// a GELU gate, an embedding that is multiplied by sqrt(hidden_size), windows in some layers.
class Gemma : public Llama {
 public:
  bool ties_embeddings() const override { return true; }
  OuterSpec outer(const ModelConfig& c) const override {
    OuterSpec outer = Llama::outer(c);
    outer.norm.offset = norm_offset();
    outer.token_factor = std::sqrt(static_cast<double>(c.hidden_size));
    outer.rounds_factor = true;
    return outer;
  }
  LayerSpec layer(const ModelConfig& c, std::uint64_t index) const override {
    LayerSpec layer = Llama::layer(c, index);
    layer.sublayers[0].before->offset = norm_offset();
    layer.sublayers[0].after = norm("post_attention_layernorm");
    layer.sublayers[1].before = norm("pre_feedforward_layernorm");
    layer.sublayers[1].after = norm("post_feedforward_layernorm");
    mlp_of(layer).activation = Activation::gelu_tanh;
    return layer;
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
  [[nodiscard]] NormSpec norm(const char* name) const {
    return {.name = name, .offset = norm_offset()};
  }
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

/// Checks the inputs of layers besides the residual stream.
void check_layer_embedding(const ModelConfig& c, const Refuse& refuse) {
  constexpr std::uint64_t kMax = 1U << 16U;
  const text::Json& width = c.detail("hidden_size_per_layer_input");
  if (width.whole().value_or(kMax + 1) > kMax) {
    refuse("hidden_size_per_layer_input",
           fmt::format("must be a whole number of at most {}, got {}", kMax, width.described()));
  }
  const text::Json& rows = c.detail("vocab_size_per_layer_input");
  if (*width.whole() > 0 && rows.whole().value_or(0) == 0) {
    refuse("vocab_size_per_layer_input",
           fmt::format("must be a number of tokens, got {}", rows.described()));
  }
}

void check_experts(const ModelConfig& c, const Refuse& refuse) {
  if (!c.flag("enable_moe_block")) return;
  constexpr std::uint64_t kMax = 4096;
  for (const char* const key : {"num_experts", "top_k_experts", "moe_intermediate_size"}) {
    const text::Json& value = c.detail(key);
    const bool counts = std::string_view(key) == "num_experts";
    if (value.whole().value_or(0) > 0 && (!counts || *value.whole() <= kMax)) continue;
    refuse(key, fmt::format("must be a number of at least 1{} with enable_moe_block, got {}",
                            counts ? fmt::format(" and at most {}", kMax) : "", value.described()));
  }
  if (*c.detail("top_k_experts").whole() > *c.detail("num_experts").whole()) {
    refuse("top_k_experts",
           fmt::format("{} is above num_experts ({})", c.detail("top_k_experts").described(),
                       c.detail("num_experts").described()));
  }
}

LayerExpertsSpec experts_of(const ModelConfig& c) {
  return {.count = *c.detail("num_experts").whole(),
          .per_token = *c.detail("top_k_experts").whole(),
          .width = *c.detail("moe_intermediate_size").whole(),
          .router = "router.proj",
          .router_scale = "router.scale",
          .factors = "router.per_expert_scale",
          .in = "experts.gate_up_proj",
          .out = "experts.down_proj",
          .norm_before = "pre_feedforward_layernorm_2",
          .norm_after = "post_feedforward_layernorm_2",
          .norm_after_mlp = "post_feedforward_layernorm_1"};
}

LayerEmbeddingSpec inputs_of(const ModelConfig& c) {
  return {.width = *c.detail("hidden_size_per_layer_input").whole(),
          .vocabulary = *c.detail("vocab_size_per_layer_input").whole(),
          .table = "model.embed_tokens_per_layer",
          .projection = "model.per_layer_model_projection",
          .projection_norm = "model.per_layer_projection_norm",
          .gate = "per_layer_input_gate",
          .out = "per_layer_projection",
          .norm = "post_per_layer_input_norm"};
}

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
  OuterSpec outer(const ModelConfig& c) const override {
    OuterSpec outer = Gemma::outer(c);
    outer.logit_cap = cap_of(c, "final_logit_softcapping");
    return outer;
  }
  LayerSpec layer(const ModelConfig& c, std::uint64_t index) const override;
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
  [[nodiscard]] HeadExtents heads(const ModelConfig& c, std::uint64_t index) const {
    if (slides(c, index)) return {c.num_heads, c.num_kv_heads, c.head_dim};
    const text::Json& own = c.detail("num_global_key_value_heads");
    const bool counts = c.flag("attention_k_eq_v") && own.whole().has_value();
    return {c.num_heads, counts ? *own.whole() : c.num_kv_heads, whole(c, "global_head_dim")};
  }
  /// Returns the number of the layer whose keys and values layer `index` attends to.
  [[nodiscard]] std::uint64_t keys_of(const ModelConfig& c, std::uint64_t index) const;
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

/// Refuses numbers of sharing layers that the class of transformers refuses.
void Gemma4::check_sharing(const ModelConfig& c, const Refuse& refuse) const {
  const text::Json& value = c.detail("num_kv_shared_layers");
  if (value.whole().value_or(c.num_layers) >= c.num_layers) {
    refuse("num_kv_shared_layers",
           fmt::format("must be a whole number below num_layers ({}), got {}", c.num_layers,
                       value.described()));
  }
  const std::uint64_t first = first_sharing(c);
  for (std::uint64_t layer = first; layer < c.num_layers; ++layer) {
    if (keys_of(c, layer) < first) continue;
    refuse(
        "num_kv_shared_layers",
        fmt::format("is {}, but none of the first {} layers has the type of layer {}, whose keys "
                    "and values it would read; change it, or layer_types",
                    value.described(), first, layer));
  }
}

std::uint64_t Gemma4::keys_of(const ModelConfig& c, std::uint64_t index) const {
  const std::uint64_t first = first_sharing(c);
  if (index < first) return index;
  for (std::uint64_t layer = first; layer-- > 0;) {
    if (slides(c, layer) == slides(c, index)) return layer;
  }
  return index;
}

LayerSpec Gemma4::layer(const ModelConfig& c, std::uint64_t index) const {
  const bool full = !slides(c, index);
  const bool reads = keys_of(c, index) != index;
  LayerSpec layer = Gemma::layer(c, index);
  add_head_norms(layer);
  AttentionSpec& attention = attention_of(layer);
  attention.heads = heads(c, index);
  attention.scale = 1.0;
  const std::size_t rotary = full ? 0 : 1;
  attention.rotary = RotarySpec{.keys = rotary, .queries = rotary};
  if (full) attention.window = 0;
  HeadMaps& maps = maps_of(layer);
  maps.value_norm = NormSpec{.offset = 1.0F};
  if (full && c.flag("attention_k_eq_v")) maps.maps.pop_back();
  if (reads) {
    attention.keys_of = keys_of(c, index);
    maps.maps.resize(1);
    maps.key_norm.reset();
    if (c.flag("use_double_wide_mlp")) mlp_of(layer).width *= 2;
  }
  layer.result_scale = "layer_scalar";
  if (c.flag("enable_moe_block")) {
    layer.sublayers[1].body = MlpWithExpertsSpec{mlp_of(layer), experts_of(c)};
  }
  if (whole(c, "hidden_size_per_layer_input") > 0) {
    const LayerEmbeddingSpec inputs = inputs_of(c);
    layer.sublayers.push_back({.body = inputs, .after = NormSpec{inputs.norm}});
  }
  return layer;
}

void Gemma4::complete(ModelConfig& c, const Refuse& refuse) const {
  check_layer_embedding(c, refuse);
  check_experts(c, refuse);
  const std::uint64_t width = whole(c, "global_head_dim");
  if (width == 0 || width % 2 != 0 || width > kMaxHeadWidth) {
    refuse("global_head_dim", fmt::format("must be an even number of at most {}, got {}",
                                          kMaxHeadWidth, c.detail("global_head_dim").described()));
  }
  const text::Json& own = c.detail("num_global_key_value_heads");
  const std::uint64_t heads = own.is_null() ? c.num_kv_heads : own.whole().value_or(0);
  if (heads == 0 || c.num_heads % heads != 0) {
    refuse("num_global_key_value_heads",
           fmt::format("must divide num_heads ({}), got {}", c.num_heads, own.described()));
  }
  check_above_zero(c, "final_logit_softcapping", refuse, true);
  text::Json& scaling = c.details["rope_scaling"];
  if (scaling.is_null()) scaling = usual_scaling();
  Llama::complete(c, refuse);
  check_sharing(c, refuse);
}

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
  LayerSpec layer(const ModelConfig& c, std::uint64_t index) const override {
    LayerSpec layer = Gemma::layer(c, index);
    attention_of(layer).scale = 1.0 / std::sqrt(c.number("query_pre_attn_scalar"));
    attention_of(layer).cap = cap_of(c, "attn_logit_softcapping");
    return layer;
  }
  OuterSpec outer(const ModelConfig& c) const override {
    OuterSpec outer = Gemma::outer(c);
    outer.logit_cap = cap_of(c, "final_logit_softcapping");
    return outer;
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
  LayerSpec layer(const ModelConfig& c, std::uint64_t index) const override {
    LayerSpec layer = Gemma::layer(c, index);
    add_head_norms(layer, norm_offset());
    const std::size_t rotary = is_sliding(c, index) ? 1 : 0;
    attention_of(layer).rotary = RotarySpec{.keys = rotary, .queries = rotary};
    attention_of(layer).scale = 1.0 / std::sqrt(c.number("query_pre_attn_scalar"));
    return layer;
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

}  // namespace

std::unique_ptr<const Family> families::gemma2() {
  return std::make_unique<const Gemma2>();
}
std::unique_ptr<const Family> families::gemma3() {
  return std::make_unique<const Gemma3>();
}
std::unique_ptr<const Family> families::gemma4() {
  return std::make_unique<const Gemma4>();
}

}  // namespace ballast::model
