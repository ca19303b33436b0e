#include "src/model/spec/families/gemma3.h"

#include <fmt/format.h>

namespace ballast::model {

void Gemma3::complete(ModelConfig& c, const Refuse& refuse) const {
  Llama::complete(c, refuse);
  const double pattern = c.number("sliding_window_pattern");
  if (!(pattern >= 1.0) || pattern != std::floor(pattern)) {
    refuse("sliding_window_pattern",
           fmt::format("must be a number of layers, the last of which has no window, got {}",
                       pattern));
  }
  const double scalar = c.number("query_pre_attn_scalar");
  if (!(scalar > 0.0)) {
    refuse("query_pre_attn_scalar", fmt::format("must be above 0, got {}", scalar));
  }
}

DecoderSpec Gemma3::decoder(const ModelConfig& c, std::uint64_t index) const {
  DecoderSpec spec = Llama::decoder(c, index);
  spec.norm_offset = 1.0F;
  spec.norm_after_attention = "post_attention_layernorm";
  spec.norm_before_mlp = "pre_feedforward_layernorm";
  spec.norm_after_mlp = "post_feedforward_layernorm";
  spec.query_norm = "self_attn.q_norm";
  spec.key_norm = "self_attn.k_norm";
  spec.activation = Activation::gelu_tanh;
  spec.rotary = is_sliding(c, index) ? 1 : 0;
  return spec;
}

std::vector<CheckpointKey> Gemma3::checkpoint_keys() const {
  std::vector<CheckpointKey> keys = Llama::checkpoint_keys();
  std::erase_if(keys, [](const CheckpointKey& key) { return key.name == "hidden_act"; });
  keys.insert(keys.end(),
              {{"hidden_activation", "", {"gelu_pytorch_tanh", "gelu_new", "gelu_fast"}},
               {"attn_logit_softcapping", "", {}},
               {"final_logit_softcapping", "", {}},
               {"use_bidirectional_attention", "", {"false"}}});
  return keys;
}

}  // namespace ballast::model
