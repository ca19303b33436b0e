#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "src/model/spec/families/decoder.h"

namespace ballast::model {

/// LayerNorm, rotary positions in a part of each head, and biases. Attention and MLP read the same
/// residual stream, unless use_parallel_residual is false. Source: Black et al., "GPT-NeoX-20B",
/// 2022, section 2.
class GptNeoX final : public DecoderFamily {
 public:
  std::string_view name() const override { return "gpt_neox"; }
  std::string_view checkpoint_class() const override { return "GPTNeoXForCausalLM"; }
  std::vector<DetailKey> details() const override {
    return {{"rope_theta", 10000.0},  {"rope_scaling", {}},
            {"attention_bias", true}, {"partial_rotary_factor", 0.25},
            {"hidden_act", "gelu"},   {"use_parallel_residual", true}};
  }
  void complete(ModelConfig& c, const Refuse& refuse) const override;
  std::vector<Rotary> rotaries(const ModelConfig& c, const Refuse& refuse) const override {
    return {rotary_positions(c, refuse)};
  }
  OuterTensors outer() const override {
    return {.tokens = "gpt_neox.embed_in.weight",
            .norm = "gpt_neox.final_layer_norm",
            .output = "embed_out.weight"};
  }
  DecoderSpec decoder(const ModelConfig& c, std::uint64_t index) const override;
  std::vector<CheckpointKey> checkpoint_keys() const override;
  CheckpointRules checkpoint_rules() const override {
    return {.rope = {.longest = 2048, .theta = "rotary_emb_base", .part = "rotary_pct"}};
  }
  /// The causal mask, the value of masked scores, and frequencies.
  std::vector<CheckpointBuffer> checkpoint_buffers(const ModelConfig& /*c*/) const override {
    return {{".attention.bias", {1, 1, 0, 0}},
            {".attention.masked_bias", {}},
            {".attention.rotary_emb.inv_freq", {0}}};
  }

 protected:
  std::string prefix(std::uint64_t index) const override {
    return fmt::format("gpt_neox.layers.{}.", index);
  }
};

}  // namespace ballast::model
