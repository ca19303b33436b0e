#!/usr/bin/env python3
"""Runs small random models of each family in transformers and writes what they compute.

    python tests/data/make_family_fixtures.py [OUTPUT_FOLDER [CASE...]]

Needs torch, transformers, safetensors and numpy; the build and the tests do not. It writes into
families/ beside this script (or OUTPUT_FOLDER):

    NAME.safetensors   fp32: the initial weights under transformers' names; gradient.X of the loss
                       of the first batch; final.X after the last step; logits [SEQ, T, VOCAB] of the
                       first batch
    NAME.json          `model` (keys of Ballast's model section), tokens and targets, `loss` of each
                       step and `grad_norm`; `bf16`: what transformers computes in bf16 from the
                       first batch, with each of its attentions, as `loss` and as the larger
                       relative error against fp32 (L2) of the logits and of each gradient
                       `packed`: `loss` of the steps when each sequence is two documents
                       (`documents`: their lengths) and not all targets count (`counts`), and of the
                       first gradients `norm` and `projection`, see project(); their logits are the
                       tensor packed.logits
    rotary.json        frequencies and factor of each type of rope_scaling

Step i trains on batch i with torch.optim.AdamW (weight decay on every parameter), without clipping.
The loss is the mean cross-entropy of all tokens, logits in fp32.

Mixtures of experts train on this loss + router_aux_loss_coef * auxiliary loss, as transformers does
with output_router_logits. `loss` is still the cross-entropy alone and `aux_loss` the auxiliary loss
without its coefficient; gradients and `grad_norm` are those of the whole. With E experts, of which a
token takes k, and N rows of router logits (the tokens of all layers that have a router, together):

    aux_loss = E * sum over the experts e of f[e] * P[e]
    f[e] = choices of e / N, a constant for the gradient; the sum of all is k
    P[e] = mean over the N rows of softmax(all E router logits)[e]

Every token counts in it, as no attention mask is given: in `packed` also those whose target does not
count; the two sequences are one batch. `expert_tokens` [layer][expert] counts the choices of the
first batch; a layer without a router has an empty list. Each expert has its own tensors, as in
folders of save_pretrained(); experts of GPT-OSS and Mistral 4 are stacked there, too: then `norm` and `projection`
have NAME[EXPERT], and errors are the largest of an expert. The first batch's tokens and
the seeds of the weights are such that bf16 does not change choices and that some experts get no token.

torch.topk() may take any of equal values; here an expert of lower index goes first.
"""

import copy
import json
import pathlib
import re
import sys
import tempfile

import numpy
import safetensors.torch
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from expert_routing import (
    auxiliary_loss, choices, choose_inputs, count_choices, has_auxiliary_loss, is_gemma,
    is_mixture, lowest_of_equals, make_corrections, route, run_model, uses_sigmoids)

STEPS, SEQ, T, VOCAB = 10, 2, 37, 61
# Each sequence has a document on either side of the trained length of LONGROPE and DYNAMIC.
DOCUMENTS = [[12, 25], [26, 11]]
OPTIMIZER = {"lr": 3e-3, "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0.1}
SHAPE = {"vocab_size": VOCAB, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 7,
         "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 40,
         "max_position_embeddings": 48, "rms_norm_eps": 1e-6}
OWN_NAMES = {"num_hidden_layers": "num_layers", "num_attention_heads": "num_heads",
             "num_key_value_heads": "num_kv_heads", "max_position_embeddings": "max_sequence",
             "rms_norm_eps": "norm_epsilon", "layer_norm_eps": "norm_epsilon", "norm_eps": "norm_epsilon",
             "tie_word_embeddings": "tie_embeddings", "moe_num_experts": "num_experts",
             "moe_k": "num_experts_per_tok", "moe_num_shared_experts": "num_shared_experts"}

# Keys of transformers' config besides SHAPE; `rope` is its rope_parameters.
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
            "short_factor": [1.0, 1.1, 1.2, 1.4], "long_factor": [1.1, 2.0, 5.0, 9.0],
            "original_max_position_embeddings": 24}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 3.0}
GEMMA_GLOBAL = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}
GEMMA4_ROPE = {"full_attention": {"rope_type": "proportional", "rope_theta": 5000.0,
                                  "partial_rotary_factor": 0.5},
               "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}
GEMMA4 = {"type": "gemma4_text", "hidden_size": 40, "num_hidden_layers": 3, "head_dim": 10,
          "sliding_window": 9, "hidden_size_per_layer_input": 0, "tie_word_embeddings": True,
          "layer_types": ["sliding_attention", "full_attention", "full_attention"],
          "rope": GEMMA4_ROPE, "own_rope": {"rope_scaling": GEMMA4_ROPE["full_attention"],
                                            "rope_local_base_freq": 100.0}}
NEOX = {"type": "gpt_neox", "hidden_size": 48, "num_attention_heads": 3, "layer_norm_eps": 1e-5,
        "without": ["num_key_value_heads", "head_dim", "rms_norm_eps"]}
YARN = {"rope_type": "yarn", "rope_theta": 1500.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "truncate": False, "original_max_position_embeddings": 12}
YARN_OF_ARCEE = {**YARN, "truncate": True}
PLAIN_LOCAL = {"rope_type": "default", "rope_theta": 100.0}
# transformers reads `truncate` outside of the types of layers.
YARN_GLOBAL = {key: value for key, value in YARN.items() if key != "truncate"}
MINISTRAL = {**YARN, "truncate": True, "mscale": 1.3, "mscale_all_dim": 0.7, "llama_4_scaling_beta": 0.6}
# Heads of values are narrower than those of keys.
LATENT = {"type": "deepseek_v3", "without": ["head_dim"], "hidden_size": 40, "num_attention_heads": 3,
          "num_key_value_heads": 3, "first_k_dense_replace": 2, "rope": {**YARN, "truncate": True,
          "mscale": 1.3, "mscale_all_dim": 0.7}}
SPARSE = {"without": ["head_dim"], "num_attention_heads": 3, "num_key_value_heads": 3,
          "qk_rope_head_dim": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
          "n_shared_experts": 1, "routed_scaling_factor": 1.5, "index_head_dim": 8, "index_n_heads": 2}
EXPERTS = {"num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.1}
MIXTRAL = {**EXPERTS, "type": "mixtral", "num_local_experts": 5, "intermediate_size": 24, "rope": PLAIN}
# The limit is so low that the gate clamps a part of what it gets.
GPT_OSS = {**EXPERTS, "type": "gpt_oss", "num_local_experts": 4, "intermediate_size": 24,
           "attention_bias": True, "sliding_window": 9, "swiglu_limit": 0.9, "rms_norm_eps": 1e-5,
           "layer_types": ["sliding_attention", "full_attention"], "rope": YARN}
GLM4_MOE = {"type": "glm4_moe", "num_experts_per_tok": 3, "moe_intermediate_size": 16,
            "rope": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5},
            "own_rope": {"rope_theta": 1000.0, "partial_rotary_factor": 0.5}}
INDEXER = ".self_attn.indexer."
# Three chunks of the recurrence and one row. Documents end inside a chunk, at its edge, and one token
# after it.
DELTA = {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 3, "head_dim": 16,
         "layer_types": ["linear_attention", "full_attention", "linear_attention"],
         "linear_num_key_heads": 3, "linear_num_value_heads": 6, "linear_key_head_dim": 10,
         "linear_value_head_dim": 14, "linear_conv_kernel_dim": 4, "length": 193,
         "documents": [[30, 98, 65], [65, 100, 28]],
         "rope": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.25},
         "own_rope": {"rope_theta": 1000.0, "partial_rotary_factor": 0.25}}
