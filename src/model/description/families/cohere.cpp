#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "src/model/description/families/families.h"
#include "src/model/description/families/llama.h"

namespace ballast::model {
namespace {

/// Command A: attention and the MLP read the result of one LayerNorm without bias. Neighbours
/// rotate together, and layers without a window have no positions. The class is named after that in
/// Hugging Face's transformers.
class Cohere2 : public Llama {
 public:
  Cohere2()
      : Llama({.name = "cohere2",
               .checkpoint_class = "Cohere2ForCausalLM",
               .details = {{"rope_theta", 10000.0},
                           {"rope_scaling", {}},
                           {"attention_bias", false},
                           {"logit_scale", 0.0625},
                           {"sliding_window", 4096},
                           {"sliding_window_pattern", 4},
                           {"layer_types", {}}},
               .rules = {.rope = {.longest = 8192}},
               .standards = {{"intermediate_size", 22528},
                             {"tie_word_embeddings", true},
                             {"sliding_window", 4096, true},
                             {kPadToken, 0, true}}}) {}
  void complete(ModelConfig& c, const Refuse& refuse) const override {
    Llama::complete(c, refuse);
    const double pattern = c.number("sliding_window_pattern");
    if (!(pattern >= 1.0) || pattern != std::floor(pattern)) {
      refuse("sliding_window_pattern",
             fmt::format("must be a number of layers, the last of which has no window, got {}",
                         pattern));
    }
    if (!(c.number("logit_scale") > 0.0)) {
      refuse("logit_scale", fmt::format("must be above 0, got {}", c.number("logit_scale")));
    }
  }
  std::vector<Rotary> rotaries(const ModelConfig& c, const Refuse& refuse) const override {
    Rotary rotary = rotary_positions(c, refuse);
    rotary.interleaved = true;
    return {rotary};
  }
  OuterSpec outer(const ModelConfig& c) const override {
    OuterSpec outer = Llama::outer(c);
    outer.norm = norm("model.norm");
    outer.logit_factor = c.number("logit_scale");
    return outer;
  }
  LayerSpec layer(const ModelConfig& c, std::uint64_t index) const override {
    LayerSpec layer = Llama::layer(c, index);
    layer.sublayers[0].before = norm("input_layernorm");
    layer.sublayers[1].before.reset();
    layer.sublayers[1].reads = Reads::same_norm;
    if (attention_of(layer).window == 0) attention_of(layer).rotary.reset();
    return layer;
  }
  std::vector<CheckpointKey> checkpoint_keys() const override {
    std::vector<CheckpointKey> keys = Llama::checkpoint_keys();
    for (CheckpointKey& key : keys) {
      if (key.own != "norm_epsilon") continue;
      key.name = "layer_norm_eps";
      key.standard = 1e-5;
    }
    return keys;
  }

