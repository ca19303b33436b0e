#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "src/model/spec/families/llama_variants.h"

namespace ballast::model {

// Families whose layers have experts, named after the classes in Hugging Face's transformers.

/// Coefficients of the router losses.
struct RouterLosses {
  double balance = 0.0;  ///< coefficient of the load-balancing loss
  double z = 0.0;        ///< coefficient of the z-loss
};
/// Returns the coefficients in the config; zeros for families without experts.
RouterLosses router_losses(const ModelConfig& config);

/// Mixtral: experts in every layer. A token's weights are divided by their sum.
class Mixtral final : public Llama {
 public:
  std::string_view name() const override { return "mixtral"; }
  std::string_view checkpoint_class() const override { return "MixtralForCausalLM"; }
  std::vector<DetailKey> details() const override;
  void complete(ModelConfig& c, const Refuse& refuse) const override;
  DecoderSpec decoder(const ModelConfig& c, std::uint64_t index) const override;
  std::vector<CheckpointKey> checkpoint_keys() const override;
  CheckpointRules checkpoint_rules() const override {
    return {.rope = {.longest = 131072}, .aliases = {{"num_experts", "num_local_experts"}}};
  }

 protected:
  std::vector<CheckpointStandard> checkpoint_standards() const override {
    return {{"rms_norm_eps", 1e-5},
            {"num_key_value_heads", 8},
            {"intermediate_size", 14336},
            {"num_local_experts", 8}};
  }
};

/// Qwen 3 with experts in the layers selected by decoder_sparse_step and mlp_only_layers. With
/// use_sliding_window all layers have the window.
class Qwen3Moe final : public Qwen3 {
 public:
  std::string_view name() const override { return "qwen3_moe"; }
  std::string_view checkpoint_class() const override { return "Qwen3MoeForCausalLM"; }
  std::vector<DetailKey> details() const override;
  void complete(ModelConfig& c, const Refuse& refuse) const override;
  DecoderSpec decoder(const ModelConfig& c, std::uint64_t index) const override;
  std::vector<CheckpointKey> checkpoint_keys() const override;
  CheckpointRules checkpoint_rules() const override {
    return {.rope = {.longest = 32768},
            .aliases = {{"num_local_experts", "num_experts"}},
            .without_effect = {"max_window_layers"}};
  }

 protected:
  std::vector<CheckpointStandard> checkpoint_standards() const override {
    return {{"num_key_value_heads", 4},
            {"intermediate_size", 6144},
            {"sliding_window", 4096, true},
            {"num_experts", 128}};
  }
  bool is_windowed(const ModelConfig& /*config*/, std::uint64_t /*index*/) const override {
    return true;
  }
};

/// Qwen 2 with experts in some layers like Qwen3Moe, and one expert for all tokens.
class Qwen2Moe final : public Llama {
 public:
  std::string_view name() const override { return "qwen2_moe"; }
  std::string_view checkpoint_class() const override { return "Qwen2MoeForCausalLM"; }
  std::vector<DetailKey> details() const override;
  void complete(ModelConfig& c, const Refuse& refuse) const override;
  DecoderSpec decoder(const ModelConfig& c, std::uint64_t index) const override;
  std::vector<CheckpointKey> checkpoint_keys() const override;
  CheckpointRules checkpoint_rules() const override { return {.rope = {.longest = 32768}}; }

 protected:
  std::vector<CheckpointStandard> checkpoint_standards() const override {
    return {{"num_key_value_heads", 16, true},
            {"intermediate_size", 5632},
            {"sliding_window", 4096, true},
            {"num_experts", 60}};
  }
  bool is_windowed(const ModelConfig& c, std::uint64_t index) const override {
    return index % 2 == 0 && static_cast<double>(index) < c.number("max_window_layers");
  }
};

/// OLMoE: norms over whole queries and keys before their rotation, and experts in every layer.
class Olmoe final : public Llama {
 public:
  std::string_view name() const override { return "olmoe"; }
  std::string_view checkpoint_class() const override { return "OlmoeForCausalLM"; }
  std::vector<DetailKey> details() const override;
  void complete(ModelConfig& c, const Refuse& refuse) const override;
  DecoderSpec decoder(const ModelConfig& c, std::uint64_t index) const override;
  std::vector<CheckpointKey> checkpoint_keys() const override;
  CheckpointRules checkpoint_rules() const override {
    return {.rope = {.longest = 4096}, .aliases = {{"num_local_experts", "num_experts"}}};
  }

 protected:
  std::vector<CheckpointStandard> checkpoint_standards() const override {
    return {{"rms_norm_eps", 1e-5}, {"intermediate_size", 2048}, {"num_experts", 64}};
  }
};

/// GPT-OSS: attention with sinks, biases everywhere, a clamped gate, and stacked experts. A token's
/// weights are the softmax of its experts' logits, which equals the softmax of all logits divided
/// by the sum of the chosen ones. Every other layer has the window.
class GptOss final : public Llama {
 public:
  std::string_view name() const override { return "gpt_oss"; }
  std::string_view checkpoint_class() const override { return "GptOssForCausalLM"; }
  std::vector<DetailKey> details() const override;
  void complete(ModelConfig& c, const Refuse& refuse) const override;
  DecoderSpec decoder(const ModelConfig& c, std::uint64_t index) const override;
  std::vector<CheckpointKey> checkpoint_keys() const override;
  CheckpointRules checkpoint_rules() const override {
    return {.rope = {.longest = 131072,
                     .standard = text::Json::object({{"rope_type", "yarn"},
                                                     {"factor", 32.0},
                                                     {"beta_fast", 32.0},
                                                     {"beta_slow", 1.0},
                                                     {"truncate", false},
                                                     {"original_max_position_embeddings", 4096}})},
            .aliases = {{"num_experts", "num_local_experts"}},
            .without_effect = {"experts_per_token", "initial_context_length"}};
  }

 protected:
  std::vector<CheckpointStandard> checkpoint_standards() const override {
    return {{"rms_norm_eps", 1e-5},
            {"num_key_value_heads", 8},
            {"head_dim", 64},
            {"intermediate_size", 2880},
            {"num_local_experts", 128}};
  }
  bool is_windowed(const ModelConfig& /*config*/, std::uint64_t index) const override {
    return index % 2 == 0;
  }
};

/// Width of the widest sum over rows in the experts' part of a model, including biases and logits;
/// 0 without experts.
std::uint64_t widest_of_experts(const ModelConfig& config);

}  // namespace ballast::model
