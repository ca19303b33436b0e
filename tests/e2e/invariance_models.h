#pragma once

#include <string>
#include <vector>

#include <fmt/format.h>

#include "tests/support/covering.h"

namespace ballast::engine::invariance_test {

/// A model whose results must not depend on how it is trained.
struct Model {
  std::string name;
  std::string section;
  std::string trained = {};  ///< the value of ballast.train, unless all
};

inline const Model kGpt2 = {
    "gpt2",
    R"("family": "gpt2", "vocab_size": 131, "hidden_size": 64, "num_layers": 2,
                        "num_heads": 4)"};
inline const Model kLlama = {
    "llama",
    R"("family": "llama", "vocab_size": 131, "hidden_size": 96, "num_layers": 3,
                         "num_heads": 6, "num_kv_heads": 2, "intermediate_size": 160)"};
/// Each head of queries and keys has a norm.
inline const Model kTiedQwen3 = {"tied qwen3",
                                 R"("family": "qwen3", "vocab_size": 131, "hidden_size": 96,
                             "num_layers": 3, "num_heads": 6, "num_kv_heads": 2, "head_dim": 16,
                             "intermediate_size": 160, "tie_embeddings": true)"};
/// Cuts the vocabulary into tiles.
inline Model cut(const Model& model, int tiles) {
  return {fmt::format("{} in {} tiles", model.name, tiles),
          fmt::format(R"({}, "vocabulary_tiles": {})", model.section, tiles), model.trained};
}
/// Cuts the layers into tiles, too: two of attention, three of the MLP, which differ in width.
inline Model cut_everywhere(const Model& model, int tiles) {
  const Model vocabulary = cut(model, tiles);
  return {fmt::format("{}, layers too", vocabulary.name),
          fmt::format(R"({}, "layer_tiles": 3)", vocabulary.section), model.trained};
}
/// One of two layers has experts and a shared expert. Some experts have no tokens in a step, which
/// the test checks.
inline const Model kExperts = {"experts",
                               R"("family": "qwen2_moe", "vocab_size": 131, "hidden_size": 64,
                           "num_layers": 2, "num_heads": 4, "intermediate_size": 96,
                           "num_experts": 48, "num_experts_per_tok": 1,
                           "moe_intermediate_size": 16, "shared_expert_intermediate_size": 48,
                           "mlp_only_layers": [1], "output_router_logits": true,
                           "router_aux_loss_coef": 0.1, "router_z_loss_coef": 0.01)"};
/// Attention has sinks and windows. Experts have biases and limits that they reach.
inline const Model kAllExperts = {"all experts",
                                  R"("family": "gpt_oss", "vocab_size": 131, "hidden_size": 64,
                              "num_layers": 2, "num_heads": 4, "num_kv_heads": 2,
                              "intermediate_size": 48, "num_local_experts": 5,
                              "num_experts_per_tok": 2, "sliding_window": 7,
                              "swiglu_limit": 0.05)"};
/// Latent attention. The second layer has groups of experts, whose correction biases move.
inline const Model kLatentExperts = {"latent experts",
                                     R"("family": "deepseek_v3", "vocab_size": 131,
    "hidden_size": 48, "num_layers": 2, "num_heads": 3, "q_lora_rank": 18, "kv_lora_rank": 14,
    "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 12, "intermediate_size": 56,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 2,
    "topk_group": 1, "first_k_dense_replace": 1, "router_bias_update_speed": 0.01)"};
inline const Model kDelta = {"gated delta nets",
                             R"("family": "qwen3_5", "vocab_size": 131, "hidden_size": 64,
                         "num_layers": 3, "num_heads": 4, "head_dim": 16, "intermediate_size": 96,
                         "full_attention_interval": 2, "linear_num_key_heads": 2,
                         "linear_num_value_heads": 4, "linear_key_head_dim": 12,
                         "linear_value_head_dim": 8)"};
inline const Model kConvolutions = {"short convolutions",
                                    R"("family": "lfm2", "vocab_size": 131, "hidden_size": 48,
                         "num_layers": 3, "num_heads": 4, "num_kv_heads": 2, "head_dim": 12,
                         "layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 4,
                         "intermediate_size": 100, "block_multiple_of": 8, "conv_bias": true)"};
/// Norms without weights, gates of attention, and layers without positions.
inline const Model kMuse = {"muse glimmer",
                            R"("family": "muse_glimmer", "vocab_size": 131, "hidden_size": 48,
                         "num_layers": 3, "num_heads": 4, "num_kv_heads": 2, "head_dim": 12,
                         "sliding_window": 7, "intermediate_size": 72, "output_multiplier": 1.5)"};
/// Norms after attention and of the experts' sum. The first layer is dense.
inline const Model kNormedExperts = {"experts between norms",
                                     R"("family": "afmoe", "vocab_size": 131, "hidden_size": 48,
                         "num_layers": 3, "num_heads": 4, "num_kv_heads": 2, "head_dim": 12,
                         "intermediate_size": 72, "global_attn_every_n_layers": 2,
                         "sliding_window": 7, "mup_enabled": true, "num_experts": 5,
                         "num_experts_per_tok": 2, "num_shared_experts": 1,
                         "moe_intermediate_size": 16, "route_scale": 1.5,
                         "router_bias_update_speed": 0.01)"};
/// Experts read the norm of attention. The first layer is dense.
inline const Model kParallelExperts = {"experts parallel to attention",
                                       R"("family": "cohere2_moe", "vocab_size": 131,
                         "hidden_size": 48, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2,
                         "head_dim": 12, "intermediate_size": 24, "sliding_window": 7,
                         "sliding_window_pattern": 2, "first_k_dense_replace": 1,
                         "prefix_dense_intermediate_size": 72, "num_experts": 5,
                         "num_experts_per_tok": 2, "num_shared_experts": 1, "logit_scale": 1.0)"};
/// Clamped gates of an MLP and of experts.
inline const Model kClampedExperts = {"clamped experts",
                                      R"("family": "minimax_m3_vl_text", "vocab_size": 131,
                         "hidden_size": 48, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2,
                         "head_dim": 12, "partial_rotary_factor": 0.5, "intermediate_size": 24,
                         "dense_intermediate_size": 72, "shared_intermediate_size": 20,
                         "mlp_layer_types": ["dense", "sparse"], "num_local_experts": 5,
                         "num_experts_per_tok": 2, "swiglu_limit": 0.05)"};
/// Layers of two head shapes, one of which has keys as values, with experts besides the MLP.
inline const Model kGemma4 = {"gemma4 with experts",
                              R"("family": "gemma4", "vocab_size": 131, "hidden_size": 48,
                          "num_layers": 3, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8,
                          "global_head_dim": 12, "num_global_key_value_heads": 1,
                          "attention_k_eq_v": true, "sliding_window": 7, "intermediate_size": 64,
                          "layer_types": ["sliding_attention", "full_attention", "full_attention"],
                          "enable_moe_block": true, "num_experts": 5, "top_k_experts": 2,
                          "moe_intermediate_size": 20, "final_logit_softcapping": 20.0)"};
/// The last two layers attend to keys of the layers before them. The pad token occurs.
inline const Model kLinks = {"shared keys and layer inputs",
                             R"("family": "gemma4", "vocab_size": 131, "hidden_size": 48,
                         "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "head_dim": 12,
                         "global_head_dim": 16, "intermediate_size": 64, "sliding_window": 9,
                         "layer_types": ["sliding_attention", "full_attention",
                                         "sliding_attention", "full_attention"],
                         "num_kv_shared_layers": 2, "use_double_wide_mlp": true,
                         "hidden_size_per_layer_input": 10, "vocab_size_per_layer_input": 131,
                         "pad_token_id": 3)"};
inline const Model kTiedLlama = {"tied llama",
                                 kLlama.section + R"(, "tie_embeddings": true, "pad_token_id": 3)"};
/// Rotary positions scaled for documents of more than 7 tokens.
inline Model with_dynamic_scaling(Model model) {
  model.name += " with dynamic scaling";
  model.section += R"(, "rope_scaling": {"rope_type": "dynamic", "factor": 3,
                                         "original_max_position_embeddings": 7})";
  return model;
}
/// Freezes all tensors that do not match.
inline Model training(const Model& model, const std::string& patterns) {
  return {fmt::format("{}, only {}", model.name, patterns), model.section, patterns};
}

