// Made by tools/dev/config_attributes.py from transformers 5.24.0. Do not edit.

#include <array>
#include <utility>

#include "ballast/model/family.h"

namespace ballast::model {
namespace {

using Row = std::pair<std::string_view, std::string_view>;
constexpr std::array<Row, 52> kRead = {{
    {"gpt2",
     "activation_function add_cross_attention attn_pdrop decoder embd_pdrop generator "
     "hidden_size is_causal layer_norm_epsilon max_position_embeddings n_embd n_head n_inner "
     "n_layer n_positions num_attention_heads num_hidden_layers per_layer_config "
     "reorder_and_upcast_attn resid_pdrop scale_attn_by_inverse_layer_idx scale_attn_weights "
     "text_config text_encoder tie_word_embeddings transformers_weights vocab_size"},
    {"llama",
     "attention_bias attention_dropout decoder generator head_dim hidden_act hidden_size "
     "intermediate_size is_causal max_position_embeddings mlp_bias num_attention_heads "
     "num_hidden_layers num_key_value_heads pad_token_id per_layer_config rms_norm_eps "
     "rope_parameters text_config text_encoder tie_word_embeddings transformers_weights "
     "vocab_size"},
    {"mistral",
     "attention_dropout decoder generator head_dim hidden_act hidden_size intermediate_size "
     "is_causal layer_types max_position_embeddings num_attention_heads num_hidden_layers "
     "num_key_value_heads pad_token_id per_layer_config rms_norm_eps rope_parameters "
     "sliding_window text_config text_encoder tie_word_embeddings transformers_weights "
     "vocab_size"},
    {"ministral3",
     "attention_dropout decoder generator head_dim hidden_act hidden_size intermediate_size "
     "is_causal layer_types max_position_embeddings num_attention_heads num_hidden_layers "
     "num_key_value_heads pad_token_id per_layer_config rms_norm_eps rope_parameters "
     "sliding_window text_config text_encoder tie_word_embeddings transformers_weights "
     "vocab_size"},
    {"qwen2",
     "attention_dropout decoder generator head_dim hidden_act hidden_size intermediate_size "
     "is_causal layer_types max_position_embeddings max_window_layers num_attention_heads "
     "num_hidden_layers num_key_value_heads pad_token_id per_layer_config rms_norm_eps "
     "rope_parameters rope_theta sliding_window text_config text_encoder tie_word_embeddings "
     "transformers_weights use_sliding_window vocab_size"},
    {"qwen3",
     "attention_bias attention_dropout decoder generator head_dim hidden_act hidden_size "
     "intermediate_size is_causal layer_types max_position_embeddings max_window_layers "
     "num_attention_heads num_hidden_layers num_key_value_heads pad_token_id per_layer_config "
     "rms_norm_eps rope_parameters sliding_window text_config text_encoder tie_word_embeddings "
     "transformers_weights use_sliding_window vocab_size"},
    {"smollm3",
     "attention_bias attention_dropout decoder generator head_dim hidden_act hidden_size "
     "intermediate_size is_causal layer_types max_position_embeddings mlp_bias "
     "no_rope_layer_interval no_rope_layers num_attention_heads num_hidden_layers "
     "num_key_value_heads pad_token_id per_layer_config rms_norm_eps rope_parameters "
     "sliding_window text_config text_encoder tie_word_embeddings transformers_weights "
     "use_sliding_window vocab_size"},
    {"phi3",
     "attention_dropout decoder generator head_dim hidden_act hidden_size intermediate_size "
     "is_causal max_position_embeddings num_attention_heads num_hidden_layers "
     "num_key_value_heads original_max_position_embeddings pad_token_id partial_rotary_factor "
     "per_layer_config resid_pdrop rms_norm_eps rope_parameters rope_theta sliding_window "
     "text_config text_encoder tie_word_embeddings transformers_weights vocab_size"},
    {"olmo2",
     "attention_bias attention_dropout decoder generator head_dim hidden_act hidden_size "
     "intermediate_size is_causal max_position_embeddings num_attention_heads "
     "num_hidden_layers num_key_value_heads pad_token_id per_layer_config rms_norm_eps "
     "rope_parameters text_config text_encoder tie_word_embeddings transformers_weights "
     "vocab_size"},
    {"olmo3",
     "attention_bias attention_dropout decoder generator head_dim hidden_act hidden_size "
     "intermediate_size is_causal layer_types max_position_embeddings num_attention_heads "
     "num_hidden_layers num_key_value_heads pad_token_id per_layer_config rms_norm_eps "
     "rope_parameters rope_theta sliding_window text_config text_encoder tie_word_embeddings "
     "transformers_weights vocab_size"},
    {"granite",
     "attention_bias attention_dropout attention_multiplier decoder embedding_multiplier "
     "generator head_dim hidden_act hidden_size intermediate_size is_causal logits_scaling "
     "max_position_embeddings mlp_bias num_attention_heads num_hidden_layers "
     "num_key_value_heads pad_token_id per_layer_config residual_multiplier rms_norm_eps "
     "rope_parameters text_config text_encoder tie_word_embeddings transformers_weights "
     "vocab_size"},
    {"granite_swa",
     "attention_bias attention_dropout attention_multiplier decoder embedding_multiplier "
     "generator head_dim hidden_act hidden_size intermediate_size is_causal layer_rope_theta "
     "layer_types logits_scaling max_position_embeddings mlp_bias num_attention_heads "
     "num_hidden_layers num_key_value_heads pad_token_id per_layer_config residual_multiplier "
     "rms_norm_eps rope_parameters sliding_window text_config text_encoder tie_word_embeddings "
     "transformers_weights vocab_size"},
    {"granitemoehybrid",
     "attention_bias attention_dropout attention_multiplier decoder embedding_multiplier "
     "generator head_dim hidden_act hidden_size intermediate_size is_causal layer_types "
     "layers_block_type logits_scaling mamba_chunk_size mamba_conv_bias mamba_d_conv "
     "mamba_d_head mamba_d_state mamba_expand mamba_n_groups mamba_n_heads mamba_proj_bias "
     "max_position_embeddings num_attention_heads num_experts_per_tok num_hidden_layers "
     "num_key_value_heads num_local_experts output_router_logits pad_token_id per_layer_config "
     "position_embedding_type residual_multiplier rms_norm_eps rope_parameters "
     "router_aux_loss_coef shared_intermediate_size text_config text_encoder "
     "tie_word_embeddings time_step_limit transformers_weights vocab_size"},
    {"arcee",
     "attention_bias attention_dropout decoder generator head_dim hidden_act hidden_size "
     "intermediate_size is_causal max_position_embeddings mlp_bias num_attention_heads "
     "num_hidden_layers num_key_value_heads pad_token_id per_layer_config rms_norm_eps "
     "rope_parameters text_config text_encoder tie_word_embeddings transformers_weights "
     "vocab_size"},
    {"lfm2",
     "block_auto_adjust_ff_dim block_ff_dim block_ffn_dim_multiplier block_multiple_of "
     "conv_L_cache conv_bias decoder full_attn_idxs generator head_dim hidden_size "
     "intermediate_size is_causal layer_types max_position_embeddings norm_eps "
     "num_attention_heads num_hidden_layers num_key_value_heads pad_token_id per_layer_config "
     "rope_parameters text_config text_encoder tie_embedding tie_word_embeddings "
     "transformers_weights vocab_size"},
    {"muse_glimmer_text",
     "attention_bias attention_dropout decoder generator head_dim hidden_activation "
     "hidden_size intermediate_size is_causal layer_rope_theta layer_types "
     "max_position_embeddings num_attention_heads num_hidden_layers num_key_value_heads "
     "pad_token_id per_layer_config post_norm_eps qk_scale_factor rms_norm_eps rope_parameters "
     "sliding_window text_config text_encoder tie_word_embeddings transformers_weights "
     "vocab_size"},
    {"seed_oss",
     "attention_bias attention_dropout attention_out_bias decoder generator head_dim "
     "hidden_act hidden_size intermediate_size is_causal max_position_embeddings mlp_bias "
     "num_attention_heads num_hidden_layers num_key_value_heads pad_token_id per_layer_config "
     "residual_dropout rms_norm_eps rope_parameters text_config text_encoder "
     "tie_word_embeddings transformers_weights vocab_size"},
    {"exaone4",
     "attention_dropout decoder generator head_dim hidden_act hidden_size intermediate_size "
     "is_causal layer_types max_position_embeddings num_attention_heads num_hidden_layers "
     "num_key_value_heads pad_token_id per_layer_config rms_norm_eps rope_parameters "
     "sliding_window sliding_window_pattern text_config text_encoder tie_word_embeddings "
     "transformers_weights vocab_size"},
    {"hunyuan_v1_dense",
     "attention_bias attention_dropout decoder generator head_dim hidden_act hidden_size "
     "intermediate_size is_causal max_position_embeddings num_attention_heads "
     "num_hidden_layers num_key_value_heads pad_token_id per_layer_config rms_norm_eps "
     "rope_parameters text_config text_encoder tie_word_embeddings transformers_weights "
     "vocab_size"},
    {"ernie4_5",
     "decoder generator head_dim hidden_act hidden_size intermediate_size is_causal "
     "max_position_embeddings num_attention_heads num_hidden_layers num_key_value_heads "
     "pad_token_id per_layer_config rms_norm_eps rope_parameters text_config text_encoder "
     "tie_word_embeddings transformers_weights use_bias vocab_size"},
    {"cohere2",
     "attention_bias attention_dropout decoder generator head_dim hidden_act hidden_size "
     "intermediate_size is_causal layer_norm_eps layer_types logit_scale "
     "max_position_embeddings num_attention_heads num_hidden_layers num_key_value_heads "
     "pad_token_id per_layer_config rope_parameters sliding_window sliding_window_pattern "
     "text_config text_encoder tie_word_embeddings transformers_weights vocab_size"},
    {"gemma2",
     "attention_bias attention_dropout attn_logit_softcapping decoder final_logit_softcapping "
     "generator head_dim hidden_activation hidden_size intermediate_size is_causal layer_types "
     "max_position_embeddings num_attention_heads num_hidden_layers num_key_value_heads "
     "pad_token_id per_layer_config query_pre_attn_scalar rms_norm_eps rope_parameters "
     "sliding_window text_config text_encoder tie_word_embeddings transformers_weights "
     "use_bidirectional_attention vocab_size"},
    {"gemma3_text",
     "_sliding_window_pattern attention_bias attention_dropout attn_logit_softcapping decoder "
     "final_logit_softcapping generator head_dim hidden_activation hidden_size "
     "intermediate_size is_causal layer_types max_position_embeddings num_attention_heads "
     "num_hidden_layers num_key_value_heads pad_token_id per_layer_config "
     "query_pre_attn_scalar rms_norm_eps rope_local_base_freq rope_parameters rope_theta "
     "sliding_window sliding_window_pattern text_config text_encoder tie_word_embeddings "
     "transformers_weights use_bidirectional_attention vocab_size"},
    {"gemma4_text",
     "attention_bias attention_dropout attention_k_eq_v decoder enable_moe_block "
     "final_logit_softcapping generator global_head_dim head_dim hidden_activation hidden_size "
     "hidden_size_per_layer_input intermediate_size is_causal layer_types "
     "max_position_embeddings moe_intermediate_size num_attention_heads num_experts "
     "num_global_key_value_heads num_hidden_layers num_key_value_heads num_kv_shared_layers "
     "pad_token_id per_layer_config rms_norm_eps rope_parameters sliding_window text_config "
     "text_encoder tie_word_embeddings top_k_experts transformers_weights "
     "use_bidirectional_attention use_double_wide_mlp vocab_size vocab_size_per_layer_input"},
    {"gpt_neox",
     "attention_bias attention_dropout decoder generator head_dim hidden_act hidden_dropout "
     "hidden_size intermediate_size is_causal layer_norm_eps max_position_embeddings "
     "num_attention_heads num_hidden_layers per_layer_config rope_parameters rotary_emb_base "
     "rotary_pct text_config text_encoder tie_word_embeddings transformers_weights "
     "use_parallel_residual vocab_size"},
    {"mixtral",
     "attention_dropout decoder generator head_dim hidden_act hidden_size intermediate_size "
     "is_causal max_position_embeddings num_attention_heads num_experts num_experts_per_tok "
     "num_hidden_layers num_key_value_heads num_local_experts output_router_logits "
     "pad_token_id per_layer_config rms_norm_eps rope_parameters router_aux_loss_coef "
     "router_jitter_noise sliding_window text_config text_encoder tie_word_embeddings "
     "transformers_weights vocab_size"},
    {"qwen2_moe",
     "attention_dropout decoder decoder_sparse_step generator head_dim hidden_act hidden_size "
     "intermediate_size is_causal layer_types max_position_embeddings max_window_layers "
     "mlp_only_layers moe_intermediate_size norm_topk_prob num_attention_heads num_experts "
     "num_experts_per_tok num_hidden_layers num_key_value_heads output_router_logits "
     "pad_token_id per_layer_config qkv_bias rms_norm_eps rope_parameters router_aux_loss_coef "
     "shared_expert_intermediate_size sliding_window text_config text_encoder "
     "tie_word_embeddings transformers_weights use_sliding_window vocab_size"},
    {"qwen3_moe",
     "attention_bias attention_dropout decoder decoder_sparse_step generator head_dim "
     "hidden_act hidden_size intermediate_size is_causal max_position_embeddings "
     "mlp_only_layers moe_intermediate_size norm_topk_prob num_attention_heads num_experts "
     "num_experts_per_tok num_hidden_layers num_key_value_heads num_local_experts "
     "output_router_logits pad_token_id per_layer_config rms_norm_eps rope_parameters "
     "router_aux_loss_coef sliding_window text_config text_encoder tie_word_embeddings "
     "transformers_weights use_sliding_window vocab_size"},
    {"olmoe",
     "attention_bias attention_dropout clip_qkv decoder generator head_dim hidden_act "
     "hidden_size intermediate_size is_causal max_position_embeddings norm_topk_prob "
     "num_attention_heads num_experts num_experts_per_tok num_hidden_layers "
     "num_key_value_heads num_local_experts output_router_logits pad_token_id per_layer_config "
     "rms_norm_eps rope_parameters router_aux_loss_coef sliding_window text_config "
     "text_encoder tie_word_embeddings transformers_weights vocab_size"},
    {"gpt_oss",
     "attention_bias attention_dropout decoder generator head_dim hidden_size "
     "intermediate_size is_causal layer_types max_position_embeddings num_attention_heads "
     "num_experts num_experts_per_tok num_hidden_layers num_key_value_heads num_local_experts "
     "output_router_logits pad_token_id per_layer_config rms_norm_eps rope_parameters "
     "router_aux_loss_coef sliding_window swiglu_alpha swiglu_limit text_config text_encoder "
     "tie_word_embeddings transformers_weights vocab_size"},
    {"mellum",
     "attention_bias attention_dropout decoder generator head_dim hidden_act hidden_size "
     "intermediate_size is_causal layer_types max_position_embeddings mlp_layer_types "
     "moe_intermediate_size mtp_layer_types mtp_mlp_layer_types norm_topk_prob "
     "num_attention_heads num_experts num_experts_per_tok num_hidden_layers "
     "num_key_value_heads num_local_experts num_mtp_layers num_nextn_predict_layers "
     "output_router_logits pad_token_id per_layer_config rms_norm_eps rope_parameters "
     "router_aux_loss_coef sliding_window text_config text_encoder tie_word_embeddings "
     "transformers_weights vocab_size"},
    {"ernie4_5_moe",
     "decoder generator head_dim hidden_act hidden_size intermediate_size is_causal "
     "max_position_embeddings moe_intermediate_size moe_k moe_layer_end_index "
     "moe_layer_interval moe_layer_start_index moe_norm_min moe_num_experts "
     "moe_num_shared_experts num_attention_heads num_experts num_experts_per_tok "
     "num_hidden_layers num_key_value_heads output_router_logits pad_token_id per_layer_config "
     "rms_norm_eps rope_parameters router_aux_loss_coef text_config text_encoder "
     "tie_word_embeddings transformers_weights use_bias vocab_size"},
    {"granitemoe_swa",
     "attention_bias attention_dropout attention_multiplier decoder embedding_multiplier "
     "generator head_dim hidden_act hidden_size intermediate_size is_causal layer_rope_theta "
     "layer_types logits_scaling max_position_embeddings num_attention_heads "
     "num_experts_per_tok num_hidden_layers num_key_value_heads num_local_experts "
     "output_router_logits pad_token_id per_layer_config residual_multiplier rms_norm_eps "
     "rope_parameters router_aux_loss_coef shared_intermediate_size sliding_window text_config "
     "text_encoder tie_word_embeddings transformers_weights vocab_size"},
    {"glm4_moe",
     "attention_bias attention_dropout decoder first_k_dense_replace generator head_dim "
     "hidden_act hidden_size intermediate_size is_causal max_position_embeddings "
     "moe_intermediate_size n_group n_routed_experts n_shared_experts norm_topk_prob "
     "num_attention_heads num_experts_per_tok num_hidden_layers num_key_value_heads "
     "num_local_experts num_mtp_layers num_nextn_predict_layers pad_token_id "
     "partial_rotary_factor per_layer_config rms_norm_eps rope_parameters "
     "routed_scaling_factor text_config text_encoder tie_word_embeddings topk_group "
     "transformers_weights use_qk_norm vocab_size"},
    {"minimax_m2",
     "attention_dropout decoder generator head_dim hidden_act hidden_size intermediate_size "
     "is_causal max_position_embeddings num_attention_heads num_experts num_experts_per_tok "
     "num_hidden_layers num_key_value_heads num_local_experts output_router_logits "
     "pad_token_id partial_rotary_factor per_layer_config rms_norm_eps rope_parameters "
     "rotary_dim router_aux_loss_coef router_jitter_noise text_config text_encoder "
     "tie_word_embeddings transformers_weights vocab_size"},
    {"solar_open",
     "attention_bias attention_dropout decoder generator head_dim hidden_act hidden_size "
     "intermediate_size is_causal max_position_embeddings moe_intermediate_size n_group "
     "n_routed_experts n_shared_experts norm_topk_prob num_attention_heads num_experts_per_tok "
     "num_hidden_layers num_key_value_heads num_local_experts pad_token_id per_layer_config "
     "rms_norm_eps rope_parameters routed_scaling_factor text_config text_encoder "
     "tie_word_embeddings topk_group transformers_weights vocab_size"},
    {"hy_v3",
     "attention_bias attention_dropout decoder enable_moe_fp32_combine generator head_dim "
     "hidden_act hidden_size intermediate_size is_causal max_position_embeddings mlp_bias "
     "mlp_layer_types moe_intermediate_size num_attention_heads num_experts "
     "num_experts_per_tok num_hidden_layers num_key_value_heads num_local_experts "
     "num_shared_experts pad_token_id per_layer_config rms_norm_eps rope_parameters "
     "router_scaling_factor text_config text_encoder tie_word_embeddings transformers_weights "
     "vocab_size"},
    {"afmoe",
     "attention_bias attention_dropout decoder generator global_attn_every_n_layers head_dim "
     "hidden_act hidden_size intermediate_size is_causal layer_types max_position_embeddings "
     "moe_intermediate_size mup_enabled num_attention_heads num_dense_layers num_experts "
     "num_experts_per_tok num_hidden_layers num_key_value_heads num_shared_experts "
     "output_router_logits pad_token_id per_layer_config rms_norm_eps rope_parameters "
     "route_scale sliding_window text_config text_encoder tie_word_embeddings "
     "transformers_weights vocab_size"},
    {"cohere2_moe",
     "attention_bias attention_dropout decoder expert_selection_fn first_k_dense_replace "
     "generator head_dim hidden_act hidden_size intermediate_size is_causal layer_norm_eps "
     "layer_types logit_scale max_position_embeddings mlp_layer_types norm_topk_prob "
     "num_attention_heads num_experts num_experts_per_tok num_hidden_layers "
     "num_key_value_heads num_shared_experts pad_token_id per_layer_config "
     "prefix_dense_intermediate_size prefix_dense_sliding_window_pattern rms_norm_eps "
     "rope_parameters shared_expert_combination_strategy sliding_window sliding_window_pattern "
     "text_config text_encoder tie_word_embeddings transformers_weights vocab_size"},
    {"minimax_m3_vl_text",
     "attention_dropout decoder dense_intermediate_size generator head_dim hidden_size "
     "index_block_size index_head_dim index_local_blocks index_n_heads index_topk_blocks "
     "intermediate_size is_causal layer_types max_position_embeddings mlp_layer_types "
     "moe_layer_freq num_attention_heads num_experts num_experts_per_tok num_hidden_layers "
     "num_key_value_heads num_local_experts output_router_logits pad_token_id per_layer_config "
     "rms_norm_eps rope_parameters routed_scaling_factor router_aux_loss_coef "
     "shared_intermediate_size sparse_attention_config swiglu_alpha swiglu_limit text_config "
     "text_encoder tie_word_embeddings transformers_weights vocab_size"},
    {"deepseek_v3",
     "attention_bias attention_dropout decoder first_k_dense_replace generator head_dim "
     "hidden_act hidden_size intermediate_size is_causal kv_lora_rank max_position_embeddings "
     "moe_intermediate_size n_group n_routed_experts n_shared_experts norm_topk_prob "
     "num_attention_heads num_experts_per_tok num_hidden_layers num_key_value_heads "
     "num_local_experts num_mtp_layers num_nextn_predict_layers pad_token_id per_layer_config "
     "q_lora_rank qk_nope_head_dim qk_rope_head_dim rms_norm_eps rope_interleave "
     "rope_parameters routed_scaling_factor text_config text_encoder tie_word_embeddings "
     "topk_group transformers_weights v_head_dim vocab_size"},
    {"glm4_moe_lite",
     "attention_bias attention_dropout decoder generator head_dim hidden_act hidden_size "
     "intermediate_size is_causal kv_lora_rank max_position_embeddings mlp_layer_types "
     "moe_intermediate_size n_group n_routed_experts n_shared_experts norm_topk_prob "
     "num_attention_heads num_experts_per_tok num_hidden_layers num_key_value_heads "
     "num_local_experts pad_token_id per_layer_config q_lora_rank qk_nope_head_dim "
     "qk_rope_head_dim rms_norm_eps rope_interleave rope_parameters routed_scaling_factor "
     "text_config text_encoder tie_word_embeddings topk_group transformers_weights v_head_dim "
     "vocab_size"},
    {"deepseek_v32",
     "attention_bias attention_dropout decoder first_k_dense_replace generator head_dim "
     "hidden_act hidden_size index_head_dim index_n_heads index_topk intermediate_size "
     "is_causal kv_lora_rank layer_types max_position_embeddings mlp_layer_types "
     "moe_intermediate_size n_group n_routed_experts n_shared_experts norm_topk_prob "
     "num_attention_heads num_experts num_experts_per_tok num_hidden_layers "
     "num_key_value_heads num_local_experts pad_token_id per_layer_config q_lora_rank "
     "qk_nope_head_dim qk_rope_head_dim rms_norm_eps rope_parameters routed_scaling_factor "
     "text_config text_encoder tie_word_embeddings topk_group transformers_weights v_head_dim "
     "vocab_size"},
    {"glm_moe_dsa",
     "attention_bias attention_dropout decoder first_k_dense_replace generator head_dim "
     "hidden_act hidden_size index_head_dim index_n_heads index_skip_topk_offset index_topk "
     "index_topk_freq index_topk_pattern indexer_types intermediate_size is_causal "
     "kv_lora_rank layer_types max_position_embeddings mlp_layer_types moe_intermediate_size "
     "n_group n_routed_experts n_shared_experts norm_topk_prob num_attention_heads num_experts "
     "num_experts_per_tok num_hidden_layers num_key_value_heads num_local_experts pad_token_id "
     "per_layer_config q_lora_rank qk_nope_head_dim qk_rope_head_dim rms_norm_eps "
     "rope_parameters routed_scaling_factor text_config text_encoder tie_word_embeddings "
     "topk_group transformers_weights v_head_dim vocab_size"},
    {"mistral4",
     "attention_bias attention_dropout decoder first_k_dense_replace generator head_dim "
     "hidden_act hidden_size intermediate_size is_causal kv_lora_rank max_position_embeddings "
     "moe_intermediate_size n_group n_routed_experts n_shared_experts norm_topk_prob "
     "num_attention_heads num_experts_per_tok num_hidden_layers num_key_value_heads "
     "num_local_experts pad_token_id per_layer_config q_lora_rank qk_nope_head_dim "
     "qk_rope_head_dim rms_norm_eps rope_interleave rope_parameters routed_scaling_factor "
     "text_config text_encoder tie_word_embeddings topk_group transformers_weights v_head_dim "
     "vocab_size"},
    {"qwen3_5_text",
     "attention_bias attention_dropout decoder full_attention_interval generator head_dim "
     "hidden_act hidden_size intermediate_size is_causal layer_types linear_conv_kernel_dim "
     "linear_key_head_dim linear_num_key_heads linear_num_value_heads linear_value_head_dim "
     "max_position_embeddings num_attention_heads num_hidden_layers num_key_value_heads "
     "pad_token_id partial_rotary_factor per_layer_config rms_norm_eps rope_parameters "
     "text_config text_encoder tie_word_embeddings transformers_weights vocab_size"},
    {"qwen3_5_moe_text",
     "attention_bias attention_dropout decoder full_attention_interval generator head_dim "
     "hidden_act hidden_size is_causal layer_types linear_conv_kernel_dim linear_key_head_dim "
     "linear_num_key_heads linear_num_value_heads linear_value_head_dim "
     "max_position_embeddings moe_intermediate_size num_attention_heads num_experts "
     "num_experts_per_tok num_hidden_layers num_key_value_heads output_router_logits "
     "pad_token_id partial_rotary_factor per_layer_config rms_norm_eps rope_parameters "
     "router_aux_loss_coef shared_expert_intermediate_size text_config text_encoder "
     "tie_word_embeddings transformers_weights vocab_size"},
    {"qwen3_next",
     "attention_bias attention_dropout decoder decoder_sparse_step full_attention_interval "
     "generator head_dim hidden_act hidden_size intermediate_size is_causal layer_types "
     "linear_conv_kernel_dim linear_key_head_dim linear_num_key_heads linear_num_value_heads "
     "linear_value_head_dim max_position_embeddings mlp_only_layers moe_intermediate_size "
     "norm_topk_prob num_attention_heads num_experts num_experts_per_tok num_hidden_layers "
     "num_key_value_heads output_router_logits pad_token_id partial_rotary_factor "
     "per_layer_config rms_norm_eps rope_parameters router_aux_loss_coef "
     "shared_expert_intermediate_size text_config text_encoder tie_word_embeddings "
     "transformers_weights vocab_size"},
    {"olmo_hybrid",
     "attention_bias attention_dropout decoder generator head_dim hidden_act hidden_size "
     "intermediate_size is_causal layer_types linear_a_log_max linear_a_log_min "
     "linear_allow_neg_eigval linear_conv_kernel_dim linear_dt_init_floor linear_dt_max "
     "linear_dt_min linear_key_head_dim linear_num_key_heads linear_num_value_heads "
     "linear_value_head_dim max_position_embeddings num_attention_heads num_hidden_layers "
     "num_key_value_heads pad_token_id per_layer_config rms_norm_eps rope_parameters "
     "text_config text_encoder tie_word_embeddings transformers_weights vocab_size"},
    {"bitsandbytes",
     "bnb_4bit_compute_dtype bnb_4bit_quant_storage bnb_4bit_quant_type "
     "bnb_4bit_use_double_quant llm_int8_enable_fp32_cpu_offload llm_int8_has_fp16_weight "
     "llm_int8_skip_modules llm_int8_threshold load_in_4bit load_in_8bit quant_method"},
    {"fp8",
     "activation_scheme dequantize expert_dtype modules_to_convert modules_to_not_convert "
     "quant_method scale_fmt weight_block_size"},
    {"mxfp4", "dequantize modules_to_not_convert quant_method"},
}};

}  // namespace

std::optional<std::string_view> read_attributes(std::string_view model_type) {
  for (const auto& [type, names] : kRead) {
    if (type == model_type) return names;
  }
  return {};
}

}  // namespace ballast::model
