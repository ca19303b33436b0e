#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <set>
#include <string>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "ballast/core/error.h"
#include "ballast/model/family.h"

#include "src/config/key_table.h"
#include "src/model/description/families/families.h"

namespace ballast::config {
namespace {

/// Choosing a family sets its defaults, so this key is read first.
Key family_key(model::ModelConfig& m) {
  Key key = choice("family", m.family, model::family_names());
  key.read = [read = std::move(key.read), &m](const Value& value) {
    read(value);
    m = model::default_config(m.family);
  };
  return key;
}

/// A value whose type is that of `standard`. If that is null: an object, a list or a number.
Json read_detail(const Value& value, const Json& standard) {
  if (standard.is_number()) {
    const double given = value.real({.low = std::numeric_limits<double>::lowest()});
    // Transformers refuses 24.0 if it needs a whole number.
    const bool whole = standard.whole() && given == std::floor(given) && given >= 0.0 &&
                       given <= static_cast<double>(std::uint64_t{1} << 53U);
    return whole ? Json(static_cast<std::uint64_t>(given)) : Json(given);
  }
  if (standard.is_boolean()) return value.flag();
  if (standard.is_string()) return value.text();
  const Json& given = value.json();
  if (given.is_string() || given.is_boolean()) value.fail_type("an object, a list or a number");
  return given;
}

struct DetailText {
  std::string_view name;
  KeyText text;
};
/// The texts of DetailKeys. A key means the same in each family that has it.
constexpr auto kDetailTexts = std::to_array<DetailText>(
    {{"rope_theta",
      {"base of the rotary positions (not gpt2)",
       "10000; smollm3: 2000000; mixtral, gemma3, gemma4, ministral3: 1000000; minimax_m2: "
       "5000000; olmo3: 500000; gpt_oss: 150000",
       "above 0"}},
     {"rope_scaling",
      {"rotary positions beyond the trained length (not gpt2), see [rotary "
       "positions](models.md#rotary-positions)",
       "none; gemma4: `proportional` with 0.25", ""}},
     {"rope_local_base_freq",
      {"base of the rotary positions of layers with a window, which `rope_scaling` does not change "
       "({families})",
       "10000; olmo3: 500000", "above 0"}},
     {"query_pre_attn_scalar",
      {"attention scores are divided by the square root of this value ({families}). Gemma 4 "
       "divides by 1, others by that of `head_dim`",
       "256", "above 0"}},
     {"attn_logit_softcapping",
      {"soft cap c of attention scores: a scaled score s becomes c tanh(s / c) ({families})",
       "none; folders without the key: 50", "above 0"}},
     {"final_logit_softcapping",
      {"soft cap of the logits ({families})", "none; gemma2's folders without the key: 30",
       "above 0"}},
     {"global_head_dim",
      {"width of a head in layers without a window ({families})", "512", "2 to 65536, even"}},
     {"attention_k_eq_v",
      {"in layers without a window, the map of keys gives values, too ({families})", "false",
       "true, false"}},
     {"num_global_key_value_heads",
      {"heads of keys and values in layers without a window, with `attention_k_eq_v` ({families})",
       "`num_kv_heads`", "divides `num_heads`"}},
     {"num_kv_shared_layers",
      {"number of layers at the end that attend to keys and values of the last earlier layer of "
       "their type (gemma4: E2B, E4B)",
       "0", "below `num_layers`; an earlier layer has the type of each of them"}},
     {"use_double_wide_mlp",
      {"the MLP of these layers is twice as wide ({families})", "false", "true, false"}},
     {"hidden_size_per_layer_input",
      {"width of the inputs that each layer has in addition to the residual stream (gemma4: E2B, "
       "E4B)",
       "0; folders without the key: 256",
       "at most 65536; 0: none; on device `cuda` a multiple of 8"}},
     {"vocab_size_per_layer_input",
      {"rows of the embeddings of these inputs ({families}). A larger token is an error", "262144",
       "at least 1"}},
     {"enable_moe_block",
      {"experts in addition to the MLP of each layer ({families})", "false", "true, false"}},
     {"top_k_experts",
      {"experts per token (gemma4 with `enable_moe_block`)", "required", "1 to `num_experts`"}},
     {"hidden_act",
      {"activation of the MLP ({families}): `gelu`, or its tanh approximation as `gelu_new`, "
       "`gelu_fast` or `gelu_pytorch_tanh`",
       "`gelu`", "these"}},
     {"use_parallel_residual",
      {"attention and MLP read the same residual stream ({families})", "true", "true, false"}},
     {"attention_bias",
      {"attention projections have biases (llama, qwen3, qwen3_moe, qwen3_5, qwen3_5_moe, "
       "qwen3_next, smollm3, olmo2, olmo3, olmoe, gemma2, gemma3, gemma4, gpt_neox, gpt_oss; "
       "glm4_moe: queries, keys and values; latent attention: the maps of the layer's input, "
       "except one of queries alone, and the last one)",
       "false; gpt_neox, gpt_oss: true", "true, false"}},
     {"q_lora_rank",
      {"rank of the map of queries ([latent attention](models.md#latent-attention))",
       "none: one map",
       "1 to 65536; on device `cuda` a multiple of 8; required for deepseek_v32, glm_moe_dsa"}},
     {"kv_lora_rank",
      {"rank of the map of keys and values ({families})", "512",
       "1 to 65536; on device `cuda` a multiple of 8"}},
     {"qk_nope_head_dim",
      {"values of a head of queries or keys without rotary positions ({families})", "128",
       "1 to 65536; even for mistral4"}},
     {"qk_rope_head_dim",
      {"values of a head of queries or keys with rotary positions; all heads have the same of keys "
       "({families})",
       "64", "2 to 65536, even; on device `cuda` a multiple of 8"}},
     {"v_head_dim",
      {"width of a head of values ({families})", "128",
       "1 to `qk_nope_head_dim` + `qk_rope_head_dim`; on device `cuda` a multiple of 8"}},
     {"rope_interleave",
      {"neighbours rotate together instead of values half of `qk_rope_head_dim` apart ({families})",
       "true", "true, false"}},
     {"mlp_bias", {"MLP projections have biases ({families})", "false", "true, false"}},
     {"partial_rotary_factor",
      {"share of each head that rotates ({families})",
       "1; gpt_neox, qwen3_5, qwen3_5_moe, qwen3_next: 0.25; glm4_moe: 0.5", "above 0, at most 1"}},
     {"sliding_window",
      {"tokens that attention sees, including the token itself (mistral, ministral3, mixtral, "
       "phi3, olmo3, gemma2, gemma3, gemma4, gpt_oss; qwen2, qwen3, qwen2_moe, qwen3_moe, smollm3 "
       "with `use_sliding_window`)",
       "all; gemma2, gemma3, olmo3: 4096; gemma4: 512; gpt_oss: 128",
       "at least 1; 0 (no window) if `use_sliding_window` is false"}},
     {"use_sliding_window",
      {"whether `sliding_window` has an effect ({families})", "false", "true, false"}},
     {"max_window_layers",
      {"first layer that has the window, counted from 0 (qwen2, qwen3); qwen2_moe: first layer "
       "without one, qwen3_moe: no effect, all layers have it",
       "28", ""}},
     {"sliding_window_pattern", {"every n-th layer has no window ({families})", "6", "at least 1"}},
     {"layer_types",
      {"list with one entry per layer: `full_attention` or `sliding_attention` (qwen2, qwen3, "
       "qwen2_moe, qwen3_moe, smollm3, olmo3, gemma2, gemma3, gemma4, gpt_oss; qwen3_5, "
       "qwen3_5_moe, qwen3_next: see `full_attention_interval`)",
       "from the keys above; smollm3: a window in the layers without positions; olmo3: none in "
       "every fourth layer; gemma4: none in every sixth layer and the last; gemma2, gpt_oss: a "
       "window in every other layer, starting with the first",
       ""}},
     {"full_attention_interval",
      {"every n-th layer has attention, the others a [gated delta net](models.md#gated-delta-nets) "
       "({families}). `model.layer_types`, a list of `linear_attention` and `full_attention`, "
       "overrides it",
       "4", "at least 1"}},
     {"linear_num_key_heads",
      {"heads of queries and of keys of a gated delta net ({families})", "16", "at least 1"}},
     {"linear_num_value_heads",
      {"heads of values of a gated delta net ({families})", "32",
       "a multiple of `linear_num_key_heads`; on device `cuda` of 8, too"}},
     {"linear_key_head_dim",
      {"width of a head of queries or keys of a gated delta net ({families})", "128",
       "at least 1; on device `cuda` a multiple of 8, at most 256"}},
     {"linear_value_head_dim",
      {"width of a head of values of a gated delta net ({families})", "128",
       "at least 1; on device `cuda` a multiple of 8, at most 256"}},
     {"linear_conv_kernel_dim",
      {"tokens that the convolution of a gated delta net reads for a token, including the token "
       "itself ({families})",
       "4", "1 to 8"}},
     {"no_rope_layers",
      {"list with one entry per layer: 1 with, 0 without rotary positions ({families})",
       "from the next key", ""}},
     {"no_rope_layer_interval",
      {"every n-th layer has no rotary positions ({families})", "4", "at least 1"}},
     {"num_local_experts", {"experts per layer ({families})", "required", "1 to 4096"}},
     {"num_experts",
      {"experts per layer (qwen2_moe, qwen3_moe, olmoe, qwen3_5_moe, qwen3_next; gemma4 with "
       "`enable_moe_block`)",
       "required", "1 to 4096"}},
     {"num_experts_per_tok",
      {"experts per token (top-k) ({families})",
       "mixtral: 2; qwen2_moe, gpt_oss, glm4_moe_lite, mistral4: 4; qwen3_next: 10; others: 8",
       "1 to the number of experts"}},
     {"moe_intermediate_size",
      {"width of an expert's MLP (qwen2_moe, qwen3_moe, glm4_moe, latent attention, qwen3_5_moe, "
       "qwen3_next; gemma4 with `enable_moe_block`: required; others: `intermediate_size`)",
       "1408; qwen3_moe: 768; qwen3_5_moe, qwen3_next: 512; glm4_moe_lite: 1536; other latent "
       "attention: 2048",
       "at least 1"}},
     {"shared_expert_intermediate_size",
      {"width of the shared expert, which computes all tokens ({families})",
       "5632; qwen3_5_moe, qwen3_next: 512", "at least 1"}},
     {"norm_topk_prob",
      {"normalise the weights of a token's experts to a sum of 1 ({families}). Mixtral, gpt-oss, "
       "MiniMax-M2 and the mixtures of Qwen3.5 always do",
       "false; glm4_moe, latent attention: true", "true, false"}},
     {"n_routed_experts", {"experts per layer ({families})", "required", "1 to 4096"}},
     {"n_shared_experts",
      {"width of the shared expert, which computes all tokens, in multiples of "
       "`moe_intermediate_size` ({families})",
       "1", "at least 1"}},
     {"first_k_dense_replace",
      {"number of first layers with an MLP (glm4_moe, deepseek_v3, mistral4; deepseek_v32, "
       "glm_moe_dsa without `mlp_layer_types`)",
       "glm4_moe: 1; mistral4: 0; others: 3", ""}},
     {"mlp_layer_types",
      {"list with one entry per layer: `dense` (an MLP) or `sparse` (experts) ({families})",
       "glm4_moe_lite: `dense`, then `sparse`; others: `first_k_dense_replace`", ""}},
     {"n_group",
      {"groups of consecutive experts ({families}), see [sigmoid "
       "routers](models.md#sigmoid-routers)",
       "1; deepseek_v3, deepseek_v32: 8",
       "1 to 256, divides `n_routed_experts` into groups of at least 2; mistral4: 1"}},
     {"topk_group",
      {"groups from which the experts of a token are chosen ({families})",
       "1; deepseek_v3, deepseek_v32: 4", "1 to `n_group`"}},
     {"routed_scaling_factor",
      {"factor of the weights of a token's experts ({families})",
       "glm4_moe, mistral4: 1; glm4_moe_lite: 1.8; others: 2.5", "above 0"}},
     {"index_topk",
      {"tokens that sparse attention chooses for a query ({families}), see "
       "[sparse attention](models.md#latent-attention)",
       "2048", "at least `data.sequence_length`"}},
     {"use_qk_norm", {"norms of the query and key heads ({families})", "false", "true, false"}},
     {"swiglu_limit",
      {"limit of an expert's gate (from above) and up projection (on both sides) ({families})", "7",
       "above 0"}},
     {"swiglu_alpha", {"factor of the gate inside its sigmoid ({families})", "1.702", "above 0"}},
     {"decoder_sparse_step",
      {"every n-th layer has experts, the others an MLP ({families})", "1", "at least 1"}},
     {"mlp_only_layers", {"further layers with an MLP, counted from 0 ({families})", "none", ""}},
     {"output_router_logits",
      {"train with the load-balancing loss, as in Hugging Face's configs ({families})", "false",
       "true, false"}},
     {"router_aux_loss_coef",
      {"coefficient of the load-balancing loss ({families}). The loss covers the routers of all "
       "layers together and is averaged over micro-batches and ranks",
       "0.001; olmoe: 0.01", "at least 0"}},
     {"router_z_loss_coef",
      {"coefficient of the router z-loss: the mean squared log-sum-exp of the router's logits "
       "({families})",
       "0", "at least 0"}},
     {"qkv_bias", {"queries, keys and values have biases ({families})", "true", "true, false"}},
     {"pad_token_id",
      {"token whose row of the embedding gets no gradient from the tokens of a batch, as in "
       "transformers, whose classes give it to `nn.Embedding` as `padding_idx` (not gpt2, "
       "gpt_neox). The gradient of a tied output matrix remains. `model.path` sets it from "
       "`config.json`, and null next to `model.path` switches it off",
       "null: none", "token below `vocab_size`, null"}}});

/// Families with latent attention, which the documentation names together.
bool is_latent(const std::string& family) {
  const auto details = model::family(family).details();
  return std::ranges::any_of(
      details, [](const model::DetailKey& key) { return key.name == "kv_lora_rank"; });
}

/// Families of other programs may have keys without a text.
KeyText text_of(const model::DetailKey& detail) {
  const auto* const found = std::ranges::find(kDetailTexts, detail.name, &DetailText::name);
  return found == kDetailTexts.end() ? KeyText{} : found->text;
}

/// Keys that only some families have. Others refuse them.
Section detail_keys(model::ModelConfig& m) {
  Section keys;
  std::set<std::string> names;
  for (const std::string& family : model::family_names()) {
    for (const model::DetailKey& detail : model::family(family).details()) {
      if (!names.insert(detail.name).second) continue;
      const auto read = [&m, detail](const Value& value) {
        if (!m.details.contains(detail.name)) {
          value.fail(fmt::format("has no effect for the family {} (it is for {}); remove it",
                                 m.family, listed(model::families_with_key(detail.name))));
        }
        m.details[detail.name] = read_detail(value, detail.standard);
      };
      const bool own = m.details.contains(detail.name);
      const auto write = [&m, name = detail.name] { return m.detail(name); };
      keys.push_back(row(kResultsAndPlan,
                         {detail.name, read, own ? std::function<Json()>(write) : nullptr},
                         text_of(detail)));
    }
  }
  return keys;
}

/// Unless it is empty, expand_model_path() has replaced it.
Key model_path_key() {
  Key key = {"path", [](const Value& value) { static_cast<void>(value.text()); }, nullptr};
  key.names_paths = true;
  return key;
}

/// Keys of the sizes of all families.
Section size_keys(model::ModelConfig& m) {
  return {
      row(kResultsAndPlan, family_key(m),
          {"architecture, see [model families](models.md#model-families)", "`gpt2`",
           "`gpt2`, `llama`, `mistral`, `ministral3`, `qwen2`, `qwen3`, `smollm3`, `phi3`, "
           "`olmo2`, `olmo3`, `gemma2`, `gemma3`, `gemma4`, `gpt_neox`, `mixtral`, `qwen2_moe`, "
           "`qwen3_moe`, `olmoe`, `gpt_oss`, `glm4_moe`, `minimax_m2`, `deepseek_v3`, "
           "`glm4_moe_lite`, `deepseek_v32`, `glm_moe_dsa`, `mistral4`, `qwen3_5`, `qwen3_5_moe`, "
           "`qwen3_next`"}),
      row(kResultsAndPlan, whole("vocab_size", m.vocab_size, {1, 0x7fffffffU}),
          {"number of token ids", "256",
           "1 to 2^31 - 1; at least 256 with `data.text`; at most 65536 with `data.token_type` "
           "`u16`"}),
      row(kResultsAndPlan,
          also_called(whole("hidden_size", m.hidden_size, {1, 1U << 20U}), {"n_embd", "d_model"}),
          {"width of the residual stream", "required",
           "1 to 2^20; a multiple of `num_heads` unless `head_dim` is given"}),
      row(kResultsAndPlan,
          also_called(whole("num_layers", m.num_layers, {1, 1U << 16U}),
                      {"num_hidden_layers", "n_layer", "layers"}),
          {"transformer layers", "required", "1 to 65536"}),
      row(kResultsAndPlan,
          also_called(whole("num_heads", m.num_heads, {1, 1U << 16U}),
                      {"num_attention_heads", "n_head", "heads"}),
          {"attention heads", "required", "1 to 65536"}),
      row(kResultsAndPlan,
          also_called(whole("num_kv_heads", m.num_kv_heads, {0, 1U << 16U}),
                      {"num_key_value_heads", "kv_heads"}),
          {"key and value heads", "`num_heads`",
           "divides `num_heads`; 0: the default; equal to it for `gpt2`, `gpt_neox` and families "
           "with [latent attention](models.md#latent-attention)"}),
      row(kResultsAndPlan, whole("head_dim", m.head_dim, {0, 1U << 16U}),
          {"width of one head; attention is `num_heads` x `head_dim` wide",
           "`hidden_size` / `num_heads`; [latent attention](models.md#latent-attention): "
           "`qk_nope_head_dim` "
           "+ `qk_rope_head_dim`",
           "0 to 65536; 0: the default; even with rotary positions; on device `cuda` a multiple of "
           "8, at most 512"}),
      row(kResultsAndPlan,
          also_called(whole("intermediate_size", m.intermediate_size, {0, 1U << 24U}), {"n_inner"}),
          {"width of the MLP",
           "gpt2, gpt_neox: 4 x hidden; qwen3_5, qwen3_next: 3 x hidden; others: 8/3 x hidden, up "
           "to a multiple of 64",
           "0 to 2^24; 0: the default"}),
      row(kResultsAndPlan,
          also_called(whole("max_sequence", m.max_sequence, {0, 1U << 30U}),
                      {"max_position_embeddings", "n_positions"}),
          {"longest sequence, in tokens", "`data.sequence_length`",
           "`data.sequence_length` to 2^30; 0: the default"})};
}

Section other_keys(Config& c) {
  model::ModelConfig& m = c.model;
  return {
      row(kResultsAndPlan,
          also_called(real("norm_epsilon", m.norm_epsilon, kPositive),
                      {"rms_norm_eps", "layer_norm_epsilon"}),
          {"added to the variance in norms", "1e-5", "above 0"}),
      row(kResultsAndPlan,
          also_called(flag("tie_embeddings", m.tie_embeddings), {"tie_word_embeddings"}),
          {"the head uses the embedding's weights",
           "gpt2, gemma2, gemma3, gemma4: true; others: false", "true, false"}),
      row(kPlanOnly,
          or_auto(whole("vocabulary_tiles", m.vocabulary_tiles, {1, 1U << 28U}),
                  m.vocabulary_tiles),
          {"blocks into which the rows of the embedding and of the output matrix are cut, see "
           "[tiles](memory.md#tiles)",
           "chosen by size", "at most one per 16 tokens"}),
      row(kPlanOnly, or_auto(whole("layer_tiles", m.layer_tiles, {1, 1U << 20U}), m.layer_tiles),
          {"blocks into which the MLP of each layer is cut, see [tiles](memory.md#tiles). Not for "
           "latent "
           "attention, gemma2, gemma3, gemma4, olmo2, olmo3, gpt_neox with "
           "`use_parallel_residual`, and models with experts",
           "chosen by size", "at most one per 16 of `intermediate_size`"}),
      row(kPlanOnly,
          also_called(real("init_stddev", m.init_stddev, kPositive), {"initializer_range"}),
          {"standard deviation of the initial weights", "0.02", "above 0"}),
      row(kResultsAndPlan,
          real("router_bias_update_speed", c.router_bias_update_speed, kNotNegative),
          {"change of the corrections of [sigmoid routers](models.md#sigmoid-routers) per update, "
           "towards "
           "equal loads of the experts. With 0 they stay as they are. Not with adapters",
           "0", "at least 0"}),
      row(kNeither, path("weights", c.initial_weights),
          {"initial weights with Hugging Face's names: a safetensors file, a folder, or the index "
           "of a sharded model, see [initial weights](models.md#initial-weights)",
           "none: random from `ballast.seed`", "path"}),
      row(kNeither, model_path_key(),
          {"Hugging Face folder: its `config.json` gives all other keys of `model` except "
           "`vocabulary_tiles`, `layer_tiles` and those of training (`output_router_logits`, "
           "`router_aux_loss_coef`, `router_z_loss_coef`, `router_bias_update_speed`), and its "
           "weights are the initial weights, see [Hugging Face "
           "folders](models.md#hugging-face-folders)",
           "none", "path"})};
}

}  // namespace

Section model_keys(Config& c) {
  return joined({size_keys(c.model), other_keys(c), detail_keys(c.model)});
}

void name_families(KeyInfo& row) {
  constexpr std::string_view kMark = "{families}";
  const std::size_t mark = row.text.meaning.find(kMark);
  if (mark == std::string::npos) return;
  std::vector<std::string> own = model::families_with_key(row.path.substr(row.path.find('.') + 1));
  if (std::ranges::count_if(own, is_latent) ==
      std::ranges::count_if(model::family_names(), is_latent)) {
    std::erase_if(own, is_latent);
    own.emplace_back("latent attention");
  }
  row.text.meaning.replace(mark, kMark.size(), fmt::format("{}", fmt::join(own, ", ")));
}

}  // namespace ballast::config
