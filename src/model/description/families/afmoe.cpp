#include <cmath>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "src/model/description/families/families.h"
#include "src/model/description/families/llama.h"

namespace ballast::model {
namespace {

/// Arcee's Trinity: gates of the results of attention have their own map, and attention and the MLP
/// or experts have norms before and after. Experts have sigmoid routers and an expert for all
/// tokens. Layers without a window have no positions. The class is named after that in Hugging
/// Face's transformers.
class Afmoe final : public Llama {
 public:
  Afmoe()
      : Llama({.name = "afmoe",
               .checkpoint_class = "AfmoeForCausalLM",
               .details = {{"rope_theta", 10000.0},
                           {"rope_scaling", {}},
                           {"attention_bias", false},
                           {"sliding_window", 1024},
                           {"layer_types", {}},
                           {"global_attn_every_n_layers", std::uint64_t{4}},
                           {"mup_enabled", false},
                           {"num_experts", std::uint64_t{0}},
                           {"num_experts_per_tok", std::uint64_t{6}},
                           {"moe_intermediate_size", std::uint64_t{1408}},
                           {"num_shared_experts", std::uint64_t{2}},
                           {"num_dense_layers", std::uint64_t{1}},
                           {"route_scale", 1.0}},
               .rules = {.rope = {.longest = 16384},
                         .without_effect = {"load_balance_coeff", "output_router_logits",
                                            "use_grouped_mm"},
                         .peft_converts = true},
               .standards = {{"rms_norm_eps", 1e-5},
                             {"head_dim", 128},
                             {"intermediate_size", 6144},
                             {"sliding_window", 1024, true},
                             {"num_experts", 64}}}) {}
  void complete(ModelConfig& c, const Refuse& refuse) const override {
    Llama::complete(c, refuse);
    check_expert_counts(c, "num_experts", refuse);
    for (const char* key :
         {"moe_intermediate_size", "num_shared_experts", "global_attn_every_n_layers"}) {
      whole_number(c, key, 1, refuse);
    }
    whole_number(c, "num_dense_layers", 0, refuse);
    check_factor(c, "route_scale", refuse);
  }
  OuterSpec outer(const ModelConfig& c) const override {
    OuterSpec outer = Llama::outer(c);
    if (c.flag("mup_enabled")) outer.token_factor = std::sqrt(static_cast<double>(c.hidden_size));
    return outer;
  }
  LayerSpec layer(const ModelConfig& c, std::uint64_t index) const override {
    LayerSpec layer = Llama::layer(c, index);
    layer.sublayers[0].after = NormSpec{"post_attention_layernorm"};
    layer.sublayers[1].before = NormSpec{"pre_mlp_layernorm"};
    layer.sublayers[1].after = NormSpec{"post_mlp_layernorm"};
    add_head_norms(layer);
    maps_of(layer).gate = {"self_attn.gate_proj"};
    if (!is_sliding(c, index)) attention_of(layer).rotary.reset();
    if (index < whole_number(c, "num_dense_layers")) return layer;
    return instead_of_mlp(std::move(layer),
                          corrected_experts(c, "route_scale", "mlp.shared_experts."));
  }
  std::vector<CheckpointKey> checkpoint_keys() const override {
    std::vector<CheckpointKey> keys = Llama::checkpoint_keys();
    // Keys of published folders that the class does not read.
    keys.insert(keys.end(), {{"score_func", "", {"sigmoid"}},
                             {"route_norm", "", {"true"}},
                             {"n_group", "", {"1"}},
                             {"topk_group", "", {"1"}},
                             {"num_expert_groups", "", {"1"}},
                             {"num_limited_groups", "", {"1"}}});
    return keys;
  }

 protected:
  bool is_windowed(const ModelConfig& c, std::uint64_t index) const override {
    return (index + 1) % whole_number(c, "global_attn_every_n_layers") != 0;
  }
};

}  // namespace

std::unique_ptr<const Family> families::afmoe() {
  return std::make_unique<const Afmoe>();
}

}  // namespace ballast::model
