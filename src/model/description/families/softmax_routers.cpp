#include <memory>
#include <string_view>
#include <utility>

#include <fmt/format.h>

#include "src/model/description/families/families.h"
#include "src/model/description/families/llama.h"
#include "src/model/description/layer_rules.h"

namespace ballast::model {

std::uint64_t whole_number(const ModelConfig& c, std::string_view key, std::uint64_t least,
                           const Refuse& refuse) {
  const auto found = c.detail(key).whole();
  if (!found || *found < least) {
    refuse(key, fmt::format("must be a whole number of at least {}, got {}", least, c.number(key)));
  }
  return *found;
}
std::uint64_t whole_number(const ModelConfig& c, std::string_view key) {
  return c.detail(key).whole().value_or(0);
}

void check_expert_counts(const ModelConfig& c, std::string_view count, const Refuse& refuse) {
  constexpr std::uint64_t kMax = 4096;
  const std::uint64_t experts = whole_number(c, count, 1, refuse);
  if (experts > kMax) refuse(count, fmt::format("must be at most {}, got {}", kMax, experts));
  const std::uint64_t chosen = whole_number(c, "num_experts_per_tok", 1, refuse);
  if (chosen > experts) {
    refuse("num_experts_per_tok", fmt::format("{} is above {} {}", chosen, count, experts));
  }
}

ExpertsSpec usual_experts(const ModelConfig& c, std::string_view count, std::uint64_t width) {
  return {.count = whole_number(c, count),
          .per_token = whole_number(c, "num_experts_per_tok"),
          .width = width,
          .router = "mlp.gate",
          .prefix = "mlp.experts.",
          .gate = "gate_proj",
          .up = "up_proj",
          .down = "down_proj"};
}

ExpertsSpec mixtral_experts(const ModelConfig& c, std::uint64_t width) {
  ExpertsSpec experts = usual_experts(c, "num_local_experts", width);
  experts.renormalises = true;
  experts.router = "block_sparse_moe.gate";
  experts.prefix = "block_sparse_moe.experts.";
  experts.gate = "w1";
  experts.up = "w3";
  experts.down = "w2";
  experts.in_class = {{"block_sparse_moe.", "mlp."}};
  return experts;
}

LayerSpec instead_of_mlp(LayerSpec layer, ExpertsSpec experts) {
  layer.sublayers.back().body = std::move(experts);
  return layer;
}

std::vector<DetailKey> with_experts(std::vector<DetailKey> keys, std::string count,
                                    std::uint64_t per_token, double balance) {
  keys.insert(keys.end(), {{std::move(count), std::uint64_t{0}},
                           {"num_experts_per_tok", per_token},
                           {"output_router_logits", false},
                           {"router_aux_loss_coef", balance},
                           {"router_z_loss_coef", 0.0}});
  return keys;
}

void check_experts(const ModelConfig& c, std::string_view count, const Refuse& refuse) {
  check_expert_counts(c, count, refuse);
  for (const char* key : {"router_aux_loss_coef", "router_z_loss_coef"}) {
    if (!(c.number(key) >= 0.0))
      refuse(key, fmt::format("must be at least 0, got {}", c.number(key)));
  }
}

std::vector<DetailKey> with_sparse_layers(std::vector<DetailKey> keys, std::uint64_t per_token,
                                          std::uint64_t width) {
  keys = with_experts(std::move(keys), "num_experts", per_token, 0.001);
  keys.insert(keys.end(), {{"moe_intermediate_size", width},
                           {"norm_topk_prob", false},
                           {"decoder_sparse_step", std::uint64_t{1}},
                           {"mlp_only_layers", {}}});
  return keys;
}

void check_sparse_layers(const ModelConfig& c, const Refuse& refuse) {
  check_experts(c, "num_experts", refuse);
  whole_number(c, "moe_intermediate_size", 1, refuse);
  whole_number(c, "decoder_sparse_step", 1, refuse);
  const text::Json& dense = c.detail("mlp_only_layers");
  bool known = dense.is_null() || dense.is_array();
  for (const text::Json& layer : dense.elements()) {
    known = known && layer.whole() && *layer.whole() < c.num_layers;
  }
  if (known) return;
  refuse("mlp_only_layers", fmt::format("must be a list of layers, counted from 0, below "
                                        "num_layers ({})",
                                        c.num_layers));
}

bool is_sparse(const ModelConfig& c, std::uint64_t index) {
  for (const text::Json& layer : c.detail("mlp_only_layers").elements()) {
    if (layer.whole() == index) return false;
  }
  return (index + 1) % whole_number(c, "decoder_sparse_step") == 0;
}

void check_mlp_types(const ModelConfig& c, const Refuse& refuse) {
  const text::Json& types = c.detail("mlp_layer_types");
  if (types.is_null()) return;
  bool known = types.is_array() && types.elements().size() == c.num_layers;
  for (const text::Json& type : types.elements()) {
    known = known && (type == "dense" || type == "sparse");
  }
  if (known) return;
  refuse("mlp_layer_types",
         fmt::format("must be a list of num_layers ({}) words, \"dense\" or \"sparse\"",
                     c.num_layers));
}

bool has_mlp(const ModelConfig& c, std::uint64_t index, std::uint64_t standard) {
  const text::Json& types = c.detail("mlp_layer_types");
  return types.is_null() ? index < standard : types.elements()[index] == "dense";
}

std::vector<CheckpointKey> keys_of_checkpoints(std::vector<CheckpointKey> keys) {
  std::erase_if(keys, [](const CheckpointKey& key) { return key.name == "router_z_loss_coef"; });
  return keys;
}

namespace {

// The classes are named after those in Hugging Face's transformers.

/// Mixtral: experts in every layer. A token's weights are divided by their sum.
class Mixtral final : public Llama {
 public:
  Mixtral()
      : Llama({.name = "mixtral",
               .checkpoint_class = "MixtralForCausalLM",
               .details = with_experts(
                   {{"rope_theta", 1000000.0}, {"rope_scaling", {}}, {"sliding_window", {}}},
                   "num_local_experts", 2, 0.001),
               .rules = {.rope = {.longest = 131072},
                         .aliases = {{"num_experts", "num_local_experts"}}},
               .standards = {{"rms_norm_eps", 1e-5},
                             {"num_key_value_heads", 8},
                             {"intermediate_size", 14336},
                             {"num_local_experts", 8}}}) {}
  void complete(ModelConfig& c, const Refuse& refuse) const override {
    Llama::complete(c, refuse);
    check_experts(c, "num_local_experts", refuse);
  }
  LayerSpec layer(const ModelConfig& c, std::uint64_t index) const override {
    return instead_of_mlp(Llama::layer(c, index), mixtral_experts(c, c.intermediate_size));
  }
  std::vector<CheckpointKey> checkpoint_keys() const override {
    std::vector<CheckpointKey> keys = keys_of_checkpoints(Llama::checkpoint_keys());
    keys.push_back({"router_jitter_noise", "", {"0.0", "0"}});
    return keys;
  }
};

/// OLMoE: norms over whole queries and keys before their rotation, and experts in every layer.
class Olmoe final : public Llama {
 public:
  Olmoe()
      : Llama({.name = "olmoe",
               .checkpoint_class = "OlmoeForCausalLM",
               .details = with_experts({{"rope_theta", 10000.0},
                                        {"rope_scaling", {}},
                                        {"attention_bias", false},
                                        {"norm_topk_prob", false}},
                                       "num_experts", 8, 0.01),
               .rules = {.rope = {.longest = 4096},
                         .aliases = {{"num_local_experts", "num_experts"}},
                         .peft_converts = true},
               .standards = {{"rms_norm_eps", 1e-5},
                             {"intermediate_size", 2048},
                             {"num_experts", 64},
                             {kPadToken, 1, true}}}) {}
  void complete(ModelConfig& c, const Refuse& refuse) const override {
    Llama::complete(c, refuse);
    check_experts(c, "num_experts", refuse);
  }
  LayerSpec layer(const ModelConfig& c, std::uint64_t index) const override {
    LayerSpec layer = Llama::layer(c, index);
    add_head_norms(layer, 0.0F, true);
    ExpertsSpec experts = usual_experts(c, "num_experts", c.intermediate_size);
    experts.renormalises = c.flag("norm_topk_prob");
    return instead_of_mlp(std::move(layer), std::move(experts));
  }
  std::vector<CheckpointKey> checkpoint_keys() const override {
    std::vector<CheckpointKey> keys = keys_of_checkpoints(Llama::checkpoint_keys());
    keys.push_back({"clip_qkv", "", {"null"}});
    return keys;
  }
};

/// GPT-OSS: attention with sinks, biases everywhere, a clamped gate, and stacked experts. A token's
/// weights are the softmax of its experts' logits, which equals the softmax of all logits divided
/// by the sum of the chosen ones. Every other layer has the window.
class GptOss final : public Llama {
 public:
  GptOss()
      : Llama({.name = "gpt_oss",
               .checkpoint_class = "GptOssForCausalLM",
               .details = with_experts({{"rope_theta", 150000.0},
                                        {"rope_scaling", {}},
                                        {"attention_bias", true},
                                        {"sliding_window", std::uint64_t{128}},
                                        {"layer_types", {}},
                                        {"swiglu_limit", 7.0},
                                        {"swiglu_alpha", 1.702}},
                                       "num_local_experts", 4, 0.001),
               .rules = {.rope = {.longest = 131072,
                                  .standard = text::Json::object(
                                      {{"rope_type", "yarn"},
                                       {"factor", 32.0},
                                       {"beta_fast", 32.0},
                                       {"beta_slow", 1.0},
                                       {"truncate", false},
                                       {"original_max_position_embeddings", 4096}})},
                         .aliases = {{"num_experts", "num_local_experts"}},
                         .without_effect = {"experts_per_token", "initial_context_length"}},
               .standards = {{"rms_norm_eps", 1e-5},
                             {"num_key_value_heads", 8},
                             {"head_dim", 64},
                             {"intermediate_size", 2880},
                             {"num_local_experts", 128}}}) {}
  void complete(ModelConfig& c, const Refuse& refuse) const override {
    if (c.intermediate_size == 0) c.intermediate_size = c.hidden_size;
    Llama::complete(c, refuse);
    check_experts(c, "num_local_experts", refuse);
    for (const char* key : {"swiglu_limit", "swiglu_alpha"}) {
      if (!(c.number(key) > 0.0))
        refuse(key, fmt::format("must be above 0, got {}", c.number(key)));
    }
    // transformers scales positions if config.json does not mention them.
    text::Json& scaling = c.details["rope_scaling"];
    if (scaling.is_null()) scaling = text::Json::object({{"rope_type", "default"}});
  }
  LayerSpec layer(const ModelConfig& c, std::uint64_t index) const override {
    LayerSpec layer = Llama::layer(c, index);
    attention_of(layer).sinks = "self_attn.sinks";
    return instead_of_mlp(std::move(layer),
                          {.count = whole_number(c, "num_local_experts"),
                           .per_token = whole_number(c, "num_experts_per_tok"),
                           .width = c.intermediate_size,
                           .renormalises = true,
                           .router = "mlp.router",
                           .router_bias = true,
                           .prefix = "mlp.experts.",
                           .gate = "gate_up_proj",
                           .down = "down_proj",
                           .stacked = true,
                           .limit = static_cast<float>(c.number("swiglu_limit")),
                           .slope = static_cast<float>(c.number("swiglu_alpha"))});
  }
  std::vector<CheckpointKey> checkpoint_keys() const override {
    return keys_of_checkpoints(Llama::checkpoint_keys());
  }

 protected:
  bool is_windowed(const ModelConfig& /*config*/, std::uint64_t index) const override {
    return index % 2 == 0;
  }
};

}  // namespace

ModelConfig without_experts(const ModelConfig& c) {
  // Its layers may still be dense.
  if (!c.details.contains("num_experts_per_tok")) return c;
  ModelConfig dense = c;
  dense.family = "llama";
  dense.details.clear();
  for (const LayerSpec& layer : layers_of(c)) {
    const auto* const experts = layer.find<ExpertsSpec>();
    if (experts == nullptr) continue;
    dense.intermediate_size = experts->per_token * experts->width + experts->shared_width;
    break;
  }
  return dense;
}

std::unique_ptr<const Family> families::mixtral() {
  return std::make_unique<const Mixtral>();
}
std::unique_ptr<const Family> families::olmoe() {
  return std::make_unique<const Olmoe>();
}
std::unique_ptr<const Family> families::gpt_oss() {
  return std::make_unique<const GptOss>();
}

}  // namespace ballast::model
