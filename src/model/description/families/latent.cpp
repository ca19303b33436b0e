#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "src/model/description/families/families.h"
#include "src/model/description/families/llama.h"

namespace ballast::model {
namespace {

/// Families with latent attention (LatentMaps).
class Latent : public Llama {
 public:
  void complete(ModelConfig& c, const Refuse& refuse) const override {
    for (const char* key : {"kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"}) {
      if (!is_width(c.detail(key))) refuse(key, must_be_width(c.detail(key)));
    }
    const text::Json& query_rank = c.detail("q_lora_rank");
    if (!query_rank.is_null() && !is_width(query_rank)) {
      refuse("q_lora_rank", must_be_width(query_rank));
    }
    if (whole(c, "qk_rope_head_dim") % 2 != 0) {
      refuse("qk_rope_head_dim", fmt::format("must be even, got {}", whole(c, "qk_rope_head_dim")));
    }
    if (whole(c, "v_head_dim") > c.head_dim) {
      refuse(
          "v_head_dim",
          fmt::format("{} is above qk_nope_head_dim + qk_rope_head_dim ({}); heads of values may "
                      "not be wider than those of keys",
                      whole(c, "v_head_dim"), c.head_dim));
    }
    if (c.num_kv_heads != c.num_heads) {
      refuse("num_kv_heads", fmt::format("must be num_heads ({}), got {}: every head has its keys",
                                         c.num_heads, c.num_kv_heads));
    }
    bool has_experts = false;
    for (std::uint64_t index = 0; index < c.num_layers; ++index) {
      has_experts = has_experts || !is_dense(c, index);
    }
    if (has_experts) check_sigmoid_experts(c, refuse);
    Llama::complete(c, refuse);
  }
  std::uint64_t head_width(const ModelConfig& c) const override {
    return whole(c, "qk_nope_head_dim") + whole(c, "qk_rope_head_dim");
  }
  std::vector<Rotary> rotaries(const ModelConfig& c, const Refuse& refuse) const override {
    Rotary rotary = rotary_positions(c, refuse, {.width = whole(c, "qk_rope_head_dim")});
    rotary.interleaved = !c.details.contains("rope_interleave") || c.flag("rope_interleave");
    return {rotary};
  }
  LayerSpec layer(const ModelConfig& c, std::uint64_t index) const override {
    LayerSpec layer = Llama::layer(c, index);
    AttentionSpec& attention = attention_of(layer);
    const bool biased = attention.out.bias;
    const bool low = whole(c, "q_lora_rank") > 0;
    const auto norm = [](const char* name) {
      return NormSpec{.name = name, .epsilon = 1e-6};  // not rms_norm_eps
    };
    attention.heads.value_dim = whole(c, "v_head_dim");
    attention.scale = yarn_score_factor(c) / std::sqrt(static_cast<double>(c.head_dim));
    attention.maps = LatentMaps{.query_rank = whole(c, "q_lora_rank"),
                                .rank = whole(c, "kv_lora_rank"),
                                .plain = whole(c, "qk_nope_head_dim"),
                                .rotating = whole(c, "qk_rope_head_dim"),
                                .values = whole(c, "v_head_dim"),
                                .query_down = {"self_attn.q_a_proj", biased},
                                .query_norm = norm("self_attn.q_a_layernorm"),
                                .query = {low ? "self_attn.q_b_proj" : "self_attn.q_proj"},
                                .down = {"self_attn.kv_a_proj_with_mqa", biased},
                                .norm = norm("self_attn.kv_a_layernorm"),
                                .up = {"self_attn.kv_b_proj"}};
    if (is_dense(c, index)) return layer;
    return instead_of_mlp(std::move(layer), experts(c));
  }
  std::vector<CheckpointKey> checkpoint_keys() const override {
    std::vector<CheckpointKey> keys = Llama::checkpoint_keys();
    std::erase_if(keys, [](const CheckpointKey& key) { return key.name == "head_dim"; });
    keys.insert(keys.end(), {{"scoring_func", "", {"sigmoid"}}, {"topk_method", "", {"noaux_tc"}}});
    return keys;
  }
  std::vector<CheckpointBuffer> checkpoint_buffers(const ModelConfig& c) const override {
    return {{".rotary_emb.inv_freq", {whole(c, "qk_rope_head_dim") / 2}}};
  }

