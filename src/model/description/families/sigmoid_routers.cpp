#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "src/model/description/families/families.h"
#include "src/model/description/families/llama.h"

namespace ballast::model {
namespace {

// Families whose routers score experts by sigmoids, and choose them by these scores plus a
// correction that is not trained. They have no router losses. The classes are named after those in
// Hugging Face's transformers.

/// Checks the groups of consecutive experts.
void check_groups(const ModelConfig& c, std::string_view count, const Refuse& refuse) {
  constexpr std::uint64_t kMax = 256;
  const std::uint64_t experts = whole_number(c, count);
  const std::uint64_t groups = whole_number(c, "n_group", 1, refuse);
  const std::uint64_t kept = whole_number(c, "topk_group", 1, refuse);
  if (groups > kMax) refuse("n_group", fmt::format("must be at most {}, got {}", kMax, groups));
  if (experts % groups != 0 || (groups > 1 && experts / groups < 2)) {
    refuse("n_group", fmt::format("{} must divide {} {} into groups of at least 2 experts", groups,
                                  count, experts));
  }
  if (kept > groups) {
    refuse("topk_group", fmt::format("{} is above n_group {}", kept, groups));
  }
  const std::uint64_t chosen = whole_number(c, "num_experts_per_tok");
  if (chosen > kept * (experts / groups)) {
    refuse("topk_group", fmt::format("{} groups have {} experts, fewer than num_experts_per_tok {}",
                                     kept, kept * (experts / groups), chosen));
  }
}

/// GLM-4.5, 4.5-Air, 4.6 and 4.7: dense first layers, one expert for all tokens in the others, and
/// rotary positions in a part of each head.
class Glm4Moe final : public Llama {
 public:
  Glm4Moe()
      : Llama({.name = "glm4_moe",
               .checkpoint_class = "Glm4MoeForCausalLM",
               .details = {{"rope_theta", 10000.0},
                           {"rope_scaling", {}},
                           {"partial_rotary_factor", 0.5},
                           {"attention_bias", false},
                           {"use_qk_norm", false},
                           {"n_routed_experts", std::uint64_t{0}},
                           {"num_experts_per_tok", std::uint64_t{8}},
                           {"moe_intermediate_size", std::uint64_t{1408}},
                           {"n_shared_experts", std::uint64_t{1}},
                           {"first_k_dense_replace", std::uint64_t{1}},
                           {"n_group", std::uint64_t{1}},
                           {"topk_group", std::uint64_t{1}},
                           {"routed_scaling_factor", 1.0},
                           {"norm_topk_prob", true}},
               .rules = {.rope = {.longest = 131072, .part = "partial_rotary_factor"},
                         .aliases = {{"num_local_experts", "n_routed_experts"}},
                         .without_effect = {"num_nextn_predict_layers", "num_mtp_layers",
                                            "output_router_logits"},
                         .peft_converts = true},
               .standards = {{"rms_norm_eps", 1e-5},
                             {"num_key_value_heads", 8},
                             {"intermediate_size", 10944},
                             {"n_routed_experts", 128}}}) {}
  void complete(ModelConfig& c, const Refuse& refuse) const override {
    Llama::complete(c, refuse);
    check_sigmoid_experts(c, refuse);
    whole_number(c, "first_k_dense_replace", 0, refuse);
  }
  LayerSpec layer(const ModelConfig& c, std::uint64_t index) const override {
    LayerSpec layer = Llama::layer(c, index);
    attention_of(layer).out.bias = false;
    if (c.flag("use_qk_norm")) add_head_norms(layer);
    if (index < whole_number(c, "first_k_dense_replace")) return layer;
    return instead_of_mlp(std::move(layer), sigmoid_experts(c));
  }
};

/// Solar-Open: GLM-4.5 with experts in every layer and rotary positions in whole heads.
class SolarOpen final : public Llama {
 public:
  SolarOpen()
      : Llama({.name = "solar_open",
               .checkpoint_class = "SolarOpenForCausalLM",
               .details = {{"rope_theta", 1000000.0},
                           {"rope_scaling", {}},
                           {"attention_bias", false},
                           {"n_routed_experts", std::uint64_t{0}},
                           {"num_experts_per_tok", std::uint64_t{8}},
                           {"moe_intermediate_size", std::uint64_t{1280}},
                           {"n_shared_experts", std::uint64_t{1}},
                           {"n_group", std::uint64_t{1}},
                           {"topk_group", std::uint64_t{1}},
                           {"routed_scaling_factor", 1.0},
                           {"norm_topk_prob", true}},
               .rules = {.rope = {.longest = 131072},
                         .aliases = {{"num_local_experts", "n_routed_experts"}},
                         .without_effect = {"first_k_dense_replace", "intermediate_size",
                                            "num_nextn_predict_layers", "output_router_logits",
                                            "use_qk_norm"},
                         .peft_converts = true},
               .standards = {{"rms_norm_eps", 1e-5},
                             {"num_key_value_heads", 8},
                             {"head_dim", 128},
                             {"n_routed_experts", 128}}}) {}
  void complete(ModelConfig& c, const Refuse& refuse) const override {
    check_sigmoid_experts(c, refuse);
    if (c.intermediate_size == 0) c.intermediate_size = whole_number(c, "moe_intermediate_size");
    Llama::complete(c, refuse);
  }
  LayerSpec layer(const ModelConfig& c, std::uint64_t index) const override {
    LayerSpec layer = Llama::layer(c, index);
    attention_of(layer).out.bias = false;
    return instead_of_mlp(std::move(layer), sigmoid_experts(c));
  }
  std::vector<CheckpointKey> checkpoint_keys() const override {
    std::vector<CheckpointKey> keys = Llama::checkpoint_keys();
    std::erase_if(keys, [](const CheckpointKey& key) { return key.name == "intermediate_size"; });
    return keys;
  }
};

/// Hy3: norms of the query and key heads, one expert for all tokens, and an MLP in the first layer.
class HyV3 final : public Llama {
 public:
  HyV3()
      : Llama({.name = "hy_v3",
               .checkpoint_class = "HYV3ForCausalLM",
               .details = {{"rope_theta", 11158840.0},
                           {"rope_scaling", {}},
                           {"attention_bias", false},
                           {"num_experts", std::uint64_t{0}},
                           {"num_experts_per_tok", std::uint64_t{8}},
                           {"num_shared_experts", std::uint64_t{1}},
                           {"moe_intermediate_size", std::uint64_t{1536}},
                           {"router_scaling_factor", 2.826},
                           {"mlp_layer_types", {}}},
               .rules = {.rope = {.longest = 131072},
                         .aliases = {{"num_local_experts", "num_experts"}},
                         // A sum of two bf16 values, whether it is widened before or not.
                         .without_effect = {"enable_moe_fp32_combine", "num_nextn_predict_layers",
                                            "output_router_logits"}},
               .standards = {{"rms_norm_eps", 1e-5},
                             {"num_key_value_heads", 8},
                             {"head_dim", 128},
                             {"intermediate_size", 13312},
                             {"num_experts", 192}}}) {}
  void complete(ModelConfig& c, const Refuse& refuse) const override {
    Llama::complete(c, refuse);
    check_expert_counts(c, "num_experts", refuse);
    check_mlp_types(c, refuse);
    for (const char* key : {"moe_intermediate_size", "num_shared_experts"}) {
      whole_number(c, key, 1, refuse);
    }
    check_factor(c, "router_scaling_factor", refuse);
  }
  LayerSpec layer(const ModelConfig& c, std::uint64_t index) const override {
    LayerSpec layer = Llama::layer(c, index);
    add_head_norms(layer);
    if (has_mlp(c, index, 1)) return layer;
    ExpertsSpec experts = corrected_experts(c, "router_scaling_factor", "mlp.shared_mlp.");
    experts.in_class = {{experts.router, "mlp.gate"},
                        {experts.shared_prefix, "mlp.shared_experts."}};
    return instead_of_mlp(std::move(layer), std::move(experts));
  }
  std::vector<CheckpointKey> checkpoint_keys() const override {
    std::vector<CheckpointKey> keys = Llama::checkpoint_keys();
    keys.push_back({"mlp_bias", "", {"false"}});
    return keys;
  }
};

/// MiniMax-M2: experts in every layer, norms over whole queries and keys before their rotation, and
/// rotary positions in a part of each head.
class MiniMaxM2 final : public Llama {
 public:
  MiniMaxM2()
      : Llama({.name = "minimax_m2",
               .checkpoint_class = "MiniMaxM2ForCausalLM",
               .details = {{"rope_theta", 5000000.0},
                           {"rope_scaling", {}},
                           {"partial_rotary_factor", 1.0},
                           {"num_local_experts", std::uint64_t{0}},
                           {"num_experts_per_tok", std::uint64_t{8}}},
               .rules = {.rope = {.longest = 196608,
                                  .part = "partial_rotary_factor",
                                  .part_width = "rotary_dim"},
                         .aliases = {{"num_experts", "num_local_experts"}},
                         // Keys of the published config.json that the class does not read.
                         .without_effect = {"attn_type_list", "layernorm_full_attention_beta",
                                            "layernorm_linear_attention_beta", "layernorm_mlp_beta",
                                            "mlp_intermediate_size", "mtp_transformer_layers",
                                            "num_mtp_modules", "router_aux_loss_coef",
                                            "shared_moe_mode", "use_mtp"}},
               .standards = {{"head_dim", 128},
                             {"num_key_value_heads", 8},
                             {"intermediate_size", 1536},
                             {"num_local_experts", 256}}}) {}
  void complete(ModelConfig& c, const Refuse& refuse) const override {
    Llama::complete(c, refuse);
    check_expert_counts(c, "num_local_experts", refuse);
  }
  LayerSpec layer(const ModelConfig& c, std::uint64_t index) const override {
    LayerSpec layer = Llama::layer(c, index);
    add_head_norms(layer, 0.0F, true);
    ExpertsSpec experts = mixtral_experts(c, c.intermediate_size);
    experts.sigmoid = true;
    experts.correction = "block_sparse_moe.e_score_correction_bias";
    return instead_of_mlp(std::move(layer), std::move(experts));
  }
  std::vector<CheckpointKey> checkpoint_keys() const override {
    std::vector<CheckpointKey> keys = Llama::checkpoint_keys();
    keys.insert(keys.end(), {{"router_jitter_noise", "", {"0.0", "0"}},
                             {"output_router_logits", "", {"false"}},
                             {"scoring_func", "", {"sigmoid"}},
                             {"use_routing_bias", "", {"true"}},
                             {"use_qk_norm", "", {"true"}},
                             {"qk_norm_type", "", {"per_layer"}},
                             {"shared_intermediate_size", "", {"0"}}});
    return keys;
  }
};

/// The text model of MiniMax-M3: norms multiply by one plus their weight, also those of the query
/// and key heads, and all MLPs have a clamped gate. Some layers have an indexer that chooses blocks
/// of keys. With no more tokens than these blocks have, attention is dense and the indexer has no
/// gradient. So longer sequences are refused, and the indexer's tensors pass through.
class MiniMaxM3 final : public Llama {
 public:
  MiniMaxM3()
      : Llama({.name = "minimax_m3_vl_text",
               .checkpoint_class = "",
               .details = {{"rope_theta", 5000000.0},
                           {"rope_scaling", {}},
                           {"partial_rotary_factor", 1.0},
                           {"layer_types", {}},
                           {"mlp_layer_types", {}},
                           {"dense_intermediate_size", std::uint64_t{12288}},
                           {"shared_intermediate_size", std::uint64_t{3072}},
                           {"num_local_experts", std::uint64_t{0}},
                           {"num_experts_per_tok", std::uint64_t{4}},
                           {"routed_scaling_factor", 2.0},
                           {"swiglu_limit", 7.0},
                           {"swiglu_alpha", 1.702},
                           {"index_topk_blocks", std::uint64_t{16}},
                           {"index_block_size", std::uint64_t{128}}},
               .rules =
                   {.rope = {.longest = 524288,
                             .part = "partial_rotary_factor",
                             .part_width = "rotary_dim"},
                    .aliases = {{"num_experts", "num_local_experts"},
                                {"sparse_attention_config.sparse_topk_blocks", "index_topk_blocks"},
                                {"sparse_attention_config.sparse_block_size", "index_block_size"}},
                    .fallbacks = {{"sparse_attention_config.sparse_attention_freq", "layer_types"},
                                  {"moe_layer_freq", "mlp_layer_types"}},
                    .without_effect = {"index_n_heads", "index_head_dim", "index_local_blocks",
                                       "router_aux_loss_coef", "router_jitter_noise"}},
               .standards = {{"head_dim", 128},
                             {"num_key_value_heads", 4},
                             {"intermediate_size", 3072},
                             {"num_local_experts", 128}}}) {}
  void complete(ModelConfig& c, const Refuse& refuse) const override {
    check_expert_counts(c, "num_local_experts", refuse);
    name_numbers(c, "layer_types", "full_attention", kSparse);
    name_numbers(c, "mlp_layer_types", "dense", "sparse");
    check_mlp_types(c, refuse);
    for (const char* key : {"dense_intermediate_size", "shared_intermediate_size",
                            "index_topk_blocks", "index_block_size"}) {
      whole_number(c, key, 1, refuse);
    }
    for (const char* key : {"routed_scaling_factor", "swiglu_limit", "swiglu_alpha"}) {
      check_factor(c, key, refuse);
    }
    check_types(c, refuse);
    ModelConfig without_types = c;
    without_types.details["layer_types"] = {};
    Llama::complete(without_types, refuse);
    c.intermediate_size = without_types.intermediate_size;
  }
  std::string obstacle_to_length(const ModelConfig& c, std::uint64_t length) const override {
    const text::Json& types = c.detail("layer_types");
    const auto is_sparse = [](const text::Json& type) { return type == kSparse; };
    if (!types.is_array() || std::ranges::none_of(types.elements(), is_sparse)) return "";
    const std::uint64_t most =
        whole_number(c, "index_topk_blocks") * whole_number(c, "index_block_size");
    if (length <= most) return "";
    return fmt::format(
        "{} is above the {} tokens (model.index_topk_blocks x model.index_block_size) beyond which "
        "attention is sparse; Ballast supports these models up to this length, so lower it to {}",
        length, most, most);
  }
  OuterSpec outer(const ModelConfig& c) const override {
    OuterSpec outer = Llama::outer(c);
    outer.norm.offset = 1.0F;
    return outer;
  }
  LayerSpec layer(const ModelConfig& c, std::uint64_t index) const override {
    LayerSpec layer = Llama::layer(c, index);
    for (SublayerSpec& sublayer : layer.sublayers) sublayer.before->offset = 1.0F;
    add_head_norms(layer, 1.0F);
    const auto limit = static_cast<float>(c.number("swiglu_limit"));
    const auto slope = static_cast<float>(c.number("swiglu_alpha"));
    if (has_mlp(c, index, 0)) {
      MlpSpec& mlp = mlp_of(layer);
      mlp.width = whole_number(c, "dense_intermediate_size");
      mlp.limit = limit;
      mlp.slope = slope;
      return layer;
    }
    ExpertsSpec experts = mixtral_experts(c, c.intermediate_size);
    experts.sigmoid = true;
    experts.correction = "block_sparse_moe.e_score_correction_bias";
    experts.factor = c.number("routed_scaling_factor");
    experts.limit = limit;
    experts.slope = slope;
    experts.shared_width = whole_number(c, "shared_intermediate_size");
    experts.shared_prefix = "block_sparse_moe.shared_experts.";
    experts.shared_in = {"gate_proj", "up_proj"};
    experts.shared_out = "down_proj";
    return instead_of_mlp(std::move(layer), std::move(experts));
  }
  std::vector<CheckpointKey> checkpoint_keys() const override {
    std::vector<CheckpointKey> keys = Llama::checkpoint_keys();
    // The published name of the clamped gate, which the class replaces.
    for (CheckpointKey& key : keys) {
      if (key.name == "hidden_act") key.supported.emplace_back("swigluoai");
    }
    keys.push_back({"output_router_logits", "", {"false"}});
    return keys;
  }

