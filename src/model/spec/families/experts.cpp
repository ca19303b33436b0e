#include "src/model/spec/families/experts.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include <fmt/format.h>

namespace ballast::model {
namespace {

/// Adds the keys of all families with experts. `count`: the key for the number of experts.
std::vector<DetailKey> with_experts(std::vector<DetailKey> keys, std::string count,
                                    std::uint64_t per_token, double balance) {
  keys.insert(keys.end(), {{std::move(count), std::uint64_t{0}},
                           {"num_experts_per_tok", per_token},
                           {"output_router_logits", false},
                           {"router_aux_loss_coef", balance},
                           {"router_z_loss_coef", 0.0}});
  return keys;
}

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

void check_experts(const ModelConfig& c, std::string_view count, const Refuse& refuse) {
  constexpr std::uint64_t kMost = 4096;
  const std::uint64_t experts = whole_number(c, count, 1, refuse);
  if (experts > kMost) refuse(count, fmt::format("must be at most {}, got {}", kMost, experts));
  const std::uint64_t chosen = whole_number(c, "num_experts_per_tok", 1, refuse);
  if (chosen > experts) {
    refuse("num_experts_per_tok", fmt::format("{} is above {} {}", chosen, count, experts));
  }
  for (const char* key : {"router_aux_loss_coef", "router_z_loss_coef"}) {
    if (!(c.number(key) >= 0.0))
      refuse(key, fmt::format("must be at least 0, got {}", c.number(key)));
  }
}

/// The experts of one layer, with the most common tensor names.
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

/// Adds the keys of Qwen's families, in which only some layers have experts.
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

DecoderSpec instead_of_mlp(DecoderSpec spec, ExpertsSpec experts) {
  spec.experts = std::move(experts);
  spec.mlp_in.clear();
  spec.mlp_out.clear();
  return spec;
}

/// Returns whether the family has keys for experts. All layers may still be dense.
bool may_have_experts(const ModelConfig& c) {
  return c.details.contains("router_z_loss_coef");
}

/// Keeps the keys that Hugging Face's configs have.
std::vector<CheckpointKey> theirs(std::vector<CheckpointKey> keys) {
  std::erase_if(keys, [](const CheckpointKey& key) { return key.name == "router_z_loss_coef"; });
  return keys;
}

}  // namespace

RouterLosses router_losses(const ModelConfig& c) {
  if (!may_have_experts(c)) return {};
  const bool balances = c.flag("output_router_logits");
  return {balances ? c.number("router_aux_loss_coef") : 0.0, c.number("router_z_loss_coef")};
}

ModelConfig without_experts(const ModelConfig& c) {
  const auto* const described = dynamic_cast<const DecoderFamily*>(&family(c.family));
  if (described == nullptr || !may_have_experts(c)) return c;
  ModelConfig dense = c;
  dense.family = "llama";
  dense.details.clear();
  for (std::uint64_t index = 0; index < c.num_layers; ++index) {
    const ExpertsSpec experts = described->decoder(c, index).experts;
    if (experts.count == 0) continue;
    dense.intermediate_size = experts.per_token * experts.width + experts.shared_width;
    break;
  }
  return dense;
}

std::uint64_t widest_of_experts(const ModelConfig& c) {
  std::uint64_t widest = 0;
  const auto* const described = dynamic_cast<const DecoderFamily*>(&family(c.family));
  for (std::uint64_t layer = 0; described != nullptr && layer < c.num_layers; ++layer) {
    const ExpertsSpec experts = described->decoder(c, layer).experts;
    widest = std::max({widest, experts.count, experts.stacked ? 2 * experts.width : 0});
  }
  return widest;
}

std::vector<DetailKey> Mixtral::details() const {
  return with_experts({{"rope_theta", 1000000.0}, {"rope_scaling", {}}, {"sliding_window", {}}},
                      "num_local_experts", 2, 0.001);
}

void Mixtral::complete(ModelConfig& c, const Refuse& refuse) const {
  Llama::complete(c, refuse);
  check_experts(c, "num_local_experts", refuse);
}

DecoderSpec Mixtral::decoder(const ModelConfig& c, std::uint64_t index) const {
  ExpertsSpec experts = usual_experts(c, "num_local_experts", c.intermediate_size);
  experts.renormalises = true;
  experts.router = "block_sparse_moe.gate";
  experts.prefix = "block_sparse_moe.experts.";
  experts.gate = "w1";
  experts.up = "w3";
  experts.down = "w2";
  return instead_of_mlp(Llama::decoder(c, index), std::move(experts));
}

std::vector<CheckpointKey> Mixtral::checkpoint_keys() const {
  std::vector<CheckpointKey> keys = theirs(Llama::checkpoint_keys());
  keys.push_back({"router_jitter_noise", "", {"0.0", "0"}});
  return keys;
}

std::vector<DetailKey> Qwen3Moe::details() const {
  return with_sparse_layers(Qwen3::details(), 8, 768);
}

void Qwen3Moe::complete(ModelConfig& c, const Refuse& refuse) const {
  Qwen3::complete(c, refuse);
  check_sparse_layers(c, refuse);
}

DecoderSpec Qwen3Moe::decoder(const ModelConfig& c, std::uint64_t index) const {
  DecoderSpec spec = Qwen3::decoder(c, index);
  if (!is_sparse(c, index)) return spec;
  ExpertsSpec experts = usual_experts(c, "num_experts", whole_number(c, "moe_intermediate_size"));
  experts.renormalises = c.flag("norm_topk_prob");
  return instead_of_mlp(std::move(spec), std::move(experts));
}

std::vector<CheckpointKey> Qwen3Moe::checkpoint_keys() const {
  std::vector<CheckpointKey> keys = theirs(Qwen3::checkpoint_keys());
  std::erase_if(keys, [](const CheckpointKey& key) {  // all layers have the window
    return key.name == "max_window_layers" || key.name == "layer_types";
  });
  return keys;
}

std::vector<DetailKey> Qwen2Moe::details() const {
  std::vector<DetailKey> keys = with_sparse_layers({{"rope_theta", 10000.0},
                                                    {"rope_scaling", {}},
                                                    {"qkv_bias", true},
                                                    {"use_sliding_window", false},
                                                    {"sliding_window", {}},
                                                    {"max_window_layers", 28},
                                                    {"layer_types", {}}},
                                                   4, 1408);
  keys.push_back({"shared_expert_intermediate_size", std::uint64_t{5632}});
  return keys;
}

void Qwen2Moe::complete(ModelConfig& c, const Refuse& refuse) const {
  Llama::complete(c, refuse);
  check_sparse_layers(c, refuse);
  whole_number(c, "shared_expert_intermediate_size", 1, refuse);
}

DecoderSpec Qwen2Moe::decoder(const ModelConfig& c, std::uint64_t index) const {
  DecoderSpec spec = Llama::decoder(c, index);
  spec.qkv_bias = c.flag("qkv_bias");
  if (!is_sparse(c, index)) return spec;
  ExpertsSpec experts = usual_experts(c, "num_experts", whole_number(c, "moe_intermediate_size"));
  experts.renormalises = c.flag("norm_topk_prob");
  experts.shared_width = whole_number(c, "shared_expert_intermediate_size");
  experts.shared_prefix = "mlp.shared_expert.";
  experts.shared_gate = "mlp.shared_expert_gate";
  return instead_of_mlp(std::move(spec), std::move(experts));
}

std::vector<CheckpointKey> Qwen2Moe::checkpoint_keys() const {
  return theirs(Llama::checkpoint_keys());
}

std::vector<DetailKey> Olmoe::details() const {
  return with_experts({{"rope_theta", 10000.0},
                       {"rope_scaling", {}},
                       {"attention_bias", false},
                       {"norm_topk_prob", false}},
                      "num_experts", 8, 0.01);
}

void Olmoe::complete(ModelConfig& c, const Refuse& refuse) const {
  Llama::complete(c, refuse);
  check_experts(c, "num_experts", refuse);
}

DecoderSpec Olmoe::decoder(const ModelConfig& c, std::uint64_t index) const {
  DecoderSpec spec = Llama::decoder(c, index);
  spec.query_norm = "self_attn.q_norm";
  spec.key_norm = "self_attn.k_norm";
  spec.norms_whole_rows = true;
  ExpertsSpec experts = usual_experts(c, "num_experts", c.intermediate_size);
  experts.renormalises = c.flag("norm_topk_prob");
  return instead_of_mlp(std::move(spec), std::move(experts));
}

std::vector<CheckpointKey> Olmoe::checkpoint_keys() const {
  std::vector<CheckpointKey> keys = theirs(Llama::checkpoint_keys());
  keys.push_back({"clip_qkv", "", {"null"}});
  return keys;
}

std::vector<DetailKey> GptOss::details() const {
  return with_experts({{"rope_theta", 150000.0},
                       {"rope_scaling", {}},
                       {"attention_bias", true},
                       {"sliding_window", std::uint64_t{128}},
                       {"layer_types", {}},
                       {"swiglu_limit", 7.0},
                       {"swiglu_alpha", 1.702}},
                      "num_local_experts", 4, 0.001);
}

void GptOss::complete(ModelConfig& c, const Refuse& refuse) const {
  if (c.intermediate_size == 0) c.intermediate_size = c.hidden_size;
  Llama::complete(c, refuse);
  check_experts(c, "num_local_experts", refuse);
  for (const char* key : {"swiglu_limit", "swiglu_alpha"}) {
    if (!(c.number(key) > 0.0)) refuse(key, fmt::format("must be above 0, got {}", c.number(key)));
  }
  // transformers scales positions if config.json does not mention them.
  text::Json& scaling = c.details["rope_scaling"];
  if (scaling.is_null()) scaling = text::Json::object({{"rope_type", "default"}});
}

DecoderSpec GptOss::decoder(const ModelConfig& c, std::uint64_t index) const {
  DecoderSpec spec = Llama::decoder(c, index);
  spec.sinks = "self_attn.sinks";
  return instead_of_mlp(std::move(spec), {.count = whole_number(c, "num_local_experts"),
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

std::vector<CheckpointKey> GptOss::checkpoint_keys() const {
  return theirs(Llama::checkpoint_keys());
}

}  // namespace ballast::model