 protected:
  using Llama::Llama;
  /// Returns whether the layer has an MLP instead of experts.
  [[nodiscard]] virtual bool is_dense(const ModelConfig& config, std::uint64_t index) const = 0;
  [[nodiscard]] virtual ExpertsSpec experts(const ModelConfig& config) const {
    return sigmoid_experts(config);
  }
  /// Returns the value of a key; 0 if it is null or not a whole number.
  [[nodiscard]] static std::uint64_t whole(const ModelConfig& c, std::string_view key) {
    return c.detail(key).whole().value_or(0);
  }
  static std::vector<DetailKey> with_sizes(std::vector<DetailKey> keys) {
    keys.insert(keys.begin(), {{"rope_theta", 10000.0},
                               {"rope_scaling", {}},
                               {"attention_bias", false},
                               {"q_lora_rank", {}},
                               {"kv_lora_rank", std::uint64_t{512}},
                               {"qk_nope_head_dim", std::uint64_t{128}},
                               {"qk_rope_head_dim", std::uint64_t{64}},
                               {"v_head_dim", std::uint64_t{128}},
                               {"rope_interleave", true},
                               {"n_routed_experts", std::uint64_t{0}},
                               {"n_shared_experts", std::uint64_t{1}},
                               {"norm_topk_prob", true}});
    return keys;
  }
  /// Keys that transformers ignores, and others.
  static std::vector<std::string> without_effect(std::vector<std::string> names) {
    names.insert(names.end(), {"qk_head_dim", "pretraining_tp", "ep_size", "moe_layer_freq",
                               "num_nextn_predict_layers", "num_mtp_layers", "aux_loss_alpha",
                               "seq_aux", "output_router_logits"});
    return names;
  }
  static bool is_width(const text::Json& value) {
    const std::uint64_t width = value.whole().value_or(0);
    return width > 0 && width <= kMaxHeadWidth;
  }
  static std::string must_be_width(const text::Json& value) {
    return fmt::format("must be a whole number from 1 to {}, got {}", kMaxHeadWidth,
                       value.described());
  }
};

/// DeepSeek-V3 and R1, Kimi K2, Moonlight.
class DeepseekV3 final : public Latent {
 public:
  DeepseekV3()
      : Latent({.name = "deepseek_v3",
                .checkpoint_class = "DeepseekV3ForCausalLM",
                .details = with_sizes({{"first_k_dense_replace", std::uint64_t{3}},
                                       {"num_experts_per_tok", std::uint64_t{8}},
                                       {"moe_intermediate_size", std::uint64_t{2048}},
                                       {"n_group", std::uint64_t{8}},
                                       {"topk_group", std::uint64_t{4}},
                                       {"routed_scaling_factor", 2.5}}),
                .rules = {.rope = {.longest = 4096},
                          .aliases = {{"num_local_experts", "n_routed_experts"}},
                          .without_effect = without_effect({"head_dim"}),
                          .other_types = {"kimi_k2"},
                          .peft_converts = true},
                .standards = {{"num_key_value_heads", 128, true},
                              {"q_lora_rank", 1536, true},
                              {"n_routed_experts", 256},
                              {"intermediate_size", 18432}}}) {}

  void complete(ModelConfig& c, const Refuse& refuse) const override {
    whole_number(c, "first_k_dense_replace", 0, refuse);
    Latent::complete(c, refuse);
  }

 protected:
  bool is_dense(const ModelConfig& c, std::uint64_t index) const override {
    return index < whole(c, "first_k_dense_replace");
  }
};

/// GLM-4.7-Flash.
class Glm4MoeLite final : public Latent {
 public:
  Glm4MoeLite()
      : Latent({.name = "glm4_moe_lite",
                .checkpoint_class = "Glm4MoeLiteForCausalLM",
                .details = with_sizes({{"mlp_layer_types", {}},
                                       {"num_experts_per_tok", std::uint64_t{4}},
                                       {"moe_intermediate_size", std::uint64_t{1536}},
                                       {"n_group", std::uint64_t{1}},
                                       {"topk_group", std::uint64_t{1}},
                                       {"routed_scaling_factor", 1.8}}),
                .rules = {.rope = {.longest = 202752},
                          .aliases = {{"num_local_experts", "n_routed_experts"},
                                      {"head_dim", "qk_rope_head_dim"}},
                          .without_effect = without_effect({"first_k_dense_replace"}),
                          .peft_converts = true},
                .standards = {{"num_key_value_heads", 20},
                              {"q_lora_rank", 768, true},
                              {"qk_nope_head_dim", 192},
                              {"n_routed_experts", 64},
                              {"v_head_dim", 256},
                              {"rms_norm_eps", 1e-5},
                              {"intermediate_size", 10240}}}) {}
  void complete(ModelConfig& c, const Refuse& refuse) const override {
    check_mlp_types(c, refuse);
    Latent::complete(c, refuse);
  }