# Widths that GPUs support.
DELTA_ON_GPUS = {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 8,
                 "linear_value_head_dim": 16}
SHORT_DELTA = {**DELTA, **EXPERTS, "num_hidden_layers": 2, "num_experts": 5, "length": 37, "documents": [[12, 25], [26, 11]],
               "layer_types": ["linear_attention", "full_attention"]}
# Of the cases, not of the configs. `seed`: of the weights; `routing`: see route().
OF_CASES = ("type", "without", "rope", "own_rope", "seed", "routing", "length", "documents")
CASES = {
    "llama": {"hidden_size": 56, "attention_bias": True, "mlp_bias": True, "rope": LLAMA3},
    "mistral": {"sliding_window": 11, "rope": PLAIN},
    "granite": {"without": ["head_dim"], "num_attention_heads": 3, "attention_multiplier": 0.23,
                "residual_multiplier": 0.35, "embedding_multiplier": 3.0, "logits_scaling": 1.7,
                "tie_word_embeddings": True, "rope": PLAIN},
    "arcee": {"hidden_size": 56, "attention_bias": True, "mlp_bias": True, "rope": YARN_OF_ARCEE},
    "seed_oss": {"hidden_size": 56, "attention_bias": True, "attention_out_bias": False,
                 "attention_dropout": 0.0, "residual_dropout": 0.0, "rope": LLAMA3, "seed": 6},
    "hunyuan_v1_dense": {"hidden_size": 56, "attention_bias": True,
                         "rope": {"rope_type": "dynamic", "rope_theta": 500.0, "alpha": 7.0,
                                  "factor": 1.0},
                         "own_rope": {"rope_theta": 500.0, "rope_scaling": {
                             "rope_type": "dynamic", "alpha": 7.0}}},
    "ernie4_5": {"hidden_size": 56, "use_bias": True, "tie_word_embeddings": True, "rope": LLAMA3},
    # All layers have other positions, and one of them has none.
    "granite_swa": {"without": ["head_dim"], "num_hidden_layers": 3, "num_attention_heads": 3,
                    "attention_multiplier": 0.23, "residual_multiplier": 0.35,
                    "embedding_multiplier": 3.0, "logits_scaling": 1.7, "attention_bias": True,
                    "sliding_window": 9, "layer_types": ["full_attention", *2 * ["sliding_attention"]],
                    "layer_rope_theta": [0.0, 100.0, 5000.0], "tie_word_embeddings": True,
                    "rope": YARN_OF_ARCEE},
    "granitemoe_swa": {**EXPERTS, "without": ["head_dim"], "num_attention_heads": 3,
                       "attention_multiplier": 0.23, "residual_multiplier": 0.35,
                       "embedding_multiplier": 3.0, "logits_scaling": 1.7, "num_local_experts": 5,
                       "intermediate_size": 24, "shared_intermediate_size": 16,
                       "sliding_window": 9, "layer_types": ["full_attention", "sliding_attention"],
                       "rope": PLAIN, "seed": 3},
    "granitemoehybrid": {"without": ["head_dim"], "num_attention_heads": 3,
                         "attention_multiplier": 0.23, "residual_multiplier": 0.35,
                         "embedding_multiplier": 3.0, "logits_scaling": 1.7,
                         "num_local_experts": 0, "shared_intermediate_size": 40,
                         "layer_types": ["full_attention"] * 2, "mamba_n_heads": 6,
                         "mamba_d_head": 8, "rope": PLAIN, "own_rope": {}},
    "cohere2": {"without": ["head_dim", "rms_norm_eps"], "num_hidden_layers": 3,
                "num_attention_heads": 3, "layer_norm_eps": 1e-5,
                "logit_scale": 0.3, "sliding_window": 9, "tie_word_embeddings": True,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
                "rope": {"rope_type": "default", "rope_theta": 500.0}},
    "exaone4": {"hidden_size": 56, "num_hidden_layers": 3, "sliding_window": 9,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
                "rope": LLAMA3},
    "lfm2": {"without": ["head_dim", "rms_norm_eps"], "num_hidden_layers": 3, "num_attention_heads": 3,
             "norm_eps": 1e-5, "layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3,
             "block_auto_adjust_ff_dim": True, "block_ffn_dim_multiplier": 1.1, "block_multiple_of": 8,
             "tie_word_embeddings": True, "rope": PLAIN},
    # Sequences of several stretches, with documents that end inside of them and at their edges.
    "lfm2_biases": {"type": "lfm2", "without": ["head_dim", "rms_norm_eps"], "num_attention_heads": 3,
                    "norm_eps": 1e-5, "full_attn_idxs": [1], "conv_L_cache": 4, "conv_bias": True,
                    "block_auto_adjust_ff_dim": False, "length": 193,
                    "documents": [[30, 98, 65], [64, 1, 128]], "rope": PLAIN},
    # The cap is so low that it bends the logits of these weights.
    "muse_glimmer": {"type": "muse_glimmer_text", "num_hidden_layers": 5, "num_attention_heads": 6,
                     "num_key_value_heads": 2, "sliding_window": 9, "qk_scale_factor": 1.7,
                     "output_multiplier": 0.6, "final_logit_softcapping": 2.0, "post_norm_eps": 1e-3,
                     "rope": {"rope_type": "default", "rope_theta": 1000.0}},
    "qwen2": {"tie_word_embeddings": True, "rope": {"rope_type": "default", "rope_theta": 1000.0}},
    "qwen3": {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1, "rope": PLAIN},
    "smollm3": {"num_hidden_layers": 3, "no_rope_layers": [1, 0, 1], "use_sliding_window": True,
                "sliding_window": 20, "tie_word_embeddings": True,
                "rope": PLAIN},
    "phi3": {"hidden_size": 48, "num_attention_heads": 3, "head_dim": 16, "sliding_window": None, "original_max_position_embeddings": 24,
             "rope": LONGROPE},
    "olmo2": {"hidden_size": 56, "max_position_embeddings": 20, "rope": DYNAMIC},
    "olmo3": {"hidden_size": 56, "num_hidden_layers": 3, "sliding_window": 9,
              "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
              "rope": {"full_attention": YARN_GLOBAL, "sliding_attention": PLAIN_LOCAL},
              "own_rope": {"rope_scaling": YARN_GLOBAL, "rope_local_base_freq": 100.0}},
    # Documents on both sides of the length after which queries grow.
    "ministral3": {"hidden_size": 40, "head_dim": 10, "rope": MINISTRAL},
    # The caps are so low that they bend the scores and logits of these weights.
    "gemma2": {"hidden_size": 56, "num_hidden_layers": 3, "head_dim": 16, "sliding_window": 9,
               "query_pre_attn_scalar": 24, "attn_logit_softcapping": 2.0,
               "final_logit_softcapping": 3.0, "tie_word_embeddings": True,
               "rope": {"rope_type": "default", "rope_theta": 1000.0}},
    "gemma3": {"type": "gemma3_text", "hidden_size": 56, "num_hidden_layers": 3, "head_dim": 16,
               "sliding_window": 9, "sliding_window_pattern": 2, "query_pre_attn_scalar": 24,
               "tie_word_embeddings": True,
               "rope": {"full_attention": GEMMA_GLOBAL,
                        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}},
               "own_rope": {"rope_scaling": GEMMA_GLOBAL, "rope_local_base_freq": 100.0}},
    # Widths and numbers of heads differ by type of layer. Half of the pairs of the wide heads turn.
    "gemma4": {**GEMMA4, "head_dim": 16, "num_attention_heads": 6, "num_key_value_heads": 3,
               "num_global_key_value_heads": 2, "global_head_dim": 24, "attention_k_eq_v": True,
               "final_logit_softcapping": 3.0},
    "gemma4_separate_values": {**GEMMA4, "num_attention_heads": 4, "num_key_value_heads": 2,
                               "global_head_dim": 6, "attention_bias": True},
    "gemma4_experts": {**GEMMA4, "num_attention_heads": 4, "num_key_value_heads": 4,
                       "head_dim": 16, "num_global_key_value_heads": 2, "global_head_dim": 24,
                       "attention_k_eq_v": True, "enable_moe_block": True, "num_experts": 7,
                       "top_k_experts": 3, "moe_intermediate_size": 24, "seed": 21},
    # The last layer reads keys of the one before it. Widths that GPUs support.
    "gemma4_shared_keys": {**GEMMA4, "layer_types": ["sliding_attention", *2 * ["full_attention"]],
                           "head_dim": 16, "num_attention_heads": 6, "num_key_value_heads": 3,
                           "num_global_key_value_heads": 2, "global_head_dim": 24,
                           "attention_k_eq_v": True, "num_kv_shared_layers": 1,
                           "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB,
                           "final_logit_softcapping": 3.0},
    "gemma4_layer_inputs": {**GEMMA4, "layer_types": ["sliding_attention", *2 * ["full_attention"]],
                            "num_attention_heads": 4, "num_key_value_heads": 2,
                            "global_head_dim": 6, "num_kv_shared_layers": 1,
                            "use_double_wide_mlp": True, "hidden_size_per_layer_input": 9,
                            "vocab_size_per_layer_input": 67, "final_logit_softcapping": 3.0,
                            "seed": 2},
    "gpt_neox": {**NEOX, "rope": {"rope_type": "default", "rope_theta": 1000.0,
                                  "partial_rotary_factor": 0.5},
                 "own_rope": {"rope_theta": 1000.0, "partial_rotary_factor": 0.5}},
    "gpt_neox_sequential": {**NEOX, "use_parallel_residual": False, "hidden_act": "gelu_new",
                            "attention_bias": False, "tie_word_embeddings": True,
                            "rope": {"rope_type": "default"}, "own_rope": {}},
    "deepseek_v3": {**LATENT, "q_lora_rank": 18, "kv_lora_rank": 14, "qk_nope_head_dim": 10,
                    "qk_rope_head_dim": 6, "v_head_dim": 12, "attention_bias": True},
    # This and the following cases have widths that GPUs support.
    "deepseek_v3_plain_queries": {**LATENT, "q_lora_rank": None, "kv_lora_rank": 24,
                                  "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
                                  "rope_interleave": False},
    "mixtral": {**MIXTRAL, "sliding_window": 11, "seed": 1},
    "mixtral_ties": {**MIXTRAL, "routing": "ties", "seed": 6},
    "mixtral_one": {**MIXTRAL, "routing": "one", "seed": 4},
    "qwen3_moe": {**EXPERTS, "num_hidden_layers": 3, "num_experts": 7, "num_experts_per_tok": 3,
                  "norm_topk_prob": True, "intermediate_size": 40, "moe_intermediate_size": 16,
                  "mlp_only_layers": [1], "router_aux_loss_coef": 0.2, "rope": PLAIN, "seed": 5},
    "qwen3_moe_unnormalised": {**EXPERTS, "type": "qwen3_moe", "num_experts": 5,
                               "norm_topk_prob": False, "moe_intermediate_size": 24,
                               "decoder_sparse_step": 1, "tie_word_embeddings": True, "rope": PLAIN,
                               "seed": 5},
    "olmoe": {**EXPERTS, "num_attention_heads": 3, "num_experts": 6, "norm_topk_prob": False,
              "intermediate_size": 24, "clip_qkv": None, "rope": PLAIN, "seed": 4},
    "qwen2_moe": {**EXPERTS, "num_experts": 5, "norm_topk_prob": False, "moe_intermediate_size": 16,
                  "shared_expert_intermediate_size": 40, "rope": PLAIN, "seed": 4},
    "gpt_oss": {**GPT_OSS, "seed": 3},
    "gpt_oss_ties": {**GPT_OSS, "num_local_experts": 5, "routing": "ties", "seed": 2},
    "glm4_moe": {**GLM4_MOE, "num_hidden_layers": 3, "n_routed_experts": 9, "n_group": 3, "topk_group": 2,
                 "n_shared_experts": 2, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5,
                 "norm_topk_prob": True, "use_qk_norm": True, "attention_bias": True, "seed": 4},
    "glm4_moe_ties": {**GLM4_MOE, "n_routed_experts": 5, "num_experts_per_tok": 2,
                      "n_shared_experts": 1, "first_k_dense_replace": 0, "norm_topk_prob": False,
                      "routed_scaling_factor": 0.7, "routing": "ties", "seed": 1},
    "deepseek_v3_experts": {**LATENT, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 24,
                            "qk_nope_head_dim": 8, "qk_rope_head_dim": 16, "v_head_dim": 8,
                            "num_experts_per_tok": 3, "moe_intermediate_size": 16,
                            "n_routed_experts": 9, "n_group": 3, "topk_group": 2,
                            "n_shared_experts": 2, "routed_scaling_factor": 1.5, "seed": 4},
    "glm4_moe_lite": {"without": ["head_dim"], "hidden_size": 40, "num_attention_heads": 3,
                      "num_key_value_heads": 3, "q_lora_rank": 24, "kv_lora_rank": 16,
                      "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 24,
                      "mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2,
                      "moe_intermediate_size": 16, "n_routed_experts": 5, "n_shared_experts": 1,
                      "rms_norm_eps": 1e-5, "rope": PLAIN, "seed": 4},
    # Every query attends to all tokens before it, because sequences are no longer than index_topk.
    "deepseek_v32": {**SPARSE, "hidden_size": 32, "q_lora_rank": 24, "kv_lora_rank": 16,
                     "qk_nope_head_dim": 16, "v_head_dim": 16, "first_k_dense_replace": 1,
                     "n_routed_experts": 6, "n_group": 2, "topk_group": 1, "index_topk": T + 3,
                     "rope": {**YARN, "truncate": True, "mscale": 1.0, "mscale_all_dim": 1.0},
                     "seed": 4},
    "glm_moe_dsa": {**SPARSE, "hidden_size": 40, "q_lora_rank": 16, "kv_lora_rank": 24,
                    "qk_nope_head_dim": 8, "v_head_dim": 16, "mlp_layer_types": ["sparse", "dense"],
                    "first_k_dense_replace": 1,
                    "n_routed_experts": 5, "n_group": 1, "topk_group": 1, "index_topk": T,
                    "rms_norm_eps": 1e-5, "rope": PLAIN, "seed": 4},
    # Queries grow after a document's twelfth token.
    "mistral4": {"without": ["head_dim"], "num_attention_heads": 3, "num_key_value_heads": 3,
                 "hidden_size": 40, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16,
                 "qk_rope_head_dim": 8, "v_head_dim": 16, "first_k_dense_replace": 1,
                 "n_routed_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
                 "n_shared_experts": 1, "routed_scaling_factor": 1.3, "rope": MINISTRAL, "seed": 4},
    "qwen3_5": {**DELTA, **DELTA_ON_GPUS, "type": "qwen3_5_text"},
    "qwen3_5_moe": {**SHORT_DELTA, "type": "qwen3_5_moe_text", "without": ["intermediate_size"],
                    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 40, "seed": 4},
    "qwen3_next": {**SHORT_DELTA, **DELTA_ON_GPUS, "num_hidden_layers": 3, "mlp_only_layers": [1],
                   "layer_types": ["linear_attention", "full_attention", "linear_attention"],
                   "norm_topk_prob": True, "moe_intermediate_size": 16,
                   "shared_expert_intermediate_size": 24, "seed": 4},
    "mellum": {**EXPERTS, "num_hidden_layers": 3, "num_experts": 5, "norm_topk_prob": True,
               "moe_intermediate_size": 16, "mlp_layer_types": ["sparse", "dense", "sparse"],
               "sliding_window": 9, "layer_types": ["sliding_attention", *2 * ["full_attention"]],
               "rope": {"full_attention": YARN_GLOBAL, "sliding_attention": PLAIN_LOCAL},
               "own_rope": {"rope_scaling": YARN_GLOBAL, "rope_local_base_freq": 100.0}, "seed": 3},
    "ernie4_5_moe": {"num_hidden_layers": 3, "moe_num_experts": 5, "moe_k": 2,
                     "moe_num_shared_experts": 2, "moe_intermediate_size": 16,
                     "moe_layer_start_index": 1, "moe_layer_end_index": 2, "rope": PLAIN, "seed": 5},
    "solar_open": {"without": ["intermediate_size"], "num_experts_per_tok": 3,
                   "moe_intermediate_size": 16, "n_routed_experts": 6, "n_group": 3,
                   "topk_group": 2, "n_shared_experts": 2, "routed_scaling_factor": 1.5,
                   "attention_bias": True, "rope": YARN_OF_ARCEE, "seed": 4},
    "hy_v3": {"num_hidden_layers": 3, "mlp_layer_types": ["dense", "sparse", "sparse"],
              "num_experts": 5, "num_experts_per_tok": 2, "num_shared_experts": 2,
              "moe_intermediate_size": 16, "router_scaling_factor": 1.7, "attention_bias": True,
              "rope": PLAIN, "seed": 3},
    "afmoe": {"num_hidden_layers": 3, "num_dense_layers": 1, "sliding_window": 9,
              "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
              "mup_enabled": True, "attention_bias": True, "num_experts": 5, "num_experts_per_tok": 2,
              "num_shared_experts": 2, "moe_intermediate_size": 16, "route_scale": 1.7, "rope": PLAIN,
              "seed": 2},
    "cohere2_moe": {"without": ["rms_norm_eps"], "layer_norm_eps": 1e-5, "num_hidden_layers": 4,
                    "logit_scale": 0.3, "sliding_window": 9,
                    "layer_types": ["full_attention", *2 * ["sliding_attention"], "full_attention"],
                    "mlp_layer_types": ["dense", *3 * ["sparse"]], "intermediate_size": 24,
                    "prefix_dense_intermediate_size": 40, "num_experts": 5,
                    "num_experts_per_tok": 2, "num_shared_experts": 2,
                    "shared_expert_combination_strategy": "average", "tie_word_embeddings": True,
                    "rope": {"rope_type": "default", "rope_theta": 500.0}, "seed": 3},
    # RMSNorms, experts whose weights are sigmoids, and no dense layers.
    "cohere2_moe_sigmoids": {"type": "cohere2_moe", "without": ["rms_norm_eps"],
                             "rms_norm_eps": 1e-3, "layer_norm_eps": 1e-6, "logit_scale": 0.3,
                             "sliding_window": 9, "intermediate_size": 24,
                             "layer_types": ["sliding_attention", "full_attention"],
                             "num_experts": 5, "num_experts_per_tok": 2, "num_shared_experts": 1,
                             "shared_expert_combination_strategy": "sum",
                             "expert_selection_fn": "sigmoid", "norm_topk_prob": False,
                             "rope": {"rope_type": "default", "rope_theta": 500.0}, "seed": 4},
    # Sequences are no longer than ten blocks of four keys, so every query attends to all of them. The
    # limit is so low that it clamps.
    "minimax_m3_vl_text": {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 6,
                           "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 24,
                           "dense_intermediate_size": 40, "shared_intermediate_size": 16,
                           "num_local_experts": 5, "num_experts_per_tok": 2,
                           "routed_scaling_factor": 2.0, "swiglu_limit": 2.0,
                           "mlp_layer_types": ["dense", "sparse", "sparse"],
                           "layer_types": ["full_attention", *2 * ["minimax_m3_sparse"]],
                           "index_n_heads": 2, "index_head_dim": 4, "index_block_size": 4,
                           "index_topk_blocks": 10, "index_local_blocks": 1,
                           "rope": {"rope_type": "default", "rope_theta": 1000.0,
                                    "partial_rotary_factor": 0.5},
                           "own_rope": {"rope_theta": 1000.0, "partial_rotary_factor": 0.5},
                           "seed": 2},
    "olmo_hybrid": {**{key: value for key, value in DELTA.items() if key != "head_dim"},
                    **DELTA_ON_GPUS, "without": ["head_dim"],
                    "rope": {"rope_type": "default", "rope_theta": 500.0},
                    "own_rope": {"rope_theta": 500.0}},
    "minimax_m2": {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 24,
                   "rope": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.75},
                   "own_rope": {"rope_theta": 1000.0, "partial_rotary_factor": 0.75}, "seed": 1},
}
ROTARY = {
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    "llama3": LLAMA3,
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
             "original_max_position_embeddings": 1024},
    "yarn_of_mscales": {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0,
                        "beta_fast": 24.0, "beta_slow": 2.0, "mscale": 1.0, "mscale_all_dim": 0.7,
                        "truncate": False, "original_max_position_embeddings": 4096},
    "longrope_short": LONGROPE,
    "longrope_long": LONGROPE,
}


