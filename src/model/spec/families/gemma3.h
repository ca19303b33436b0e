#pragma once

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "src/model/spec/families/llama.h"

namespace ballast::model {

/// The text models of Gemma 3. RMSNorms before and after attention and MLP multiply by one plus
/// their weight. Each head of queries and keys has a norm, the MLP has a GELU gate, and the
/// embedding is multiplied by sqrt(hidden_size). Most layers have a window and a smaller base of
/// the rotary positions.
class Gemma3 final : public Llama {
 public:
  std::string_view name() const override { return "gemma3"; }
  std::string_view checkpoint_type() const override { return "gemma3_text"; }
  std::string_view checkpoint_class() const override { return "Gemma3ForCausalLM"; }
  bool ties_embeddings() const override { return true; }
  std::vector<DetailKey> details() const override {
    return {{"rope_theta", 1000000.0}, {"rope_scaling", {}},
            {"attention_bias", false}, {"rope_local_base_freq", 10000.0},
            {"sliding_window", 4096},  {"sliding_window_pattern", 6},
            {"layer_types", {}},       {"query_pre_attn_scalar", 256}};
  }
  void complete(ModelConfig& c, const Refuse& refuse) const override;
  std::vector<Rotary> rotaries(const ModelConfig& c, const Refuse& refuse) const override {
    return {rotary_positions(c, refuse), plain_rotary_positions(c, "rope_local_base_freq", refuse)};
  }
  double score_scale(const ModelConfig& c) const override {
    return 1.0 / std::sqrt(c.number("query_pre_attn_scalar"));
  }
  OuterTensors outer() const override {
    OuterTensors tensors = Llama::outer();
    tensors.norm_offset = 1.0F;
    tensors.scales_tokens = true;
    return tensors;
  }
  DecoderSpec decoder(const ModelConfig& c, std::uint64_t index) const override;
  std::vector<CheckpointKey> checkpoint_keys() const override;
  CheckpointRules checkpoint_rules() const override {
    return {.rope = {.longest = 131072, .by_layer_type = true},
            .without_effect = {"_sliding_window_pattern", "hidden_act"}};
  }

 protected:
  std::vector<CheckpointStandard> checkpoint_standards() const override {
    return {{"num_key_value_heads", 4}, {"head_dim", 256}, {"intermediate_size", 9216}};
  }
  bool is_windowed(const ModelConfig& c, std::uint64_t index) const override {
    return (index + 1) % static_cast<std::uint64_t>(c.number("sliding_window_pattern")) != 0;
  }
};

}  // namespace ballast::model
