#include <algorithm>
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

// The classes are named after those in Hugging Face's transformers.

/// Has factors of the embedding, of scores, of the results of attention and MLP, and of the logits.
class Granite : public Llama {
 public:
  Granite()
      : Granite({.name = "granite",
                 .checkpoint_class = "GraniteForCausalLM",
                 .details = with_factors({{"mlp_bias", false}}),
                 .rules = {.rope = {.longest = 2048}},
                 .standards = {{"intermediate_size", 11008}}}) {}
  void complete(ModelConfig& c, const Refuse& refuse) const override {
    for (const char* const key : {"embedding_multiplier", "attention_multiplier",
                                  "residual_multiplier", "logits_scaling"}) {
      if (c.number(key) > 0.0) continue;
      refuse(key, fmt::format("must be above 0, got {}", c.number(key)));
    }
    Llama::complete(c, refuse);
  }
  OuterSpec outer(const ModelConfig& c) const override {
    OuterSpec outer = Llama::outer(c);
    outer.token_factor = c.number("embedding_multiplier");
    outer.logit_factor = 1.0 / c.number("logits_scaling");
    return outer;
  }
  LayerSpec layer(const ModelConfig& c, std::uint64_t index) const override {
    LayerSpec layer = Llama::layer(c, index);
    attention_of(layer).scale = c.number("attention_multiplier");
    for (SublayerSpec& sublayer : layer.sublayers) {
      sublayer.factor = c.number("residual_multiplier");
    }
    return layer;
  }

 protected:
  explicit Granite(Facts facts) : Llama(std::move(facts)) {}
  static std::vector<DetailKey> with_factors(std::vector<DetailKey> keys) {
    keys.insert(keys.begin(), {{"rope_theta", 10000.0}, {"rope_scaling", {}}});
    keys.insert(keys.begin() + 2, {"attention_bias", false});
    keys.insert(keys.end(), {{"embedding_multiplier", 1.0},
                             {"attention_multiplier", 1.0},
                             {"residual_multiplier", 1.0},
                             {"logits_scaling", 1.0}});
    return keys;
  }
};

/// Granite Swash: attention with sinks, a window in three of four layers, and a base of the rotary
/// positions per layer, of which 0 means no positions.
class GraniteSwa : public Granite {
 public:
  GraniteSwa()
      : GraniteSwa({.name = "granite_swa",
                    .checkpoint_class = "GraniteSWAForCausalLM",
                    .details = with_windows({{"mlp_bias", false}}),
                    .rules = {.rope = {.longest = 8192}},
                    .standards = {{"num_key_value_heads", 4, true},
                                  {"rms_norm_eps", 1e-5},
                                  {"intermediate_size", 8192},
                                  {"tie_word_embeddings", true},
                                  {"sliding_window", 128, true}}}) {}
  void complete(ModelConfig& c, const Refuse& refuse) const override {
    const text::Json& bases = c.detail("layer_rope_theta");
    if (!bases.is_null()) {
      bool known = bases.is_array() && bases.elements().size() == c.num_layers;
      for (const text::Json& base : bases.elements()) {
        known = known && base.is_number() && base.number() >= 0.0;
      }
      if (!known) {
        refuse("layer_rope_theta",
               fmt::format("must be a list of num_layers ({}) numbers: the base of each layer's "
                           "rotary positions, or 0 for none",
                           c.num_layers));
      }
    }
    Granite::complete(c, refuse);
  }
  std::vector<Rotary> rotaries(const ModelConfig& c, const Refuse& refuse) const override {
    if (c.detail("layer_rope_theta").is_null()) return Granite::rotaries(c, refuse);
    std::vector<Rotary> found;
    for (const double base : bases_of(c)) {
      ModelConfig own = c;
      own.details["rope_theta"] = base;
      text::Json& scaling = own.details["rope_scaling"];
      if (scaling.find("rope_theta") != nullptr) scaling["rope_theta"] = base;
      found.push_back(rotary_positions(own, refuse));
    }
    return found;
  }
  LayerSpec layer(const ModelConfig& c, std::uint64_t index) const override {
    LayerSpec layer = Granite::layer(c, index);
    AttentionSpec& attention = attention_of(layer);
    attention.sinks = "self_attn.sinks";
    const text::Json& bases = c.detail("layer_rope_theta");
    if (bases.is_null()) return layer;
    const double base = bases.elements()[index].number();
    const std::vector<double> all = bases_of(c);
    const auto at = static_cast<std::size_t>(std::ranges::find(all, base) - all.begin());
    attention.rotary = RotarySpec{.keys = at, .queries = at};
    if (base == 0.0) attention.rotary.reset();
    return layer;
  }

 protected:
  explicit GraniteSwa(Facts facts) : Granite(std::move(facts)) {}
  static std::vector<DetailKey> with_windows(std::vector<DetailKey> keys) {
    keys = with_factors(std::move(keys));
    keys.insert(keys.end(),
                {{"sliding_window", 128}, {"layer_types", {}}, {"layer_rope_theta", {}}});
    return keys;
  }
  bool is_windowed(const ModelConfig& /*config*/, std::uint64_t index) const override {
    return index % 4 != 0;
  }

 private:
  /// Returns the bases of the rotary positions in order of their first layer, without 0.
  static std::vector<double> bases_of(const ModelConfig& c) {
    std::vector<double> found;
    for (const text::Json& base : c.detail("layer_rope_theta").elements()) {
      const double value = base.number();
      if (value > 0.0 && std::ranges::find(found, value) == found.end()) found.push_back(value);
    }
    return found;
  }
};

