#include "src/model/spec/families/gpt_neox.h"

#include <algorithm>

#include "ballast/core/suggest.h"

namespace ballast::model {
namespace {

/// Values of hidden_act for the exact GELU and for its tanh form.
constexpr const char* kExact = "gelu";
const std::vector<std::string> kTanhForms = {"gelu_new", "gelu_fast", "gelu_pytorch_tanh"};

}  // namespace

void GptNeoX::complete(ModelConfig& c, const Refuse& refuse) const {
  if (c.intermediate_size == 0) c.intermediate_size = 4 * c.hidden_size;
  if (c.num_kv_heads != c.num_heads) {
    refuse("num_kv_heads", fmt::format("gpt_neox needs the value of num_heads ({}), got {}",
                                       c.num_heads, c.num_kv_heads));
  }
  if (c.head_dim * c.num_heads != c.hidden_size) {
    refuse("head_dim", fmt::format("gpt_neox needs hidden_size ({}) / num_heads ({}), got {}",
                                   c.hidden_size, c.num_heads, c.head_dim));
  }
  const std::string& activation = c.detail("hidden_act").text();
  const bool tanh_form =
      std::find(kTanhForms.begin(), kTanhForms.end(), activation) != kTanhForms.end();
  if (activation != kExact && !tanh_form) {
    refuse("hidden_act", fmt::format("'{}' is not supported; gpt_neox supports {}, {}",
                                     text::printable(activation), kExact, listed(kTanhForms)));
  }
  rotaries(c, refuse);
}

DecoderSpec GptNeoX::decoder(const ModelConfig& c, std::uint64_t /*index*/) const {
  const bool biased = c.flag("attention_bias");
  return {.layer_norm = true,
          .norm_before_attention = "input_layernorm",
          .norm_before_mlp = "post_attention_layernorm",
          .parallel = c.flag("use_parallel_residual"),
          .qkv = {"attention.query_key_value"},
          .attention_out = "attention.dense",
          .gated = false,
          .activation = c.detail("hidden_act") == kExact ? Activation::gelu : Activation::gelu_tanh,
          .mlp_in = {"mlp.dense_h_to_4h"},
          .mlp_out = "mlp.dense_4h_to_h",
          .interleaved_qkv = true,
          .qkv_bias = biased,
          .attention_out_bias = biased,
          .mlp_bias = true};
}

std::vector<CheckpointKey> GptNeoX::checkpoint_keys() const {
  std::vector<CheckpointKey> keys = {{"model_type", "family", {}},
                                     {"vocab_size", "vocab_size", {}},
                                     {"hidden_size", "hidden_size", {}},
                                     {"num_hidden_layers", "num_layers", {}},
                                     {"num_attention_heads", "num_heads", {}},
                                     {"intermediate_size", "intermediate_size", {}},
                                     {"layer_norm_eps", "norm_epsilon", {}},
                                     {"tie_word_embeddings", "tie_embeddings", {}}};
  for (const DetailKey& detail : details()) keys.push_back(checkpoint_key(detail));
  set_standards(
      keys,
      {{"intermediate_size", 24576}, {"layer_norm_eps", 1e-5}, {"tie_word_embeddings", false}});
  return keys;
}

}  // namespace ballast::model
