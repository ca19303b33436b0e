#pragma once

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "src/model/spec/families/decoder.h"

namespace ballast::model {

/// LayerNorm, learned positions, GELU (tanh form) and biases. Weights of products are [in, out].
class Gpt2 final : public DecoderFamily {
 public:
  std::string_view name() const override { return "gpt2"; }
  std::string_view checkpoint_class() const override { return "GPT2LMHeadModel"; }
  bool ties_embeddings() const override { return true; }
  void complete(ModelConfig& c, const Refuse& refuse) const override {
    if (c.intermediate_size == 0) c.intermediate_size = 4 * c.hidden_size;
    if (c.num_kv_heads != c.num_heads) {
      refuse("num_kv_heads", fmt::format("gpt2 needs the value of num_heads ({}), got {}",
                                         c.num_heads, c.num_kv_heads));
    }
  }
  OuterTensors outer() const override {
    return {.tokens = "transformer.wte.weight",
            .positions = "transformer.wpe.weight",
            .norm = "transformer.ln_f"};
  }
  DecoderSpec decoder(const ModelConfig& c, std::uint64_t /*index*/) const override {
    return {
        .layer_norm = true,
        .norm_before_attention = "ln_1",
        .norm_before_mlp = "ln_2",
        .qkv = {"attn.c_attn"},
        .rotates = false,
        .attention_out = "attn.c_proj",
        .gated = false,
        .activation = Activation::gelu_tanh,
        .mlp_in = {"mlp.c_fc"},
        .mlp_out = "mlp.c_proj",
        .conv1d = true,
        .qkv_bias = true,
        .attention_out_bias = true,
        .mlp_bias = true,
        // Projections that add to the residual stream start with smaller weights, scaled by the
        // number of such additions, like in Hugging Face's GPT-2 (and section 2.3 of its paper).
        .residual_factor = 1.0 / std::sqrt(2.0 * static_cast<double>(c.num_layers))};
  }
  std::vector<CheckpointKey> checkpoint_keys() const override {
    std::vector<CheckpointKey> keys = {
        {"model_type", "family"},
        {"vocab_size", "vocab_size"},
        {"n_embd", "hidden_size"},
        {"n_layer", "num_layers"},
        {"n_head", "num_heads"},
        {"n_inner", "intermediate_size"},
        {"n_positions", "max_sequence"},
        {"layer_norm_epsilon", "norm_epsilon"},
        {"tie_word_embeddings", "tie_embeddings"},
        {"activation_function", "", {"gelu_new", "gelu_pytorch_tanh", "gelu_fast"}},
        {"scale_attn_weights", "", {"true"}},
        {"scale_attn_by_inverse_layer_idx", "", {"false"}}};
    set_standards(
        keys, {{"n_positions", 1024}, {"layer_norm_epsilon", 1e-5}, {"tie_word_embeddings", true}});
    return keys;
  }
  CheckpointRules checkpoint_rules() const override {
    return {.aliases = {{"hidden_size", "n_embd"},
                        {"num_hidden_layers", "n_layer"},
                        {"num_attention_heads", "n_head"},
                        {"max_position_embeddings", "n_positions"}},
            .without_effect = {"n_ctx", "reorder_and_upcast_attn", "summary_activation",
                               "summary_first_dropout", "summary_proj_to_labels", "summary_type",
                               "summary_use_proj"}};
  }
  /// The causal mask, and the value of masked scores.
  std::vector<CheckpointBuffer> checkpoint_buffers(const ModelConfig& c) const override {
    return {{".attn.bias", {1, 1, c.max_sequence, c.max_sequence}}, {".attn.masked_bias", {}}};
  }

 protected:
  std::string prefix(std::uint64_t index) const override {
    return fmt::format("transformer.h.{}.", index);
  }
};

}  // namespace ballast::model