 protected:
  bool is_dense(const ModelConfig& c, std::uint64_t index) const override {
    return has_mlp(c, index, 1);
  }
};

/// Latent attention to the index_topk tokens that an indexer chooses among all before a query. With
/// no more tokens than that, it equals latent attention, and the indexer has no gradient. So longer
/// sequences are refused, and the indexer's tensors pass through.
class SparseLatent : public Latent {
 public:
  void complete(ModelConfig& c, const Refuse& refuse) const override {
    whole_number(c, "index_topk", 1, refuse);
    whole_number(c, "first_k_dense_replace", 0, refuse);
    if (whole(c, "q_lora_rank") == 0) {
      refuse("q_lora_rank", must_be_width(c.detail("q_lora_rank")));
    }
    check_mlp_types(c, refuse);
    Latent::complete(c, refuse);
  }
  std::string obstacle_to_length(const ModelConfig& c, std::uint64_t length) const override {
    const std::uint64_t most = whole(c, "index_topk");
    if (length <= most) return "";
    return fmt::format(
        "{} is above model.index_topk {}, beyond which attention is sparse; Ballast supports these "
        "models up to index_topk tokens, so lower it to {}",
        length, most, most);
  }

 protected:
  using Latent::Latent;
  bool is_dense(const ModelConfig& c, std::uint64_t index) const override {
    return has_mlp(c, index, whole(c, "first_k_dense_replace"));
  }
  static std::vector<DetailKey> with_indexer(std::vector<DetailKey> keys) {
    keys = with_sizes(std::move(keys));
    std::erase_if(keys, [](const DetailKey& key) { return key.name == "rope_interleave"; });
    keys.insert(keys.end(), {{"index_topk", std::uint64_t{2048}},
                             {"mlp_layer_types", {}},
                             {"first_k_dense_replace", std::uint64_t{3}},
                             {"num_experts_per_tok", std::uint64_t{8}},
                             {"moe_intermediate_size", std::uint64_t{2048}},
                             {"routed_scaling_factor", 2.5}});
    return keys;
  }
  static CheckpointRules rules(std::uint64_t longest) {
    return {
        .rope = {.longest = longest},
        .aliases = {{"num_local_experts", "n_routed_experts"}, {"num_experts", "n_routed_experts"}},
        .without_effect = without_effect(
            {"head_dim", "index_head_dim", "index_n_heads", "indexer_types", "index_topk_freq",
             "index_skip_topk_offset", "index_topk_pattern", "indexer_rope_interleave",
             "layer_types", "mlp_bias", "rope_interleave"}),
        .peft_converts = true};
  }
};

/// DeepSeek-V3.2.
class DeepseekV32 final : public SparseLatent {
 public:
  DeepseekV32()
      : SparseLatent({.name = "deepseek_v32",
                      .checkpoint_class = "DeepseekV32ForCausalLM",
                      .details = with_indexer(
                          {{"n_group", std::uint64_t{8}}, {"topk_group", std::uint64_t{4}}}),
                      .rules = rules(163840),
                      .standards = {{"num_key_value_heads", 128},
                                    {"q_lora_rank", 1536},
                                    {"n_routed_experts", 256},
                                    {"intermediate_size", 18432}}}) {}
};

/// GLM-5.
class GlmMoeDsa final : public SparseLatent {
 public:
  GlmMoeDsa()
      : SparseLatent({.name = "glm_moe_dsa",
                      .checkpoint_class = "GlmMoeDsaForCausalLM",
                      .details = with_indexer(
                          {{"n_group", std::uint64_t{1}}, {"topk_group", std::uint64_t{1}}}),
                      .rules = rules(202752),
                      .standards = {{"num_key_value_heads", 64},
                                    {"q_lora_rank", 2048},
                                    {"qk_nope_head_dim", 192},
                                    {"n_routed_experts", 256},
                                    {"v_head_dim", 256},
                                    {"rms_norm_eps", 1e-5},
                                    {"intermediate_size", 12288}}}) {}
};

/// Mistral Small 4: a softmax router, stacked experts, and queries that grow with their position.
class Mistral4 final : public Latent {
 public:
  Mistral4()
      : Latent({.name = "mistral4",
                .checkpoint_class = "Mistral4ForCausalLM",
                .details = with_sizes({{"first_k_dense_replace", std::uint64_t{0}},
                                       {"num_experts_per_tok", std::uint64_t{4}},
                                       {"moe_intermediate_size", std::uint64_t{2048}},
                                       {"n_group", std::uint64_t{1}},
                                       {"topk_group", std::uint64_t{1}},
                                       {"routed_scaling_factor", 1.0}}),
                .rules = {.rope = {.longest = 1048576,
                                   .standard = text::Json::object(
                                       {{"rope_type", "yarn"},
                                        {"rope_theta", 10000.0},
                                        {"factor", 128.0},
                                        {"original_max_position_embeddings", 8192},
                                        {"beta_fast", 32.0},
                                        {"beta_slow", 1.0},
                                        {"mscale_all_dim", 1.0},
                                        {"mscale", 1.0},
                                        {"llama_4_scaling_beta", 0.1}}),
                                   // The part of a head that rotates is qk_rope_head_dim.
                                   .unread = {"max_position_embeddings", "partial_rotary_factor"}},
                          .aliases = {{"num_local_experts", "n_routed_experts"}},
                          .without_effect =
                              without_effect({"head_dim", "scoring_func", "topk_method"})},
                .standards = {{"num_key_value_heads", 32, true},
                              {"q_lora_rank", 1024, true},
                              {"kv_lora_rank", 256},
                              {"qk_nope_head_dim", 64},
                              {"n_routed_experts", 128},
                              {"intermediate_size", 12288},
                              {kPadToken, 11, true}}}) {}
  void complete(ModelConfig& c, const Refuse& refuse) const override {
    whole_number(c, "first_k_dense_replace", 0, refuse);
    if (whole(c, "n_group") != 1) {
      refuse("n_group", fmt::format("must be 1 for a router with a softmax, got {}",
                                    c.detail("n_group").described()));
    }
    if (whole(c, "qk_nope_head_dim") % 2 != 0) {
      refuse("qk_nope_head_dim", fmt::format("must be even, got {}", whole(c, "qk_nope_head_dim")));
    }
    Latent::complete(c, refuse);
  }
  std::vector<Rotary> rotaries(const ModelConfig& c, const Refuse& refuse) const override {
    Rotary rotary =
        rotary_positions(c, refuse, {.grows = true, .width = whole(c, "qk_rope_head_dim")});
    rotary.interleaved = c.flag("rope_interleave");
    const Rotary growth = {.frequencies = std::vector<double>(c.head_dim / 2, 0.0),
                           .slope = std::exchange(rotary.slope, 0.0),
                           .period = std::exchange(rotary.period, 1.0)};
    return {rotary, growth};
  }
  LayerSpec layer(const ModelConfig& c, std::uint64_t index) const override {
    LayerSpec layer = Latent::layer(c, index);
    attention_of(layer).rotary->growth = 1;
    return layer;
  }
  std::vector<CheckpointKey> checkpoint_keys() const override {
    std::vector<CheckpointKey> keys = Latent::checkpoint_keys();
    std::erase_if(keys, [](const CheckpointKey& key) {
      return key.name == "scoring_func" || key.name == "topk_method";
    });
    return keys;
  }

 protected:
  bool is_dense(const ModelConfig& c, std::uint64_t index) const override {
    return index < whole(c, "first_k_dense_replace");
  }
  ExpertsSpec experts(const ModelConfig& c) const override {
    ExpertsSpec experts = sigmoid_experts(c);
    experts.sigmoid = false;
    experts.correction = "";
    experts.fused = true;
    return experts;
  }
};

}  // namespace

std::unique_ptr<const Family> families::deepseek_v3() {
  return std::make_unique<const DeepseekV3>();
}
std::unique_ptr<const Family> families::glm4_moe_lite() {
  return std::make_unique<const Glm4MoeLite>();
}
std::unique_ptr<const Family> families::deepseek_v32() {
  return std::make_unique<const DeepseekV32>();
}
std::unique_ptr<const Family> families::glm_moe_dsa() {
  return std::make_unique<const GlmMoeDsa>();
}
std::unique_ptr<const Family> families::mistral4() {
  return std::make_unique<const Mistral4>();
}

}  // namespace ballast::model