def shape_of(case):
    return {key: value for key, value in SHAPE.items() if key not in case.get("without", ())}


def make_config(name, case):
    keys = {"tie_word_embeddings": False, **shape_of(case),
            **{k: v for k, v in case.items() if k not in OF_CASES}}
    return transformers.AutoConfig.for_model(
        case.get("type", name), **keys, rope_parameters=copy.deepcopy(case["rope"]),
        pad_token_id=None, bos_token_id=None, eos_token_id=None)


def own_scaling(parameters, positions):
    """As Ballast's import writes it: with what transformers takes from the rest of the config."""
    filled = dict(parameters)
    if filled["rope_type"] in ("dynamic", "longrope"):
        filled.setdefault("original_max_position_embeddings", positions)
    if filled["rope_type"] == "longrope":
        filled["factor"] = positions / filled["original_max_position_embeddings"]
    return filled


UNKNOWN = ("index_head_dim", "index_n_heads", "index_local_blocks", "attention_dropout", "residual_dropout",
           "mamba_n_heads", "mamba_d_head")
OF_EXPERTS = ("num_local_experts", "shared_intermediate_size")


def model_section(name, case):
    family = case.get("type", name)
    if family != "minimax_m3_vl_text":
        family = family.removesuffix("_text")
    section = {"family": family, "tie_embeddings": False}
    for key, value in {**shape_of(case), **case}.items():
        if key == "rope" and "own_rope" in case:
            section.update(case["own_rope"])
        elif key == "rope":
            section["rope_scaling"] = own_scaling(value, section["max_sequence"])
        elif key in OF_CASES:
            pass
        elif key in UNKNOWN or (family == "granitemoehybrid" and key in OF_EXPERTS):
            pass  # of indexers, dropout, Mamba layers and experts, which Ballast does not compute
        elif key == "original_max_position_embeddings":
            pass  # in rope_scaling
        elif family == "cohere2_moe" and key == "rms_norm_eps":
            section[key] = value  # in addition to layer_norm_eps
        elif value is not None:
            section[OWN_NAMES.get(key, key)] = value
    section["max_sequence"] = max(section["max_sequence"], case.get("length", T))
    return section


