#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "ballast/model/block_layout.h"

#include "src/model/description/families/families.h"
#include "src/model/description/families/llama.h"

namespace ballast::model {
namespace {

/// Checks the keys of gated delta nets.
void check_delta(const ModelConfig& c, const Refuse& refuse) {
  constexpr std::uint64_t kMaxTaps = 8;
  for (const char* key : {"linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim",
                          "linear_value_head_dim", "linear_conv_kernel_dim"}) {
    whole_number(c, key, 1, refuse);
  }
  const std::uint64_t keys = whole_number(c, "linear_num_key_heads");
  const std::uint64_t values = whole_number(c, "linear_num_value_heads");
  if (values % keys != 0) {
    refuse("linear_num_value_heads",
           fmt::format("{} is not a multiple of linear_num_key_heads {}", values, keys));
  }
  const std::uint64_t taps = whole_number(c, "linear_conv_kernel_dim");
  if (taps > kMaxTaps) {
    refuse("linear_conv_kernel_dim", fmt::format("must be at most {}, got {}", kMaxTaps, taps));
  }
}

/// Checks the key layer_types, which is null or has a word for each layer.
void check_mixer_types(const ModelConfig& c, const Refuse& refuse) {
  const text::Json& types = c.detail("layer_types");
  if (types.is_null()) return;
  bool known = types.is_array() && types.elements().size() == c.num_layers;
  for (const text::Json& type : types.elements()) {
    known = known && (type == "linear_attention" || type == "full_attention");
  }
  if (known) return;
  refuse("layer_types",
         fmt::format("must be a list of num_layers ({}) words, \"linear_attention\" or "
                     "\"full_attention\"",
                     c.num_layers));
}

/// Returns a gated delta net with the extents in the config, without its maps.
DeltaSpec delta_of(const ModelConfig& c) {
  return {.key_heads = whole_number(c, "linear_num_key_heads"),
          .value_heads = whole_number(c, "linear_num_value_heads"),
          .key_width = whole_number(c, "linear_key_head_dim"),
          .value_width = whole_number(c, "linear_value_head_dim"),
          .taps = whole_number(c, "linear_conv_kernel_dim"),
          .convolution = {"linear_attn.conv1d"},
          .decay = "linear_attn.A_log",
          .shift = "linear_attn.dt_bias",
          .norm = NormSpec{"linear_attn.norm"},
          .maps = {{"linear_attn.in_proj_qkv"},
                   {"linear_attn.in_proj_z"},
                   {"linear_attn.in_proj_b"},
                   {"linear_attn.in_proj_a"}},
          .out = {"linear_attn.out_proj"}};
}

/// Families whose layers have gated delta nets, except every fourth one, which has attention with
/// an output gate. All norms but those of delta nets multiply by one plus their weight.
class Delta : public Llama {
 public:
  void complete(ModelConfig& c, const Refuse& refuse) const override {
    if (c.intermediate_size == 0) c.intermediate_size = 3 * c.hidden_size;
    rotaries(c, refuse);
    check_delta(c, refuse);
    whole_number(c, "full_attention_interval", 1, refuse);
    check_mixer_types(c, refuse);
  }
  OuterSpec outer(const ModelConfig& c) const override {
    OuterSpec outer = Llama::outer(c);
    outer.norm.offset = 1.0F;
    return outer;
  }
  LayerSpec layer(const ModelConfig& c, std::uint64_t index) const override {
    LayerSpec layer = Llama::layer(c, index);
    for (SublayerSpec& sublayer : layer.sublayers) sublayer.before->offset = 1.0F;
    if (has_attention(c, index)) {
      add_head_norms(layer, 1.0F);
      maps_of(layer).output_gate = true;
      return layer;
    }
    layer.sublayers[0].body = delta_of(c);
    return layer;
  }
  void cut_heads(ModelConfig& c) const override {
    const std::uint64_t tiles =
        tiles_of_heads(whole_number(c, "linear_num_key_heads"), c.layer_tiles);
    for (const char* key : {"linear_num_key_heads", "linear_num_value_heads"}) {
      c.details[key] = whole_number(c, key) / tiles;
    }
    Llama::cut_heads(c);
  }
  std::vector<CheckpointKey> checkpoint_keys() const override {
    std::vector<CheckpointKey> keys = Llama::checkpoint_keys();
    keys.push_back({"attn_output_gate", "", {"true"}});
    return keys;
  }

 protected:
  using Llama::Llama;
  static std::vector<DetailKey> with_mixers(std::vector<DetailKey> keys) {
    keys.insert(keys.begin(), {{"rope_theta", 10000.0},
                               {"rope_scaling", {}},
                               {"partial_rotary_factor", 0.25},
                               {"attention_bias", false},
                               {"layer_types", {}},
                               {"full_attention_interval", std::uint64_t{4}},
                               {"linear_conv_kernel_dim", std::uint64_t{4}},
                               {"linear_key_head_dim", std::uint64_t{128}},
                               {"linear_value_head_dim", std::uint64_t{128}},
                               {"linear_num_key_heads", std::uint64_t{16}},
                               {"linear_num_value_heads", std::uint64_t{32}}});
    return keys;
  }
  /// Rotary positions in three axes are ordinary ones for text, whose three positions are equal.
  static CheckpointRope rope() {
    return {.longest = 32768,
            .part = "partial_rotary_factor",
            .unread = {"mrope_section", "mrope_interleaved"}};
  }
  /// Adds keys of published folders that the classes do not read.
  static std::vector<std::string> without_effect(std::vector<std::string> names) {
    names.insert(names.end(), {"mamba_ssm_dtype", "mtp_use_dedicated_embeddings"});
    return names;
  }

