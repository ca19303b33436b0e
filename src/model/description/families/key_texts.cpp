#include <algorithm>
#include <array>
#include <string_view>

#include "ballast/model/family.h"

namespace ballast::model {
namespace {

struct NamedText {
  std::string_view name;
  KeyText text;
};
/// The documentation of keys of the model section that differ between families. A key means the
/// same in each family that has it.
constexpr auto kTexts = std::to_array<NamedText>(
    {{"family",
      {"architecture, see [model families](models.md#model-families)", "`{default family}`",
       "{all families}"}},
     {"num_kv_heads",
      {"key and value heads", "`num_heads`",
       "divides `num_heads`; 0: the default; equal to it for `gpt2`, `gpt_neox` and families "
       "with [latent attention](models.md#latent-attention)"}},
     {"intermediate_size",
      {"width of the MLP",
       "gpt2, gpt_neox, lfm2 with `block_auto_adjust_ff_dim`: 4 x hidden; qwen3_5, qwen3_next: "
       "3 x hidden; others: 8/3 x hidden, up to a multiple of 64",
       "0 to 2^24; 0: the default"}},
     {"tie_embeddings",
      {"the head uses the embedding's weights", "{tying families}: true; others: false",
       "true, false"}},
     {"layer_tiles",
      {"blocks into which the MLP of each layer is cut, see [tiles](memory.md#tiles). Not for "
       "latent attention, gemma2, gemma3, gemma4, muse_glimmer, olmo2, olmo3, exaone4, "
       "olmo_hybrid, "
       "cohere2, Granite's families, gpt_neox with "
       "`use_parallel_residual`, and models with experts",
       "chosen by size", "at most one per 16 of `intermediate_size`"}},
     {"rope_theta",
      {"base of the rotary positions (not gpt2)", "{defaults}",
       "above 0; olmo_hybrid: 0 means no positions, too"}},
     {"rope_scaling",
      {"rotary positions beyond the trained length (not gpt2), see [rotary "
       "positions](models.md#rotary-positions)",
       "none; gemma4: `proportional` with 0.25", ""}},
     {"rope_local_base_freq",
      {"base of the rotary positions of layers with a window, which `rope_scaling` does not change "
       "({families})",
       "{defaults}", "above 0"}},
     {"embedding_multiplier", {"factor of the embedding ({families})", "1", "above 0"}},
     {"logit_scale", {"factor of the logits ({families})", "0.0625", "above 0"}},
     {"layer_rope_theta",
      {"list with one entry per layer: the base of its rotary positions, or 0 for none "
       "({families})",
       "`rope_theta`", ""}},
     {"position_embedding_type",
      {"positions of attention ({families}): `rope`, rotary ones, or `nope`, none", "`nope`",
       "these"}},
     {"shared_intermediate_size",
      {"width of the shared expert, which computes all tokens ({families})",
       "granitemoe_swa: 0, none; minimax_m3_vl_text: 3072",
       "at least 0; minimax_m3_vl_text: at least 1"}},
     {"dense_intermediate_size",
      {"width of the MLP in layers without experts ({families})", "{defaults}", "at least 1"}},
     {"prefix_dense_intermediate_size",
      {"width of the MLP in layers without experts ({families})", "`intermediate_size`",
       "at least 1"}},
     {"prefix_dense_sliding_window_pattern",
      {"every n-th of the first `first_k_dense_replace` layers has no window. With 1, layers with "
       "an "
       "MLP have rotary positions without a window, too ({families})",
       "{defaults}", "at least 1"}},
     {"global_attn_every_n_layers",
      {"every n-th layer has neither a window nor positions, without `layer_types` ({families})",
       "{defaults}", "at least 1"}},
     {"mup_enabled",
      {"the embedding is multiplied by the square root of `hidden_size` ({families})", "false",
       "true, false"}},
     {"num_dense_layers",
      {"number of first layers with an MLP ({families})", "{defaults}", "at least 0"}},
     {"route_scale",
      {"factor of the weights of a token's experts ({families})", "{defaults}", "above 0"}},
     {"rms_norm_eps",
      {"the norms of rows are RMSNorms with this value instead of LayerNorms with `norm_epsilon` "
       "({families})",
       "none: LayerNorms", "above 0"}},
     {"expert_selection_fn",
      {"weights of a token's experts ({families}): the `softmax` of their logits, or the `sigmoid` "
       "of each, divided by the sum with `norm_topk_prob`",
       "`softmax`", "these"}},
     {"shared_expert_combination_strategy",
      {"`sum` or `average` of the shared expert and the sum of the others ({families})",
       "`average`", "these"}},
     {"index_topk_blocks",
      {"blocks of keys that sparse attention chooses for a query ({families}). Sequences have at "
       "most the tokens of these blocks",
       "{defaults}", "at least 1"}},
     {"index_block_size", {"keys in such a block ({families})", "{defaults}", "at least 1"}},
     {"linear_allow_neg_eigval",
      {"twice the step of the delta rule, so that its matrices may have negative eigenvalues "
       "({families})",
       "true", "true, false"}},
     {"attention_multiplier", {"factor of attention scores ({families})", "1", "above 0"}},
     {"residual_multiplier",
      {"factor of the results of attention and the MLP before they are added ({families})", "1",
       "above 0"}},
     {"logits_scaling", {"divides the logits ({families})", "1", "above 0"}},
     {"query_pre_attn_scalar",
      {"attention scores are divided by the square root of this value ({families}). Gemma 4 "
       "divides by 1, others by that of `head_dim`",
       "256", "above 0"}},
     {"attn_logit_softcapping",
      {"soft cap c of attention scores: a scaled score s becomes c tanh(s / c) ({families})",
       "none; folders without the key: 50", "above 0"}},
     {"final_logit_softcapping",
      {"soft cap of the logits ({families})",
       "none; gemma2's folders without the key: 30; muse_glimmer: 20", "above 0"}},
     {"output_multiplier",
      {"factor of the logits before their cap ({families})", "{defaults}", "above 0"}},
     {"qk_scale_factor",
      {"factor of the queries after their norm ({families})", "3.87", "above 0"}},
     {"post_norm_eps",
      {"`norm_epsilon` of the norms after attention and the MLP ({families})", "1e-8", "above 0"}},
     {"layer_rope_theta",
      {"list with one number per layer: 0 for a layer without rotary positions. The base of the "
       "others is `rope_theta`, as in transformers ({families})",
       "0 in every fourth layer, counted from the last", ""}},
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
      {"attention projections have biases ({families}). glm4_moe, solar_open, seed_oss: those of "
       "queries, keys and "
       "values; latent attention: the maps of the layer's input, except one of queries alone, and "
       "the last one",
       "{defaults}", "true, false"}},
     {"use_bias",
      {"all projections of the layers have biases ({families})", "false", "true, false"}},
     {"attention_out_bias",
      {"the map of the results of attention has a bias ({families})", "false", "true, false"}},
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
      {"share of each head that rotates ({families})", "{defaults}", "above 0, at most 1"}},
     {"sliding_window",
      {"tokens that attention sees, including the token itself; none: all ({families}). Families "
       "with `use_sliding_window` need that, too",
       "{defaults}", "at least 1; 0 (no window) if `use_sliding_window` is false"}},
     {"use_sliding_window",
      {"whether `sliding_window` has an effect ({families})", "false", "true, false"}},
     {"max_window_layers",
      {"first layer that has the window, counted from 0 (qwen2, qwen3); qwen2_moe: first layer "
       "without one, qwen3_moe: no effect, all layers have it",
       "28", ""}},
     {"sliding_window_pattern",
      {"every n-th layer has no window ({families})", "{defaults}", "at least 1"}},
     {"layer_types",
      {"list with one entry per layer: `full_attention` or `sliding_attention` ({families}). "
       "Families with `full_attention_interval` have other entries, see there; olmo_hybrid: "
       "`linear_attention` or `full_attention`; minimax_m3_vl_text: `full_attention` or "
       "`minimax_m3_sparse`; lfm2: "
       "`full_attention`, or `conv` for a [short convolution](models.md#short-convolutions)",
       "from the keys above; smollm3: a window in the layers without positions; olmo3, exaone4: "
       "none in "
       "every fourth layer; granite_swa, granitemoe_swa: none in every fourth layer, starting with "
       "the first; mellum, minimax_m3_vl_text: none; olmo_hybrid: attention in every fourth layer; "
       "muse_glimmer: none "
       "in every fourth layer, counted from the last; "
       "gemma4: none in every sixth layer and the last; gemma2, gpt_oss: a "
       "window in every other layer, starting with the first",
       ""}},
     {"full_attention_interval",
      {"every n-th layer has attention, the others a [gated delta net](models.md#gated-delta-nets) "
       "({families}). `model.layer_types`, a list of `linear_attention` and `full_attention`, "
       "overrides it",
       "4", "at least 1"}},
     {"linear_num_key_heads",
      {"heads of queries and of keys of a gated delta net ({families})",
       "16; olmo_hybrid: `num_heads`", "at least 1"}},
     {"linear_num_value_heads",
      {"heads of values of a gated delta net ({families})", "32; olmo_hybrid: `num_heads`",
       "a multiple of `linear_num_key_heads`; on device `cuda` of 8, too"}},
     {"linear_key_head_dim",
      {"width of a head of queries or keys of a gated delta net ({families})",
       "128; olmo_hybrid: 3/4 x hidden / `linear_num_key_heads`",
       "at least 1; on device `cuda` a multiple of 8, at most 256"}},
     {"linear_value_head_dim",
      {"width of a head of values of a gated delta net ({families})",
       "128; olmo_hybrid: 2 x `linear_key_head_dim`",
       "at least 1; on device `cuda` a multiple of 8, at most 256"}},
     {"linear_conv_kernel_dim",
      {"tokens that the convolution of a gated delta net reads for a token, including the token "
       "itself ({families})",
       "4", "1 to 8"}},
     {"full_attn_idxs",
      {"layers with attention, counted from 0, without `layer_types` ({families})", "all", ""}},
     {"conv_L_cache",
      {"tokens that a [short convolution](models.md#short-convolutions) reads for a token, "
       "including the token itself ({families})",
       "3", "1 to 8"}},
     {"conv_bias",
      {"short convolutions and their maps have biases ({families})", "false", "true, false"}},
     {"block_auto_adjust_ff_dim",
      {"the MLP is narrower than `intermediate_size`: two thirds of it, times the next key, up to "
       "a "
       "multiple of `block_multiple_of` ({families})",
       "true", "true, false"}},
     {"block_ffn_dim_multiplier",
      {"factor of the width of the MLP with `block_auto_adjust_ff_dim` ({families})", "1",
       "above 0"}},
     {"block_multiple_of",
      {"divides the width of the MLP with `block_auto_adjust_ff_dim` ({families})", "256",
       "at least 1"}},
     {"no_rope_layers",
      {"list with one entry per layer: 1 with, 0 without rotary positions ({families})",
       "from the next key", ""}},
     {"no_rope_layer_interval",
      {"every n-th layer has no rotary positions ({families})", "4", "at least 1"}},
     {"num_local_experts", {"experts per layer ({families})", "required", "1 to 4096"}},
     {"num_experts",
      {"experts per layer ({families}; gemma4 with `enable_moe_block`)", "required", "1 to 4096"}},
     {"num_experts_per_tok",
      {"experts per token (top-k) ({families})", "{defaults}", "1 to the number of experts"}},
     {"moe_intermediate_size",
      {"width of an expert's MLP ({families}; gemma4 needs it with `enable_moe_block`). Other "
       "families with experts have `intermediate_size`",
       "{defaults}", "at least 1"}},
     {"shared_expert_intermediate_size",
      {"width of the shared expert, which computes all tokens ({families})", "{defaults}",
       "at least 1"}},
     {"norm_topk_prob",
      {"normalise the weights of a token's experts to a sum of 1 ({families}). Mixtral, gpt-oss, "
       "MiniMax, Hy3, Trinity, ERNIE 4.5 and the mixtures of Qwen3.5 always do",
       "{defaults}", "true, false"}},
     {"n_routed_experts", {"experts per layer ({families})", "required", "1 to 4096"}},
     {"n_shared_experts",
      {"width of the shared expert, which computes all tokens, in multiples of "
       "`moe_intermediate_size` ({families})",
       "1", "at least 1"}},
     {"num_shared_experts",
      {"width of the shared expert, which computes all tokens, in multiples of "
       "`moe_intermediate_size`, cohere2_moe: of `intermediate_size` ({families})",
       "{defaults}", "at least 1; ernie4_5_moe, cohere2_moe: at least 0"}},
     {"moe_layer_start_index",
      {"first layer that may have experts, counted from 0 ({families})", "1", ""}},
     {"moe_layer_end_index",
      {"last layer that may have experts, counted from 0; -1: the last one ({families})", "-1",
       ""}},
     {"moe_layer_interval", {"every n-th layer may have experts ({families})", "1", "at least 1"}},
     {"moe_norm_min",
      {"lower bound of the sum by which the weights of a token's experts are divided ({families})",
       "1e-12", "at least 0"}},
     {"first_k_dense_replace",
      {"number of first layers with an MLP ({families}), without `mlp_layer_types`", "{defaults}",
       ""}},
     {"mlp_layer_types",
      {"list with one entry per layer: `dense` (an MLP) or `sparse` (experts) ({families})",
       "glm4_moe_lite, hy_v3: `dense`, then `sparse`; mellum, minimax_m3_vl_text: `sparse`; "
       "others: "
       "`first_k_dense_replace`",
       ""}},
     {"n_group",
      {"groups of consecutive experts ({families}), see [sigmoid "
       "routers](models.md#sigmoid-routers)",
       "{defaults}",
       "1 to 256, divides `n_routed_experts` into groups of at least 2; mistral4: 1"}},
     {"topk_group",
      {"groups from which the experts of a token are chosen ({families})", "{defaults}",
       "1 to `n_group`"}},
     {"routed_scaling_factor",
      {"factor of the weights of a token's experts ({families})", "{defaults}", "above 0"}},
     {"router_scaling_factor",
      {"factor of the weights of a token's experts ({families})", "2.826", "above 0"}},
     {"index_topk",
      {"tokens that sparse attention chooses for a query ({families}), see "
       "[sparse attention](models.md#latent-attention)",
       "2048", "at least `data.sequence_length`"}},
     {"use_qk_norm", {"norms of the query and key heads ({families})", "false", "true, false"}},
     {"swiglu_limit",
      {"limit of an expert's gate (from above) and up projection (on both sides) ({families}). "
       "minimax_m3_vl_text: also of an MLP's",
       "7", "above 0"}},
     {"swiglu_alpha", {"factor of the gate inside its sigmoid ({families})", "1.702", "above 0"}},
     {"decoder_sparse_step",
      {"every n-th layer has experts, the others an MLP ({families})", "1", "at least 1"}},
     {"mlp_only_layers", {"further layers with an MLP, counted from 0 ({families})", "none", ""}},
     {"output_router_logits",
      {"train with the load-balancing loss, as in Hugging Face's configs ({families})", "false",
       "true, false"}},
     {"router_aux_loss_coef",
      {"coefficient of the load-balancing loss ({families}). The loss covers the routers of all "
       "layers together, and all rows of a step (`ballast.router_losses`)",
       "{defaults}", "at least 0"}},
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

}  // namespace

KeyText text_of_key(std::string_view name) {
  const auto* const found = std::ranges::find(kTexts, name, &NamedText::name);
  return found == kTexts.end() ? KeyText{} : found->text;
}

}  // namespace ballast::model