def randomise(model, centre, seed):
    """Leaves no parameter at 0 or 1, so that a missing bias or gain is detected. `centre`: of gains."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        values = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
        if name.endswith("e_score_correction_bias"):
            values *= 0.05
        elif parameter.dim() >= 2:
            values *= 0.2
        elif name.endswith("A_log"):
            values = 0.2 * values - 2.5  # the state remembers ten tokens and more
        elif name.endswith("bias"):
            values *= 0.1
        else:
            values = centre + 0.2 * values
        parameter.data.copy_(values)
    for i, (name, scale) in enumerate(scales_of_layers(model).items()):
        scale.fill_((0.75, 1.25, 0.875)[i % 3])  # values that bf16 represents
    if uses_sigmoids(model.config):
        make_corrections(model, generator)


def scales_of_layers(model):
    return {name: buffer for name, buffer in model.named_buffers() if name.endswith("layer_scalar")}


def relative_error(ours, theirs):
    """The absolute error if `theirs` is 0, as gradients of an expert without tokens are."""
    size = theirs.double().norm().item()
    return (ours.double() - theirs.double()).norm().item() / (size if size > 0.0 else 1.0)


class MuseGlimmerOfText(transformers.models.muse_glimmer.modeling_muse_glimmer.MuseGlimmerPreTrainedModel):
    """The text model with the output matrix of MuseGlimmerForConditionalGeneration."""

    def __init__(self, config):
        super().__init__(config)
        self.model = transformers.models.muse_glimmer.modeling_muse_glimmer.MuseGlimmerTextModel(config)
        self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, **inputs):
        logits = self.lm_head(self.model(**inputs).last_hidden_state)
        cap = self.config.final_logit_softcapping
        return transformers.modeling_outputs.CausalLMOutput(
            logits=torch.tanh(logits * self.config.output_multiplier / cap) * cap)


class MiniMaxM3OfText(transformers.models.minimax_m3_vl.modeling_minimax_m3_vl.MiniMaxM3VLPreTrainedModel):
    """The text model with the output matrix of MiniMaxM3VLForConditionalGeneration."""

    def __init__(self, config):
        super().__init__(config)
        self.model = transformers.models.minimax_m3_vl.modeling_minimax_m3_vl.MiniMaxM3VLTextModel(config)
        self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, **inputs):
        return transformers.modeling_outputs.CausalLMOutput(
            logits=self.lm_head(self.model(**inputs).last_hidden_state))


def create(config, attention="eager"):
    """Not with transformers' default for experts, torch.nn.functional.grouped_mm(), because it
    demands multiples of 8 in bf16."""
    make = transformers.AutoModelForCausalLM.from_config
    if config.model_type == "mistral4":  # published as a part of mistral3
        make = transformers.Mistral4ForCausalLM._from_config
    if config.model_type == "muse_glimmer_text":
        make = MuseGlimmerOfText._from_config
    if config.model_type == "minimax_m3_vl_text":
        make = MiniMaxM3OfText._from_config
    model = make(config, attn_implementation=attention, experts_implementation="eager")
    return model.to(torch.float32).train()


def is_delta(config, name):
    """Whether the tensor belongs to a layer with a gated delta net."""
    parts = name.split(".")
    return parts[1] == "layers" and config.layer_types[int(parts[2])] == "linear_attention"


# Parts of names in memory, and what files have instead.
RENAMED = {"hy_v3": {"mlp.gate.weight": "mlp.router.gate.weight",
                     "mlp.e_score_correction_bias": "mlp.expert_bias",
                     "mlp.shared_experts.": "mlp.shared_mlp."},
           "ernie4_5_moe": {"mlp.gate.moe_statics.": "mlp.moe_statics."},
           "minimax_m3_vl_text": {"gate.e_score_correction_bias": "e_score_correction_bias"}}


def names_in_files(model, tensors):
    """From names in memory to those of files, with views: transformers renames GPT-NeoX's output
    matrix in memory, and stacks the matrices of all experts. Without indexers, which have no
    gradients."""
    family = model.config.model_type
    tensors = {name: tensor for name, tensor in tensors.items() if INDEXER not in name}
    if family in ("gpt_oss", "gemma4_text", "mistral4", "granitemoe_swa"):
        return dict(tensors)
    mixtral = family in ("mixtral", "minimax_m2", "minimax_m3_vl_text")
    renamed = RENAMED.get(family, {})
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    found = {}
    for name, tensor in tensors.items():
        if name.endswith("linear_attn.conv1d.weight") and family == "olmo_hybrid":
            widths = [model.config.linear_num_key_heads * model.config.linear_key_head_dim] * 2
            widths.append(len(tensor) - sum(widths))
            found.update({name.replace("conv1d", f"{part}_conv1d"): rows
                          for part, rows in zip("qkv", tensor.split(widths))})
            continue
        if family == "olmo_hybrid" and is_delta(model.config, name):
            name = name.replace("input_layernorm", "attention_layer_norm")
            name = name.replace("post_attention_layernorm", "feedforward_layer_norm")
        if family == "gpt_neox" and name == "lm_head.weight":
            name = "embed_out.weight"
        if mixtral:
            dense = family == "minimax_m3_vl_text" and re.search(r"\.mlp\.(gate_up|down)_proj", name)
            name = name if dense else name.replace(".mlp.", ".block_sparse_moe.")
        if family == "minimax_m3_vl_text" and name.endswith(".gate_up_proj.weight"):
            found.update({name.replace("gate_up", part): rows
                          for part, rows in zip(("gate", "up"), tensor.chunk(2))})
            continue
        for part, in_files in renamed.items():
            name = name.replace(part, in_files)
        experts, _, kind = name.rpartition(".")
        if not experts.endswith(".experts"):
            found[name] = tensor
            continue
        for e, matrix in enumerate(tensor):
            parts = zip((gate, up), matrix.chunk(2)) if kind == "gate_up_proj" else [(down, matrix)]
            found.update({f"{experts}.{e}.{part}.weight": values for part, values in parts})
    return found


def weights(model):
    corrections = {name: buffer for name, buffer in model.named_buffers()
                   if name.endswith("e_score_correction_bias")}
    return names_in_files(
        model, {**{name: p.detach() for name, p in model.named_parameters()}, **corrections, **scales_of_layers(model)})


def gradients(model):
    return names_in_files(
        model, {name: p.grad for name, p in model.named_parameters() if p.grad is not None})


def check_names(model):
    if model.config.model_type == "minimax_m3_vl_text":
        return  # no folder of it alone is published, and transformers does not rename its tensors
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        saved = safetensors.torch.load_file(pathlib.Path(folder) / "model.safetensors")
    ours = weights(model)
    saved = {name: tensor for name, tensor in saved.items() if INDEXER not in name}
    if model.config.model_type == "olmo_hybrid":  # published folders have another name
        saved = {name if is_delta(model.config, name) else name.replace(
            "feedforward_layer_norm", "post_attention_layernorm"): tensor
                 for name, tensor in saved.items()}
    assert ours.keys() == saved.keys(), ours.keys() ^ saved.keys()
    # transformers cuts the taps of OLMo Hybrid into equal parts, which others than it cannot use.
    apart = "_conv1d."
    assert all(apart in name or torch.equal(saved[name], ours[name]) for name in saved)


class Losses:
    """Of a batch: `trained` is the one to minimise."""

    def __init__(self, model, logits, targets, router_logits):
        self.trained = self.cross_entropy = torch.nn.functional.cross_entropy(logits, targets)
        self.router_logits = router_logits
        self.choices = choices(model, router_logits) if router_logits else []
        self.balances = bool(router_logits) and has_auxiliary_loss(model.config)
        if self.balances:
            self.auxiliary = auxiliary_loss(model, router_logits)
            self.trained = self.cross_entropy + model.config.router_aux_loss_coef * self.auxiliary

    def append_to(self, record):
        record.setdefault("loss", []).append(self.cross_entropy.item())
        if self.balances:
            record.setdefault("aux_loss", []).append(self.auxiliary.item())


def forward(model, batch):
    output, router_logits = run_model(model, input_ids=batch[:, :-1])
    logits = output.logits.float()
    return logits, Losses(model, logits.reshape(-1, VOCAB), batch[:, 1:].reshape(-1), router_logits)


def of_each(name, tensor, width=0):
    """Parts of a tensor that are in blocks of their own, with the numbers of their elements in the whole:
    of stacked experts, and each layer's columns of the embeddings of all layers (`width`)."""
    numbers = torch.arange(tensor.numel(), dtype=torch.float64).reshape(tensor.shape)
    if name.endswith("embed_tokens_per_layer.weight"):
        parts = zip(numbers.split(width, dim=1), tensor.split(width, dim=1))
    elif ("mlp.experts." in name or "moe.experts." in name) and name.rpartition(".")[2] != "weight":
        parts = zip(numbers, tensor)
    else:
        return {name: (numbers, tensor)}
    return {f"{name}[{i}]": part for i, part in enumerate(parts)}