 protected:
  using Llama::Llama;
  bool is_windowed(const ModelConfig& c, std::uint64_t index) const override {
    return !is_multiple(index + 1, c.number("sliding_window_pattern"));
  }
  static NormSpec norm(const char* name) {
    return {.name = name, .layer_norm = true, .biased = false};
  }
};

/// Command A+: experts read the norm of attention. The first layers may have a wider MLP and their
/// own pattern of windows. Norms may be RMSNorms.
class Cohere2Moe final : public Cohere2 {
 public:
  Cohere2Moe()
      : Cohere2({.name = "cohere2_moe",
                 .checkpoint_class = "Cohere2MoeForCausalLM",
                 .details = {{"rope_theta", 10000.0},
                             {"rope_scaling", {}},
                             {"attention_bias", false},
                             {"logit_scale", 0.0625},
                             {"rms_norm_eps", {}},
                             {"sliding_window", 4096},
                             {"sliding_window_pattern", 4},
                             {"prefix_dense_sliding_window_pattern", std::uint64_t{1}},
                             {"layer_types", {}},
                             {"mlp_layer_types", {}},
                             {"first_k_dense_replace", std::uint64_t{0}},
                             {"prefix_dense_intermediate_size", {}},
                             {"num_experts", std::uint64_t{0}},
                             {"num_experts_per_tok", std::uint64_t{2}},
                             {"num_shared_experts", std::uint64_t{0}},
                             {"shared_expert_combination_strategy", "average"},
                             {"expert_selection_fn", "softmax"},
                             {"norm_topk_prob", true}},
                 .rules = {.rope = {.longest = 8192, .ignores_scaling = true},
                           .without_effect = {"output_router_logits"},
                           .peft_converts = true},
                 .standards = {{"intermediate_size", 22528},
                               {"head_dim", 128},
                               {"tie_word_embeddings", true},
                               {"sliding_window", 4096, true},
                               {"num_experts", 8},
                               {kPadToken, 0, true}}}) {}
  void complete(ModelConfig& c, const Refuse& refuse) const override {
    Cohere2::complete(c, refuse);
    check_expert_counts(c, "num_experts", refuse);
    check_mlp_types(c, refuse);
    whole_number(c, "num_shared_experts", 0, refuse);
    whole_number(c, "first_k_dense_replace", 0, refuse);
    whole_number(c, "prefix_dense_sliding_window_pattern", 1, refuse);
    if (!c.detail("prefix_dense_intermediate_size").is_null()) {
      whole_number(c, "prefix_dense_intermediate_size", 1, refuse);
    }
    if (!c.detail("rms_norm_eps").is_null()) check_factor(c, "rms_norm_eps", refuse);
    check_word(c, "shared_expert_combination_strategy", {"average", "sum"}, refuse);
    check_word(c, "expert_selection_fn", {"softmax", "sigmoid"}, refuse);
  }
  OuterSpec outer(const ModelConfig& c) const override {
    OuterSpec outer = Cohere2::outer(c);
    outer.norm = chosen(c, outer.norm);
    return outer;
  }
  LayerSpec layer(const ModelConfig& c, std::uint64_t index) const override {
    LayerSpec layer = Cohere2::layer(c, index);
    layer.sublayers[0].before = chosen(c, *layer.sublayers[0].before);
    const bool dense = has_mlp(c, index, whole_number(c, "first_k_dense_replace"));
    const bool rotates = dense && whole_number(c, "prefix_dense_sliding_window_pattern") == 1;
    if (rotates) attention_of(layer).rotary = RotarySpec{};
    if (!dense) return instead_of_mlp(std::move(layer), experts_of(c));
    const auto width = c.detail("prefix_dense_intermediate_size").whole();
    mlp_of(layer).width = width.value_or(c.intermediate_size);
    return layer;
  }

 protected:
  bool is_windowed(const ModelConfig& c, std::uint64_t index) const override {
    const std::uint64_t dense = whole_number(c, "first_k_dense_replace");
    if (index >= dense) return Cohere2::is_windowed(c, index - dense);
    return (index + 1) % whole_number(c, "prefix_dense_sliding_window_pattern") != 0;
  }

 private:
  static void check_word(const ModelConfig& c, std::string_view key,
                         const std::vector<std::string>& words, const Refuse& refuse) {
    const text::Json& given = c.detail(key);
    if (given.is_string() && std::ranges::find(words, given.text()) != words.end()) return;
    refuse(key, fmt::format("must be \"{}\" or \"{}\", got {}", words.front(), words.back(),
                            given.described()));
  }
  /// Returns the norm, or the RMSNorm that rms_norm_eps asks for.
  static NormSpec chosen(const ModelConfig& c, const NormSpec& norm) {
    if (c.detail("rms_norm_eps").is_null()) return norm;
    return {.name = norm.name, .epsilon = c.number("rms_norm_eps")};
  }
  static ExpertsSpec experts_of(const ModelConfig& c) {
    ExpertsSpec experts = usual_experts(c, "num_experts", c.intermediate_size);
    experts.sigmoid = c.detail("expert_selection_fn").text() == "sigmoid";
    // The softmax of the chosen logits is that of all, divided by the sum of the chosen ones.
    experts.renormalises = !experts.sigmoid || c.flag("norm_topk_prob");
    const std::uint64_t shared = whole_number(c, "num_shared_experts");
    if (shared == 0) return experts;
    experts.shared_width = c.intermediate_size * shared;
    experts.shared_prefix = "mlp.shared_experts.";
    if (c.detail("shared_expert_combination_strategy").text() == "average") {
      experts.factor = experts.shared_factor = 0.5;
    }
    return experts;
  }
};

}  // namespace

std::unique_ptr<const Family> families::cohere2() {
  return std::make_unique<const Cohere2>();
}
std::unique_ptr<const Family> families::cohere2_moe() {
  return std::make_unique<const Cohere2Moe>();
}

}  // namespace ballast::model