 private:
  static constexpr std::string_view kSparse = "minimax_m3_sparse";
  /// Replaces a list of numbers, as in published folders, by words: `zero` for 0, else `other`.
  static void name_numbers(ModelConfig& c, const std::string& key, std::string_view zero,
                           std::string_view other) {
    const text::Json types = c.detail(key);
    if (types.elements().empty() || !types.elements().front().is_number()) return;
    text::Json words = text::Json::array();
    for (const text::Json& type : types.elements()) {
      words.push_back(std::string(type.number() == 0.0 ? zero : other));
    }
    c.details[key] = std::move(words);
  }
  static void check_types(const ModelConfig& c, const Refuse& refuse) {
    const text::Json& types = c.detail("layer_types");
    if (types.is_null()) return;
    bool known = types.is_array() && types.elements().size() == c.num_layers;
    for (const text::Json& type : types.elements()) {
      known = known && (type == "full_attention" || type == kSparse);
    }
    if (known) return;
    refuse("layer_types",
           fmt::format("must be a list of num_layers ({}) words, \"full_attention\" or \"{}\"",
                       c.num_layers, kSparse));
  }
};

}  // namespace

void check_factor(const ModelConfig& c, std::string_view key, const Refuse& refuse) {
  if (c.number(key) > 0.0) return;
  refuse(key, fmt::format("must be above 0, got {}", c.number(key)));
}

void check_sigmoid_experts(const ModelConfig& c, const Refuse& refuse) {
  check_expert_counts(c, "n_routed_experts", refuse);
  check_groups(c, "n_routed_experts", refuse);
  for (const char* key : {"moe_intermediate_size", "n_shared_experts"}) {
    whole_number(c, key, 1, refuse);
  }
  check_factor(c, "routed_scaling_factor", refuse);
}

ExpertsSpec sigmoid_experts(const ModelConfig& c) {
  const std::uint64_t width = whole_number(c, "moe_intermediate_size");
  ExpertsSpec experts = usual_experts(c, "n_routed_experts", width);
  experts.sigmoid = true;
  experts.correction = "mlp.gate.e_score_correction_bias";
  experts.renormalises = c.flag("norm_topk_prob");
  experts.groups = whole_number(c, "n_group");
  experts.kept_groups = whole_number(c, "topk_group");
  experts.factor = c.number("routed_scaling_factor");
  experts.shared_width = width * whole_number(c, "n_shared_experts");
  experts.shared_prefix = "mlp.shared_experts.";
  return experts;
}

ExpertsSpec corrected_experts(const ModelConfig& config, std::string_view factor,
                              std::string_view shared_prefix) {
  const std::uint64_t width = whole_number(config, "moe_intermediate_size");
  ExpertsSpec experts = usual_experts(config, "num_experts", width);
  experts.sigmoid = true;
  experts.renormalises = true;
  experts.router = "mlp.router.gate";
  experts.correction = "mlp.expert_bias";
  experts.factor = config.number(factor);
  experts.shared_width = width * whole_number(config, "num_shared_experts");
  experts.shared_prefix = shared_prefix;
  return experts;
}

std::unique_ptr<const Family> families::glm4_moe() {
  return std::make_unique<const Glm4Moe>();
}
std::unique_ptr<const Family> families::minimax_m2() {
  return std::make_unique<const MiniMaxM2>();
}
std::unique_ptr<const Family> families::solar_open() {
  return std::make_unique<const SolarOpen>();
}
std::unique_ptr<const Family> families::minimax_m3_vl_text() {
  return std::make_unique<const MiniMaxM3>();
}
std::unique_ptr<const Family> families::hy_v3() {
  return std::make_unique<const HyV3>();
}

}  // namespace ballast::model
