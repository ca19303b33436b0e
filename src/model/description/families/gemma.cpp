#include "src/model/description/families/gemma.h"

#include <array>
#include <string_view>

namespace ballast::model {
namespace {

/// Checks the inputs of layers besides the residual stream.
void check_layer_embedding(const ModelConfig& c, const Refuse& refuse) {
  constexpr std::uint64_t kMax = 1U << 16U;
  const text::Json& width = c.detail("hidden_size_per_layer_input");
  if (width.whole().value_or(kMax + 1) > kMax) {
    refuse("hidden_size_per_layer_input",
           fmt::format("must be a whole number of at most {}, got {}", kMax, width.described()));
  }
  const text::Json& rows = c.detail("vocab_size_per_layer_input");
  if (*width.whole() > 0 && rows.whole().value_or(0) == 0) {
    refuse("vocab_size_per_layer_input",
           fmt::format("must be a number of tokens, got {}", rows.described()));
  }
}

void check_experts(const ModelConfig& c, const Refuse& refuse) {
  if (!c.flag("enable_moe_block")) return;
  constexpr std::uint64_t kMax = 4096;
  for (const char* const key : {"num_experts", "top_k_experts", "moe_intermediate_size"}) {
    const text::Json& value = c.detail(key);
    const bool counts = std::string_view(key) == "num_experts";
    if (value.whole().value_or(0) > 0 && (!counts || *value.whole() <= kMax)) continue;
    refuse(key, fmt::format("must be a number of at least 1{} with enable_moe_block, got {}",
                            counts ? fmt::format(" and at most {}", kMax) : "", value.described()));
  }
  if (*c.detail("top_k_experts").whole() > *c.detail("num_experts").whole()) {
    refuse("top_k_experts",
           fmt::format("{} is above num_experts ({})", c.detail("top_k_experts").described(),
                       c.detail("num_experts").described()));
  }
}

LayerExpertsSpec experts_of(const ModelConfig& c) {
  return {.count = *c.detail("num_experts").whole(),
          .per_token = *c.detail("top_k_experts").whole(),
          .width = *c.detail("moe_intermediate_size").whole(),
          .router = "router.proj",
          .router_scale = "router.scale",
          .factors = "router.per_expert_scale",
          .in = "experts.gate_up_proj",
          .out = "experts.down_proj",
          .norm_before = "pre_feedforward_layernorm_2",
          .norm_after = "post_feedforward_layernorm_2",
          .norm_after_mlp = "post_feedforward_layernorm_1"};
}

LayerEmbeddingSpec inputs_of(const ModelConfig& c) {
  return {.width = *c.detail("hidden_size_per_layer_input").whole(),
          .vocabulary = *c.detail("vocab_size_per_layer_input").whole(),
          .table = "model.embed_tokens_per_layer",
          .projection = "model.per_layer_model_projection",
          .projection_norm = "model.per_layer_projection_norm",
          .gate = "per_layer_input_gate",
          .out = "per_layer_projection",
          .norm = "post_per_layer_input_norm"};
}

}  // namespace

/// Refuses numbers of sharing layers that the class of transformers refuses.
void Gemma4::check_sharing(const ModelConfig& c, const Refuse& refuse) const {
  const text::Json& value = c.detail("num_kv_shared_layers");
  if (value.whole().value_or(c.num_layers) >= c.num_layers) {
    refuse("num_kv_shared_layers",
           fmt::format("must be a whole number below num_layers ({}), got {}", c.num_layers,
                       value.described()));
  }
  const std::uint64_t first = first_sharing(c);
  for (std::uint64_t layer = first; layer < c.num_layers; ++layer) {
    if (keys_of(c, layer) < first) continue;
    refuse(
        "num_kv_shared_layers",
        fmt::format("is {}, but none of the first {} layers has the type of layer {}, whose keys "
                    "and values it would read; change it, or layer_types",
                    value.described(), first, layer));
  }
}

std::uint64_t Gemma4::keys_of(const ModelConfig& c, std::uint64_t index) const {
  const std::uint64_t first = first_sharing(c);
  if (index < first) return index;
  for (std::uint64_t layer = first; layer-- > 0;) {
    if (slides(c, layer) == slides(c, index)) return layer;
  }
  return index;
}

DecoderSpec Gemma4::decoder(const ModelConfig& c, std::uint64_t index) const {
  DecoderSpec spec = Gemma::decoder(c, index);
  const bool full = !slides(c, index);
  if (full) spec.window = 0;
  spec.query_norm = "self_attn.q_norm";
  spec.key_norm = "self_attn.k_norm";
  spec.norms_values = true;
  if (full && c.flag("attention_k_eq_v")) spec.qkv.pop_back();
  if (keys_of(c, index) != index) {
    spec.reads_keys = true;
    spec.qkv.resize(1);
    spec.key_norm.clear();
    if (c.flag("use_double_wide_mlp")) spec.mlp_width = 2 * c.intermediate_size;
  }
  spec.rotary = full ? 0 : 1;
  spec.result_scale = "layer_scalar";
  if (c.flag("enable_moe_block")) spec.layer_experts = experts_of(c);
  if (layer_input_width(c) > 0) spec.inputs = inputs_of(c);
  return spec;
}

void Gemma4::complete(ModelConfig& c, const Refuse& refuse) const {
  check_layer_embedding(c, refuse);
  check_experts(c, refuse);
  const std::uint64_t width = whole(c, "global_head_dim");
  if (width == 0 || width % 2 != 0 || width > kMaxHeadWidth) {
    refuse("global_head_dim", fmt::format("must be an even number of at most {}, got {}",
                                          kMaxHeadWidth, c.detail("global_head_dim").described()));
  }
  const text::Json& own = c.detail("num_global_key_value_heads");
  const std::uint64_t heads = own.is_null() ? c.num_kv_heads : own.whole().value_or(0);
  if (heads == 0 || c.num_heads % heads != 0) {
    refuse("num_global_key_value_heads",
           fmt::format("must divide num_heads ({}), got {}", c.num_heads, own.described()));
  }
  check_above_zero(c, "final_logit_softcapping", refuse, true);
  text::Json& scaling = c.details["rope_scaling"];
  if (scaling.is_null()) scaling = usual_scaling();
  Llama::complete(c, refuse);
  check_sharing(c, refuse);
}

}  // namespace ballast::model
