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

// The classes are named after those in Hugging Face's transformers.

/// ERNIE 4.5: neighbours rotate together.
class Ernie : public Llama {
 public:
  std::vector<Rotary> rotaries(const ModelConfig& c, const Refuse& refuse) const override {
    Rotary rotary = rotary_positions(c, refuse);
    rotary.interleaved = true;
    return {rotary};
  }

 protected:
  using Llama::Llama;
};

class Ernie45 final : public Ernie {
 public:
  Ernie45()
      : Ernie({.name = "ernie4_5",
               .checkpoint_class = "Ernie4_5ForCausalLM",
               .details = {{"rope_theta", 500000.0}, {"rope_scaling", {}}, {"use_bias", false}},
               .rules = {.rope = {.longest = 131072}},
               .standards = {{"num_key_value_heads", 2, true},
                             {"head_dim", 128, true},
                             {"rms_norm_eps", 1e-5},
                             {"intermediate_size", 3072},
                             {"tie_word_embeddings", true},
                             {kPadToken, 0, true}}}) {}
  LayerSpec layer(const ModelConfig& c, std::uint64_t index) const override {
    LayerSpec layer = Llama::layer(c, index);
    const bool biased = c.flag("use_bias");
    for (MapSpec& map : maps_of(layer).maps) map.bias = biased;
    attention_of(layer).out.bias = biased;
    for (MapSpec& map : mlp_of(layer).in) map.bias = biased;
    mlp_of(layer).out.bias = biased;
    return layer;
  }
};

/// Mixtures of experts: a softmax router that chooses by corrected scores, and one expert for all
/// tokens. Some layers have an MLP.
class Ernie45Moe final : public Ernie {
 public:
  Ernie45Moe()
      : Ernie({.name = "ernie4_5_moe",
               .checkpoint_class = "Ernie4_5_MoeForCausalLM",
               .details = {{"rope_theta", 500000.0},
                           {"rope_scaling", {}},
                           {"num_experts", std::uint64_t{0}},
                           {"num_experts_per_tok", std::uint64_t{6}},
                           {"moe_intermediate_size", std::uint64_t{1536}},
                           {"num_shared_experts", std::uint64_t{2}},
                           {"moe_layer_start_index", std::uint64_t{1}},
                           {"moe_layer_end_index", -1.0},
                           {"moe_layer_interval", std::uint64_t{1}},
                           {"moe_norm_min", 1e-12}},
               .rules = {.rope = {.longest = 131072},
                         .aliases = {{"num_experts", "moe_num_experts"},
                                     {"num_experts_per_tok", "moe_k"}},
                         .without_effect = {"router_aux_loss_coef"},
                         .peft_converts = true},
               .standards = {{"num_key_value_heads", 4, true},
                             {"rms_norm_eps", 1e-5},
                             {"intermediate_size", 12288},
                             {"tie_word_embeddings", true},
                             {"num_experts", 64},
                             {kPadToken, 0, true}}}) {}
  void complete(ModelConfig& c, const Refuse& refuse) const override {
    Llama::complete(c, refuse);
    check_expert_counts(c, "num_experts", refuse);
    whole_number(c, "moe_intermediate_size", 1, refuse);
    whole_number(c, "num_shared_experts", 0, refuse);
    whole_number(c, "moe_layer_start_index", 0, refuse);
    whole_number(c, "moe_layer_interval", 1, refuse);
    const double last = c.number("moe_layer_end_index");
    if (last < -1.0 || last != std::floor(last)) {
      refuse("moe_layer_end_index",
             fmt::format("must be a layer, or -1 for the last, got {}", last));
    }
    if (!(c.number("moe_norm_min") >= 0.0)) {
      refuse("moe_norm_min", fmt::format("must be at least 0, got {}", c.number("moe_norm_min")));
    }
  }
  LayerSpec layer(const ModelConfig& c, std::uint64_t index) const override {
    LayerSpec layer = Llama::layer(c, index);
    if (!has_experts(c, index)) return layer;
    const std::uint64_t width = whole_number(c, "moe_intermediate_size");
    ExpertsSpec experts = usual_experts(c, "num_experts", width);
    experts.renormalises = true;
    experts.correction = "mlp.moe_statics.e_score_correction_bias";
    experts.correction_row = true;
    experts.least_sum = c.number("moe_norm_min");
    experts.shared_width = width * whole_number(c, "num_shared_experts");
    if (experts.shared_width > 0) experts.shared_prefix = "mlp.shared_experts.";
    return instead_of_mlp(std::move(layer), std::move(experts));
  }
  std::vector<CheckpointKey> checkpoint_keys() const override {
    std::vector<CheckpointKey> keys = Llama::checkpoint_keys();
    for (CheckpointKey& key : keys) {
      if (key.own == "num_experts") key.name = "moe_num_experts";
      if (key.own == "num_experts_per_tok") key.name = "moe_k";
      if (key.own == "num_shared_experts") key.name = "moe_num_shared_experts";
    }
    // transformers' balance loss counts choices without corrections.
    keys.insert(keys.end(), {{"use_bias", "", {"false"}}, {"output_router_logits", "", {"false"}}});
    return keys;
  }

 private:
  static bool has_experts(const ModelConfig& c, std::uint64_t index) {
    const double last = c.number("moe_layer_end_index");
    return (index + 1) % whole_number(c, "moe_layer_interval") == 0 &&
           index >= whole_number(c, "moe_layer_start_index") &&
           (last < 0.0 || static_cast<double>(index) <= last);
  }
};

}  // namespace

std::unique_ptr<const Family> families::ernie4_5() {
  return std::make_unique<const Ernie45>();
}
std::unique_ptr<const Family> families::ernie4_5_moe() {
  return std::make_unique<const Ernie45Moe>();
}

}  // namespace ballast::model