 private:
  static bool has_attention(const ModelConfig& c, std::uint64_t index) {
    const text::Json& types = c.detail("layer_types");
    if (types.is_array()) return types.elements()[index] == "full_attention";
    return (index + 1) % whole_number(c, "full_attention_interval") == 0;
  }
};

/// The text models of Qwen3.5 and 3.6.
class Qwen35 final : public Delta {
 public:
  Qwen35()
      : Delta({.name = "qwen3_5",
               .checkpoint_class = "Qwen3_5ForCausalLM",
               .details = with_mixers({}),
               .rules = {.rope = rope(), .without_effect = without_effect({"mlp_only_layers"})},
               .standards = {
                   {"num_key_value_heads", 4}, {"head_dim", 256}, {"intermediate_size", 12288}}}) {}
  std::string_view checkpoint_type() const override { return "qwen3_5_text"; }
};

/// Returns the routed experts and the gated expert for all tokens.
ExpertsSpec gated_experts(const ModelConfig& c) {
  ExpertsSpec experts = usual_experts(c, "num_experts", whole_number(c, "moe_intermediate_size"));
  experts.renormalises = true;
  experts.shared_width = whole_number(c, "shared_expert_intermediate_size");
  experts.shared_prefix = "mlp.shared_expert.";
  experts.shared_gate = "mlp.shared_expert_gate";
  return experts;
}

/// The mixtures of experts of Qwen3.5 and 3.6: experts in every layer.
class Qwen35Moe final : public Delta {
 public:
  Qwen35Moe()
      : Delta(
            {.name = "qwen3_5_moe",
             .checkpoint_class = "Qwen3_5MoeForCausalLM",
             .details = with_experts(
                 with_mixers({{"moe_intermediate_size", std::uint64_t{512}},
                              {"shared_expert_intermediate_size", std::uint64_t{512}}}),
                 "num_experts", 8, 0.001),
             .rules = {.rope = rope(),
                       .without_effect = without_effect({"decoder_sparse_step", "intermediate_size",
                                                         "mlp_only_layers", "norm_topk_prob"})},
             .standards = {{"num_key_value_heads", 2}, {"head_dim", 256}, {"num_experts", 256}}}) {}
  std::string_view checkpoint_type() const override { return "qwen3_5_moe_text"; }
  void complete(ModelConfig& c, const Refuse& refuse) const override {
    check_experts(c, "num_experts", refuse);
    for (const char* key : {"moe_intermediate_size", "shared_expert_intermediate_size"}) {
      whole_number(c, key, 1, refuse);
    }
    if (c.intermediate_size == 0) c.intermediate_size = whole_number(c, "moe_intermediate_size");
    Delta::complete(c, refuse);
  }
  LayerSpec layer(const ModelConfig& c, std::uint64_t index) const override {
    return instead_of_mlp(Delta::layer(c, index), gated_experts(c));
  }
  std::vector<CheckpointKey> checkpoint_keys() const override {
    std::vector<CheckpointKey> keys = keys_of_checkpoints(Delta::checkpoint_keys());
    std::erase_if(keys, [](const CheckpointKey& key) { return key.name == "intermediate_size"; });
    return keys;
  }
};

/// Qwen3-Next: experts in some layers. The maps of gated delta nets are ordered by heads of keys.
class Qwen3Next final : public Delta {
 public:
  Qwen3Next()
      : Delta(
            {.name = "qwen3_next",
             .checkpoint_class = "Qwen3NextForCausalLM",
             .details = with_sparse_layers(
                 with_mixers({{"shared_expert_intermediate_size", std::uint64_t{512}}}), 10, 512),
             .rules = {.rope = rope(), .without_effect = without_effect({}), .peft_converts = true},
             .standards = {{"num_key_value_heads", 2},
                           {"head_dim", 256},
                           {"intermediate_size", 5632},
                           {"num_experts", 512},
                           {"norm_topk_prob", true}}}) {}
  void complete(ModelConfig& c, const Refuse& refuse) const override {
    check_sparse_layers(c, refuse);
    whole_number(c, "shared_expert_intermediate_size", 1, refuse);
    Delta::complete(c, refuse);
  }
  LayerSpec layer(const ModelConfig& c, std::uint64_t index) const override {
    LayerSpec layer = Delta::layer(c, index);
    if (auto* const delta = std::get_if<DeltaSpec>(&layer.sublayers[0].body)) {
      delta->maps = {{"linear_attn.in_proj_qkvz"}, {"linear_attn.in_proj_ba"}};
      delta->by_key_head = true;
    }
    if (!is_sparse(c, index)) return layer;
    ExpertsSpec experts = gated_experts(c);
    experts.renormalises = c.flag("norm_topk_prob");
    return instead_of_mlp(std::move(layer), std::move(experts));
  }
  std::vector<CheckpointKey> checkpoint_keys() const override {
    return keys_of_checkpoints(Delta::checkpoint_keys());
  }
};

/// OLMo Hybrid: gated delta nets with negative eigenvalues, and in every fourth layer the attention
/// of OLMo 2 with its norms. A rope_theta of 0 means no positions.
class OlmoHybrid final : public Llama {
 public:
  OlmoHybrid()
      : Llama({.name = "olmo_hybrid",
               .checkpoint_class = "OlmoHybridForCausalLM",
               .details = {{"rope_theta", 10000.0},
                           {"rope_scaling", {}},
                           {"attention_bias", false},
                           {"layer_types", {}},
                           {"linear_conv_kernel_dim", std::uint64_t{4}},
                           {"linear_key_head_dim", {}},
                           {"linear_value_head_dim", {}},
                           {"linear_num_key_heads", {}},
                           {"linear_num_value_heads", {}},
                           {"linear_allow_neg_eigval", true}},
               .rules = {.rope = {.longest = 65536, .zero_theta = true},
                         .without_effect = {"linear_a_log_min", "linear_a_log_max", "linear_dt_min",
                                            "linear_dt_max", "linear_dt_init_floor"}},
               .standards = {{"intermediate_size", 11008}, {kPadToken, 100277, true}}}) {}
  void complete(ModelConfig& c, const Refuse& refuse) const override {
    const auto fill_in = [&c](const char* key, std::uint64_t value) {
      text::Json& detail = c.details[key];
      if (detail.is_null()) detail = value;
    };
    fill_in("linear_num_key_heads", c.num_heads);
    fill_in("linear_num_value_heads", c.num_heads);
    const std::uint64_t heads = whole_number(c, "linear_num_key_heads", 1, refuse);
    fill_in("linear_key_head_dim", 3 * c.hidden_size / (4 * heads));
    fill_in("linear_value_head_dim", 2 * whole_number(c, "linear_key_head_dim", 1, refuse));
    if (c.intermediate_size == 0) c.intermediate_size = round_up((8 * c.hidden_size + 2) / 3, 64);
    rotaries(c, refuse);
    check_delta(c, refuse);
    check_mixer_types(c, refuse);
  }
  std::vector<Rotary> rotaries(const ModelConfig& c, const Refuse& refuse) const override {
    if (!rotates(c)) return {};
    return Llama::rotaries(c, refuse);
  }
  LayerSpec layer(const ModelConfig& c, std::uint64_t index) const override {
    LayerSpec layer = Llama::layer(c, index);
    if (has_attention(c, index)) {
      for (SublayerSpec& sublayer : layer.sublayers) sublayer.before.reset();
      layer.sublayers[0].after = NormSpec{"post_attention_layernorm"};
      layer.sublayers[1].after = NormSpec{"post_feedforward_layernorm"};
      add_head_norms(layer, 0.0F, true);
      if (!rotates(c)) attention_of(layer).rotary.reset();
      return layer;
    }
    DeltaSpec delta = delta_of(c);
    delta.beta_factor = c.flag("linear_allow_neg_eigval") ? 2.0 : 1.0;
    delta.convolution = {"linear_attn.q_conv1d", "linear_attn.k_conv1d", "linear_attn.v_conv1d"};
    delta.norm = NormSpec{.name = "linear_attn.o_norm", .epsilon = 1e-5};  // not rms_norm_eps
    delta.maps = {{"linear_attn.q_proj"}, {"linear_attn.k_proj"}, {"linear_attn.v_proj"},
                  {"linear_attn.g_proj"}, {"linear_attn.b_proj"}, {"linear_attn.a_proj"}};
    delta.out = {"linear_attn.o_proj"};
    layer.sublayers[0] = {.before = NormSpec{"attention_layer_norm"}, .body = std::move(delta)};
    layer.sublayers[1].before = NormSpec{"feedforward_layer_norm"};
    return layer;
  }

 private:
  static bool rotates(const ModelConfig& c) { return c.number("rope_theta") != 0.0; }
  static bool has_attention(const ModelConfig& c, std::uint64_t index) {
    const text::Json& types = c.detail("layer_types");
    if (types.is_array()) return types.elements()[index] == "full_attention";
    return index % 4 == 3 || (c.num_layers < 4 && index + 1 == c.num_layers);
  }
};

}  // namespace

std::unique_ptr<const Family> families::olmo_hybrid() {
  return std::make_unique<const OlmoHybrid>();
}
std::unique_ptr<const Family> families::qwen3_5() {
  return std::make_unique<const Qwen35>();
}
std::unique_ptr<const Family> families::qwen3_5_moe() {
  return std::make_unique<const Qwen35Moe>();
}
std::unique_ptr<const Family> families::qwen3_next() {
  return std::make_unique<const Qwen3Next>();
}

}  // namespace ballast::model