/// `model` with adapters, and an output matrix that can be trained in full.
inline Model untied(const Model& model) {
  Model made = training(model, "adapters");
  made.section += R"(, "tie_embeddings": false)";
  return made;
}

using test::Overrides;

/// A placement of a model, which must not change a bit.
struct Variant {
  std::string name;
  Overrides overrides;
};

inline const std::string optimizer = "zero_optimization.offload_optimizer.device=";
inline const std::string weights = "zero_optimization.offload_param.device=";

/// Variants with and without prefetched experts.
inline std::vector<Variant> variants_of_experts() {
  const std::string prefetch = "ballast.expert_prefetch=true";
  const std::string buffers = "ballast.device_weight_buffers=6";
  const std::string staging = "zero_optimization.offload_param.buffer_count=5";
  return {
      {"prefetch, weights on host", {weights + "cpu", optimizer + "cpu", buffers, prefetch}},
      {"prefetch, weights on host, optimizer on device", {weights + "cpu", buffers, prefetch}},
      {"prefetch, everything on NVMe, at random times",
       {weights + "nvme", optimizer + "nvme", "ballast.gradients=nvme", buffers, staging, prefetch,
        "ballast.delay_seed=8"}},
      {"prefetch, everything on NVMe, speculative",
       {weights + "nvme", optimizer + "nvme", "ballast.speculative_updates=30", buffers, staging,
        prefetch}},
      {"prefetch, micro-batch-major, weights on NVMe, optimizer on host",
       {weights + "nvme", optimizer + "cpu", "ballast.order=micro_batch_major", buffers, staging,
        prefetch}},
      {"everything on NVMe, speculative",
       {weights + "nvme", optimizer + "nvme", "ballast.speculative_updates=30"}},
      {"sums on host, prefetch, weights on host, at random times",
       {weights + "cpu", optimizer + "cpu", "ballast.order=micro_batch_major_offload", buffers,
        prefetch, "ballast.delay_seed=11"}},
      {"weights on host, speculative, micro-batch-major",
       {weights + "cpu", optimizer + "cpu", "ballast.speculative_updates=30",
        "ballast.order=micro_batch_major"}},
  };
}

}  // namespace ballast::engine::invariance_test