def in_bf16(config, attention, tensors, batch):
    """The same model and batch in bf16, against the results in fp32 in `tensors`."""
    model = make_model(config, tensors, attention).to(torch.bfloat16)
    keep_in_fp32(model, tensors)
    logits, losses = forward(model, batch)
    losses.trained.backward()
    errors = {}
    width = getattr(config, "hidden_size_per_layer_input", 0)
    for name, gradient in gradients(model).items():
        exact = of_each(name, tensors["gradient." + name], width)
        errors[name] = max(relative_error(part, exact[own][1])
                           for own, (_, part) in of_each(name, gradient, width).items())
    return losses, relative_error(logits, tensors["logits"]), errors


def keep_in_fp32(model, tensors):
    """What from_pretrained() does for the names that the class lists."""
    for own, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if own.endswith(tuple(model._keep_in_fp32_modules_strict or ())):
            [in_files] = names_in_files(model, {own: tensor})
            tensor.data = tensors[in_files].clone()


def spread_in_bf16(config, tensors, batch, in_fp32):
    """`in_fp32`: the losses of `batch`. Experts chosen in bf16 must be the same."""
    alone = ("gpt_oss", "gemma2", "granite_swa", "granitemoe_swa")
    attentions = ("eager",) if config.model_type in alone else ("eager", "sdpa")
    losses, logits, errors = zip(*[in_bf16(config, attention, tensors, batch)
                                   for attention in attentions])
    found = {"loss": [one.cross_entropy.item() for one in losses]}
    if in_fp32.balances:
        found["aux_loss"] = [one.auxiliary.item() for one in losses]
    for one in losses:
        assert all(map(torch.equal, one.choices, in_fp32.choices))
    return {**found, "logits_error": max(logits),
            "gradient_error": {name: max(of_one[name] for of_one in errors) for name in errors[0]}}


