#include <cstdint>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "src/model/description/families/families.h"
#include "src/model/description/families/llama.h"

namespace ballast::model {
namespace {

/// The text model of Meta's Muse Glimmer. The embedding has a norm without weights, and so have
/// queries and keys. A map makes gates of the results of attention. Layers without a window have no
/// positions. Layer norms multiply by one plus their weight.
class MuseGlimmer final : public Llama {
 public:
  MuseGlimmer()
      : Llama({.name = "muse_glimmer",
               .checkpoint_class = "",
               .details = {{"rope_theta", 10000.0},
                           {"rope_scaling", {}},
                           {"attention_bias", false},
                           {"sliding_window", 2048},
                           {"layer_types", {}},
                           {"layer_rope_theta", {}},
                           {"qk_scale_factor", 3.87},
                           {"post_norm_eps", 1e-8},
                           {"output_multiplier", 0.19611613513818404},
                           {"final_logit_softcapping", 20.0}},
               .rules = {.rope = {.longest = 131072}},
               .standards = {{"rms_norm_eps", 1e-5},
                             {"num_key_value_heads", 2},
                             {"head_dim", 128},
                             {"intermediate_size", 19968}}}) {}
  std::string_view checkpoint_type() const override { return "muse_glimmer_text"; }
  void complete(ModelConfig& c, const Refuse& refuse) const override {
    for (const char* const key :
         {"qk_scale_factor", "post_norm_eps", "output_multiplier", "final_logit_softcapping"}) {
      const text::Json& value = c.detail(key);
      if (value.is_number() && value.number() > 0.0) continue;
      refuse(key, fmt::format("must be above 0, got {}", value.described()));
    }
    const text::Json& bases = c.detail("layer_rope_theta");
    bool numbers = bases.is_null() || (bases.is_array() && bases.elements().size() == c.num_layers);
    for (const text::Json& one : bases.elements()) numbers = numbers && one.is_number();
    if (!numbers) {
      refuse("layer_rope_theta",
             fmt::format("must be a list of num_layers ({}) numbers: 0 for a layer without rotary "
                         "positions",
                         c.num_layers));
    }
    Llama::complete(c, refuse);
  }
  OuterSpec outer(const ModelConfig& c) const override {
    OuterSpec outer = Llama::outer(c);
    outer.logit_factor = c.number("output_multiplier");
    outer.logit_cap = c.number("final_logit_softcapping");
    return outer;
  }
  LayerSpec layer(const ModelConfig& c, std::uint64_t index) const override {
    LayerSpec layer = Llama::layer(c, index);
    const double epsilon = c.number("post_norm_eps");
    const auto after = [epsilon](const char* name) {
      return NormSpec{.name = name, .offset = 1.0F, .epsilon = epsilon};
    };
    layer.sublayers[0].before->offset = 1.0F;
    layer.sublayers[0].after = after("post_attention_layernorm");
    layer.sublayers[1].before = NormSpec{.name = "pre_feedforward_layernorm", .offset = 1.0F};
    layer.sublayers[1].after = after("post_feedforward_layernorm");
    HeadMaps& maps = maps_of(layer);
    maps.query_norm = NormSpec{.offset = static_cast<float>(c.number("qk_scale_factor"))};
    maps.key_norm = NormSpec{.offset = 1.0F};
    maps.gate = {"self_attn.gate_proj"};
    if (!rotates(c, index)) attention_of(layer).rotary.reset();
    if (index == 0) layer.input_norm = NormSpec{.offset = 1.0F};
    return layer;
  }
  std::vector<CheckpointKey> checkpoint_keys() const override {
    std::vector<CheckpointKey> keys = Llama::checkpoint_keys();
    for (CheckpointKey& key : keys) {
      if (key.name == "hidden_act") key.name = "hidden_activation";
    }
    return keys;
  }

 protected:
  bool is_windowed(const ModelConfig& c, std::uint64_t index) const override {
    return (c.num_layers - 1 - index) % 4 != 0;
  }

 private:
  /// Returns whether a layer has rotary positions. The class of transformers gives all of them the
  /// base rope_theta, whatever number other than 0 the list has.
  static bool rotates(const ModelConfig& c, std::uint64_t index) {
    const text::Json& bases = c.detail("layer_rope_theta");
    if (bases.is_array()) return bases.elements()[index].number() != 0.0;
    return (c.num_layers - 1 - index) % 4 != 0;
  }
};

}  // namespace

std::unique_ptr<const Family> families::muse_glimmer() {
  return std::make_unique<const MuseGlimmer>();
}

}  // namespace ballast::model
