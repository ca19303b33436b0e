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

/// Liquid AI's models: gated short convolutions in most layers, attention with norms of heads in
/// the others.
class Lfm2 final : public Llama {
 public:
  Lfm2()
      : Llama({.name = "lfm2",
               .checkpoint_class = "Lfm2ForCausalLM",
               .details = {{"rope_theta", 1000000.0},
                           {"rope_scaling", {}},
                           {"layer_types", {}},
                           {"full_attn_idxs", {}},
                           {"conv_L_cache", std::uint64_t{3}},
                           {"conv_bias", false},
                           {"block_auto_adjust_ff_dim", true},
                           {"block_ffn_dim_multiplier", 1.0},
                           {"block_multiple_of", std::uint64_t{256}}},
               .rules = {.rope = {.longest = 128000},
                         .aliases = {{"tie_embedding", "tie_word_embeddings"},
                                     {"block_ff_dim", "intermediate_size"}},
                         .without_effect = {"block_dim", "block_mlp_init_scale", "block_norm_eps",
                                            "block_out_init_scale", "block_use_swiglu",
                                            "block_use_xavier_init", "conv_dim", "conv_dim_out",
                                            "conv_use_xavier_init", "num_heads", "theta",
                                            "use_pos_enc"}},
               .standards = {{"num_key_value_heads", 8},
                             {"intermediate_size", 12288},
                             {kPadToken, 0, true}}}) {}
  bool ties_embeddings() const override { return true; }
  void complete(ModelConfig& c, const Refuse& refuse) const override {
    constexpr std::uint64_t kMaxTaps = 8;
    if (c.intermediate_size == 0) {
      const bool adjusts = c.flag("block_auto_adjust_ff_dim");
      c.intermediate_size = adjusts ? 4 * c.hidden_size : round_up((8 * c.hidden_size + 2) / 3, 64);
    }
    rotaries(c, refuse);
    whole_number(c, "block_multiple_of", 1, refuse);
    const std::uint64_t taps = whole_number(c, "conv_L_cache", 1, refuse);
    if (taps > kMaxTaps) {
      refuse("conv_L_cache", fmt::format("must be at most {}, got {}", kMaxTaps, taps));
    }
    check_types(c, refuse);
    constexpr double kWidest = 1 << 24;
    const double factor = c.number("block_ffn_dim_multiplier");
    const double wide = factor * static_cast<double>(c.intermediate_size);
    if (!(factor > 0.0 && wide <= kWidest) || mlp_width(c) == 0) {
      refuse("block_ffn_dim_multiplier",
             fmt::format("must make an MLP of 1 to {} values, got {} for intermediate_size {}",
                         kWidest, factor, c.intermediate_size));
    }
  }
  OuterSpec outer(const ModelConfig& c) const override {
    OuterSpec outer = Llama::outer(c);
    outer.norm.name = "model.embedding_norm";
    return outer;
  }
  LayerSpec layer(const ModelConfig& c, std::uint64_t index) const override {
    LayerSpec layer = Llama::layer(c, index);
    layer.sublayers[0].before->name = "operator_norm";
    layer.sublayers[1].before->name = "ffn_norm";
    MlpSpec& mlp = mlp_of(layer);
    mlp.in = {{"feed_forward.w1"}, {"feed_forward.w3"}};
    mlp.out = {"feed_forward.w2"};
    mlp.width = mlp_width(c);
    if (has_attention(c, index)) {
      maps_of(layer).query_norm = NormSpec{"self_attn.q_layernorm"};
      maps_of(layer).key_norm = NormSpec{"self_attn.k_layernorm"};
      attention_of(layer).out = {"self_attn.out_proj"};
      return layer;
    }
    const bool biased = c.flag("conv_bias");
    layer.sublayers[0].body = ConvolutionSpec{.channels = c.hidden_size,
                                              .taps = whole_number(c, "conv_L_cache"),
                                              .convolution = "conv.conv",
                                              .bias = biased,
                                              .in = {"conv.in_proj", biased},
                                              .out = {"conv.out_proj", biased}};
    return layer;
  }
  std::vector<CheckpointKey> checkpoint_keys() const override {
    std::vector<CheckpointKey> keys = Llama::checkpoint_keys();
    std::erase_if(keys, [](const CheckpointKey& key) { return key.name == "hidden_act"; });
    for (CheckpointKey& key : keys) {
      if (key.name != "rms_norm_eps") continue;
      key.name = "norm_eps";
      key.standard = 1e-5;
    }
    return keys;
  }

 private:
  /// Returns the width of the MLP: intermediate_size, or two thirds of it times the multiplier, up
  /// to a multiple. Numbers are truncated where the class of transformers does so.
  static std::uint64_t mlp_width(const ModelConfig& c) {
    if (!c.flag("block_auto_adjust_ff_dim")) return c.intermediate_size;
    const std::uint64_t part = 2 * c.intermediate_size / 3;
    const double wide = c.number("block_ffn_dim_multiplier") * static_cast<double>(part);
    return round_up(static_cast<std::uint64_t>(wide), whole_number(c, "block_multiple_of"));
  }
  static bool has_attention(const ModelConfig& c, std::uint64_t index) {
    const text::Json& types = c.detail("layer_types");
    if (types.is_array()) return types.elements()[index] == "full_attention";
    const text::Json& layers = c.detail("full_attn_idxs");
    if (layers.is_null()) return true;
    return std::ranges::any_of(layers.elements(),
                               [&](const text::Json& one) { return one.whole() == index; });
  }
  static void check_types(const ModelConfig& c, const Refuse& refuse) {
    const text::Json& types = c.detail("layer_types");
    const text::Json& layers = c.detail("full_attn_idxs");
    bool known = types.is_null() || (types.is_array() && types.elements().size() == c.num_layers);
    for (const text::Json& type : types.elements()) {
      known = known && (type == "conv" || type == "full_attention");
    }
    if (!known) {
      refuse("layer_types", fmt::format("must be a list of num_layers ({}) words, \"conv\" or "
                                        "\"full_attention\"",
                                        c.num_layers));
    }
    bool numbers = layers.is_null() || layers.is_array();
    for (const text::Json& one : layers.elements()) {
      numbers = numbers && one.whole() && *one.whole() < c.num_layers;
    }
    if (numbers) return;
    refuse("full_attn_idxs",
           fmt::format("must be a list of layers, counted from 0, below num_layers ({})",
                       c.num_layers));
  }
};

}  // namespace

std::unique_ptr<const Family> families::lfm2() {
  return std::make_unique<const Lfm2>();
}

}  // namespace ballast::model