def make_model(config, tensors, attention="eager"):
    model = create(config, attention)
    for name, values in weights(model).items():
        values.copy_(tensors[name])
    return model


def make_optimizer(model):
    return torch.optim.AdamW(
        model.parameters(), lr=OPTIMIZER["lr"], betas=tuple(OPTIMIZER["betas"]),
        eps=OPTIMIZER["eps"], weight_decay=OPTIMIZER["weight_decay"], foreach=False)


def project(gradient, numbers):
    """A number on which every element has an influence. `numbers`: those of the elements."""
    return (gradient.double() * torch.cos(0.7 * numbers + 0.3)).sum()


def forward_documents(model, inputs, lengths):
    """Logits and router logits of one sequence; transformers finds its documents by their positions,
    except for GPT-OSS, Trinity, MiniMax-M3, gated delta nets and short convolutions. It scales the rotary positions of all documents together by the longest, so
    where the length of a document counts, each is computed alone."""
    by_length = (model.config.rope_parameters or {}).get("rope_type") in ("dynamic", "longrope")
    mixes = hasattr(model.config, "linear_num_key_heads") or hasattr(model.config, "conv_L_cache")
    if by_length or mixes or model.config.model_type in ("gpt_oss", "granitemoehybrid", "afmoe",
                                                         "minimax_m3_vl_text"):
        outputs = [run_model(model, input_ids=document)
                   for document in inputs.split(lengths, dim=1)]
    else:
        positions = torch.cat([torch.arange(length) for length in lengths])[None]
        outputs = [run_model(model, input_ids=inputs, position_ids=positions)]
    routers = zip(*[router_logits for _, router_logits in outputs])
    return (torch.cat([output.logits for output, _ in outputs], dim=1).float(),
            [torch.cat(of_layer) for of_layer in routers])


