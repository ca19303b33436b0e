#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "src/model/spec/families/llama.h"

namespace ballast::model {

// Families that differ from Llama in a few points, named after the classes in Hugging Face's
// transformers.

class Mistral final : public Llama {
 public:
  std::string_view name() const override { return "mistral"; }
  std::string_view checkpoint_class() const override { return "MistralForCausalLM"; }
  std::vector<DetailKey> details() const override {
    return {{"rope_theta", 10000.0}, {"rope_scaling", {}}, {"sliding_window", {}}};
  }
  CheckpointRules checkpoint_rules() const override { return {.rope = {.longest = 131072}}; }

 protected:
  std::vector<CheckpointStandard> checkpoint_standards() const override {
    return {
        {"num_key_value_heads", 8}, {"intermediate_size", 14336}, {"sliding_window", 4096, true}};
  }
};

/// Has biases for queries, keys and values.
class Qwen2 final : public Llama {
 public:
  std::string_view name() const override { return "qwen2"; }
  std::string_view checkpoint_class() const override { return "Qwen2ForCausalLM"; }
  std::vector<DetailKey> details() const override {
    return {{"rope_theta", 10000.0}, {"rope_scaling", {}},      {"use_sliding_window", false},
            {"sliding_window", {}},  {"max_window_layers", 28}, {"layer_types", {}}};
  }
  DecoderSpec decoder(const ModelConfig& c, std::uint64_t index) const override {
    DecoderSpec spec = Llama::decoder(c, index);
    spec.qkv_bias = true;
    return spec;
  }
  CheckpointRules checkpoint_rules() const override { return {.rope = {.longest = 32768}}; }

 protected:
  std::vector<CheckpointStandard> checkpoint_standards() const override {
    return {{"num_key_value_heads", 32, true},
            {"intermediate_size", 22016},
            {"sliding_window", 4096, true}};
  }
  bool is_windowed(const ModelConfig& c, std::uint64_t index) const override {
    return static_cast<double>(index) >= c.number("max_window_layers");
  }
};

/// Has norms for each head of queries and keys.
class Qwen3 : public Llama {
 public:
  std::string_view name() const override { return "qwen3"; }
  std::string_view checkpoint_class() const override { return "Qwen3ForCausalLM"; }
  std::vector<DetailKey> details() const override {
    return {{"rope_theta", 10000.0},   {"rope_scaling", {}},
            {"attention_bias", false}, {"use_sliding_window", false},
            {"sliding_window", {}},    {"max_window_layers", 28},
            {"layer_types", {}}};
  }
  DecoderSpec decoder(const ModelConfig& c, std::uint64_t index) const override {
    DecoderSpec spec = Llama::decoder(c, index);
    spec.query_norm = "self_attn.q_norm";
    spec.key_norm = "self_attn.k_norm";
    return spec;
  }
  CheckpointRules checkpoint_rules() const override { return {.rope = {.longest = 32768}}; }

 protected:
  std::vector<CheckpointStandard> checkpoint_standards() const override {
    return {{"num_key_value_heads", 32, true},
            {"head_dim", 128},
            {"intermediate_size", 22016},
            {"sliding_window", 4096, true}};
  }
  bool is_windowed(const ModelConfig& c, std::uint64_t index) const override {
    return static_cast<double>(index) >= c.number("max_window_layers");
  }
};

/// Some layers have no positions.
class SmolLm3 final : public Llama {
 public:
  std::string_view name() const override { return "smollm3"; }
  std::string_view checkpoint_class() const override { return "SmolLM3ForCausalLM"; }
  std::vector<DetailKey> details() const override {
    return {
        {"rope_theta", 2000000.0}, {"rope_scaling", {}},          {"attention_bias", false},
        {"mlp_bias", false},       {"use_sliding_window", false}, {"sliding_window", {}},
        {"layer_types", {}},       {"no_rope_layers", {}},        {"no_rope_layer_interval", 4}};
  }
  void complete(ModelConfig& c, const Refuse& refuse) const override;
  DecoderSpec decoder(const ModelConfig& c, std::uint64_t index) const override;
  CheckpointRules checkpoint_rules() const override {
    return {.rope = {.longest = 32768}, .without_effect = {"max_window_layers", "pretraining_tp"}};
  }

 protected:
  std::vector<CheckpointStandard> checkpoint_standards() const override {
    return {{"num_key_value_heads", 4, true},
            {"intermediate_size", 11008},
            {"tie_word_embeddings", true}};
  }
  bool is_windowed(const ModelConfig& c, std::uint64_t index) const override {
    return !rotates(c, index);
  }

 private:
  static bool rotates(const ModelConfig& c, std::uint64_t index);
};

/// Has fused maps and rotates a part of each head.
class Phi3 final : public Llama {
 public:
  std::string_view name() const override { return "phi3"; }
  std::string_view checkpoint_class() const override { return "Phi3ForCausalLM"; }
  std::vector<DetailKey> details() const override {
    return {{"rope_theta", 10000.0},
            {"rope_scaling", {}},
            {"partial_rotary_factor", 1.0},
            {"sliding_window", {}}};
  }
  DecoderSpec decoder(const ModelConfig& c, std::uint64_t index) const override {
    DecoderSpec spec = Llama::decoder(c, index);
    spec.qkv = {"self_attn.qkv_proj"};
    spec.mlp_in = {"mlp.gate_up_proj"};
    return spec;
  }
  CheckpointRules checkpoint_rules() const override {
    return {.rope = {.longest = 4096, .part = "partial_rotary_factor", .trained = 4096},
            .without_effect = {"full_attn_mod", "interpolate_factor"}};
  }

 protected:
  std::vector<CheckpointStandard> checkpoint_standards() const override {
    return {{"rms_norm_eps", 1e-5}, {"intermediate_size", 8192}};
  }
};

/// Has norms after attention and MLP instead of before, and norms over whole queries and keys.
class Olmo2 final : public Llama {
 public:
  std::string_view name() const override { return "olmo2"; }
  std::string_view checkpoint_class() const override { return "Olmo2ForCausalLM"; }
  std::vector<DetailKey> details() const override {
    return {{"rope_theta", 10000.0}, {"rope_scaling", {}}, {"attention_bias", false}};
  }
  DecoderSpec decoder(const ModelConfig& c, std::uint64_t index) const override {
    DecoderSpec spec = Llama::decoder(c, index);
    spec.norm_before_attention = "";
    spec.norm_after_attention = "post_attention_layernorm";
    spec.norm_before_mlp = "";
    spec.norm_after_mlp = "post_feedforward_layernorm";
    spec.query_norm = "self_attn.q_norm";
    spec.key_norm = "self_attn.k_norm";
    spec.norms_whole_rows = true;
    return spec;
  }
  CheckpointRules checkpoint_rules() const override { return {.rope = {.longest = 2048}}; }

 protected:
  std::vector<CheckpointStandard> checkpoint_standards() const override {
    return {{"rms_norm_eps", 1e-5}, {"intermediate_size", 11008}};
  }
};

}  // namespace ballast::model