/// Granite Swash with experts in every layer, and perhaps one for all tokens.
class GraniteMoeSwa final : public GraniteSwa {
 public:
  GraniteMoeSwa()
      : GraniteSwa(
            {.name = "granitemoe_swa",
             .checkpoint_class = "GraniteMoeSWAForCausalLM",
             .details = with_experts(with_windows({{"shared_intermediate_size", std::uint64_t{0}}}),
                                     "num_local_experts", 2, 0.001),
             .rules = {.rope = {.longest = 2048}},
             .standards = {{"intermediate_size", 11008},
                           {"sliding_window", 128, true},
                           {"num_local_experts", 8}}}) {}
  void complete(ModelConfig& c, const Refuse& refuse) const override {
    GraniteSwa::complete(c, refuse);
    check_experts(c, "num_local_experts", refuse);
    whole_number(c, "shared_intermediate_size", 0, refuse);
  }
  LayerSpec layer(const ModelConfig& c, std::uint64_t index) const override {
    LayerSpec layer = GraniteSwa::layer(c, index);
    layer.sublayers.back().factor = 1.0;  // part of the experts' weights
    const double factor = c.number("residual_multiplier");
    ExpertsSpec experts = {.count = whole_number(c, "num_local_experts"),
                           .per_token = whole_number(c, "num_experts_per_tok"),
                           .width = c.intermediate_size,
                           .renormalises = true,
                           .factor = factor,
                           .router = "block_sparse_moe.router",
                           .prefix = "block_sparse_moe.experts.",
                           .down = "down_proj",
                           .fused = true};
    experts.shared_width = whole_number(c, "shared_intermediate_size");
    experts.shared_prefix = "shared_mlp.";
    experts.shared_in = {"input_linear"};
    experts.shared_out = "output_linear";
    experts.shared_factor = factor;
    return instead_of_mlp(std::move(layer), std::move(experts));
  }
  std::vector<CheckpointKey> checkpoint_keys() const override {
    return keys_of_checkpoints(GraniteSwa::checkpoint_keys());
  }
};

/// Granite 4 without Mamba layers and experts: Granite with one map to gate and up, and perhaps
/// without positions.
class GraniteMoeHybrid final : public Granite {
 public:
  GraniteMoeHybrid()
      : Granite(
            {.name = "granitemoehybrid",
             .checkpoint_class = "GraniteMoeHybridForCausalLM",
             .details = with_factors({{"layer_types", {}}, {"position_embedding_type", "nope"}}),
             .rules = {.rope = {.longest = 2048},
                       .aliases = {{"layers_block_type", "layer_types"}},
                       .without_effect = {"intermediate_size", "num_experts_per_tok",
                                          "output_router_logits", "router_aux_loss_coef",
                                          "time_step_limit", "mamba_n_heads", "mamba_n_groups",
                                          "mamba_d_state", "mamba_d_head", "mamba_d_conv",
                                          "mamba_expand", "mamba_chunk_size", "mamba_conv_bias",
                                          "mamba_proj_bias"}},
             // transformers assumes Mamba layers.
             .standards = {{"intermediate_size", 1024},
                           {"layer_types", text::Json::array({"linear_attention"})}}}) {}
  void complete(ModelConfig& c, const Refuse& refuse) const override {
    const text::Json& types = c.detail("layer_types");
    for (const text::Json& type : types.elements()) {
      if (type == "full_attention" || type == "attention") continue;
      refuse("layer_types", fmt::format("has {}, but Ballast has no Mamba layers: all layers must "
                                        "be \"full_attention\" or \"attention\"",
                                        type.described()));
    }
    if (!types.is_null() && (!types.is_array() || types.elements().size() != c.num_layers)) {
      refuse("layer_types", fmt::format("must be a list of num_layers ({}) words, all "
                                        "\"full_attention\" or \"attention\"",
                                        c.num_layers));
    }
    const text::Json& positions = c.detail("position_embedding_type");
    if (positions != "rope" && positions != "nope") {
      refuse("position_embedding_type",
             fmt::format("must be \"rope\" or \"nope\", got {}", positions.described()));
    }
    ModelConfig own = c;
    own.details["layer_types"] = {};
    Granite::complete(own, refuse);
    c.intermediate_size = own.intermediate_size;
  }
  LayerSpec layer(const ModelConfig& c, std::uint64_t index) const override {
    LayerSpec layer = Granite::layer(c, index);
    if (c.detail("position_embedding_type") == "nope") attention_of(layer).rotary.reset();
    mlp_of(layer).in = {{"shared_mlp.input_linear"}};
    mlp_of(layer).out = {"shared_mlp.output_linear"};
    return layer;
  }
  std::vector<CheckpointKey> checkpoint_keys() const override {
    std::vector<CheckpointKey> keys = Granite::checkpoint_keys();
    for (CheckpointKey& key : keys) {
      if (key.own == "intermediate_size") key.name = "shared_intermediate_size";
    }
    keys.push_back({"num_local_experts", "", {"0"}, 8});
    return keys;
  }
};

}  // namespace

std::unique_ptr<const Family> families::granite() {
  return std::make_unique<const Granite>();
}
std::unique_ptr<const Family> families::granite_swa() {
  return std::make_unique<const GraniteSwa>();
}
std::unique_ptr<const Family> families::granitemoe_swa() {
  return std::make_unique<const GraniteMoeSwa>();
}
std::unique_ptr<const Family> families::granitemoehybrid() {
  return std::make_unique<const GraniteMoeHybrid>();
}

}  // namespace ballast::model