def run_packed(config, tensors, tokens, documents):
    """Trains on sequences of several documents. `documents`: their lengths, by sequence."""
    model = make_model(config, tensors)
    optimizer = make_optimizer(model)
    counts = torch.ones(SEQ, sum(documents[0]), dtype=torch.bool)
    counts[:, 4::5] = False
    for sequence, lengths in enumerate(documents):
        counts[sequence, numpy.cumsum(lengths) - 1] = False
    record = {"documents": documents, "counts": counts.int().tolist(), "loss": [], "norm": {},
              "projection": {}}
    for step in range(STEPS):
        batch = torch.tensor(tokens[step])
        logits, routers = zip(*[forward_documents(model, batch[s:s + 1, :-1], documents[s])
                                for s in range(SEQ)])
        logits = torch.cat(logits)
        losses = Losses(model, logits[counts], batch[:, 1:][counts],
                        tuple(torch.cat(of_layer) for of_layer in zip(*routers)))
        optimizer.zero_grad()
        losses.trained.backward()
        if step == 0:
            tensors["packed.logits"] = logits.detach().clone()
            width = getattr(config, "hidden_size_per_layer_input", 0)
            for name, gradient in gradients(model).items():
                for own, (numbers, part) in of_each(name, gradient, width).items():
                    record["norm"][own] = part.double().norm().item()
                    record["projection"][own] = project(part, numbers).item()
        losses.append_to(record)
        optimizer.step()
    return record


def make_tokens(model, documents):
    length = sum(documents[0])
    tokens = numpy.random.default_rng(5).integers(0, VOCAB, size=(STEPS, SEQ, length + 1))
    if is_mixture(model.config):
        choose_inputs(model, tokens[0], documents, VOCAB)
    return tokens


def make_initial(name, case):
    model = create(make_config(name, case))
    adds_one = name in ("gemma2", "gemma3", "minimax_m3_vl_text") or (
        "linear_num_key_heads" in case and name != "olmo_hybrid")
    randomise(model, 0.0 if adds_one else 1.0, case.get("seed", 7))
    if is_mixture(model.config) and not is_gemma(model.config):
        route(model, case.get("routing"))
    check_names(model)
    return model


def run(name, case, folder):
    torch.manual_seed(0)
    model = make_initial(name, case)
    documents = case.get("documents", DOCUMENTS)
    tokens = make_tokens(model, documents)
    tensors = {k: w.clone() for k, w in weights(model).items()}
    optimizer = make_optimizer(model)
    record = {"model": model_section(name, case), "optimizer": OPTIMIZER,
              "tokens": tokens.tolist(), "loss": [], "grad_norm": [],
              "packed": run_packed(model.config, tensors, tokens, documents)}
    for step in range(STEPS):
        batch = torch.tensor(tokens[step])
        logits, losses = forward(model, batch)
        optimizer.zero_grad()
        losses.trained.backward()
        if step == 0:
            tensors["logits"] = logits.detach().clone()
            tensors.update({"gradient." + k: g.clone() for k, g in gradients(model).items()})
            record["bf16"] = spread_in_bf16(model.config, tensors, batch, losses)
            if is_mixture(model.config):
                record["expert_tokens"] = count_choices(model, losses.router_logits)
        losses.append_to(record)
        record["grad_norm"].append(
            sum(g.double().square().sum().item() for g in gradients(model).values()) ** 0.5)
        optimizer.step()
    tensors.update({"final." + k: w.clone() for k, w in weights(model).items()})
    safetensors.torch.save_file(tensors, folder / f"{name}.safetensors")
    (folder / f"{name}.json").write_text(json.dumps(record) + "\n")
    print(f"{name}: loss {record['loss'][0]:.6f} to {record['loss'][-1]:.6f}",
          record.get("expert_tokens", ""))


def rotary():
    found = {}
    for name, parameters in ROTARY.items():
        small = name.startswith("longrope") or name == "llama3"
        length = {"longrope_short": 20, "dynamic": 3000}.get(name, 37 if small else 8192)
        shape = {"head_dim": 16 if small else 64, "max_position_embeddings": 48 if small else 2048}
        config = transformers.LlamaConfig(
            **{**SHAPE, "hidden_size": 56, **shape}, rope_parameters=dict(parameters), bos_token_id=None,
            eos_token_id=None)
        frequencies, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](
            config, "cpu", seq_len=length)
        scaling = own_scaling(parameters, shape["max_position_embeddings"])
        found[name] = {"rope_scaling": scaling, "head_dim": shape["head_dim"], "length": length,
                       "frequencies": frequencies.tolist(), "factor": factor}
    return found


def main():
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.topk = lowest_of_equals
    transformers.utils.logging.disable_progress_bar()
    here = pathlib.Path(__file__).resolve().parent
    folder = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else here / "families"
    folder.mkdir(parents=True, exist_ok=True)
    chosen = sys.argv[2:] or CASES
    for name in chosen:
        run(name, CASES[name], folder)
    (folder / "rotary.json").write_text(json.dumps(rotary(), indent=1) + "\n")


if __name__ == "__main__":
    main()
