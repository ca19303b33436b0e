// Which matrices a quantised base includes.
#include <cstddef>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/core/error.h"
#include "ballast/model/architecture.h"
#include "ballast/model/family.h"
#include "ballast/text/json.h"

namespace ballast::model::quantized_base_test {
namespace {

/// A model with one layer and these values of its family's keys.
ModelConfig small(const std::string& family,
                  const std::vector<std::pair<std::string, text::Json>>& details) {
  ModelConfig config = default_config(family);
  config.hidden_size = config.intermediate_size = 32;
  config.num_layers = 1;
  config.num_heads = config.num_kv_heads = 2;
  config.max_sequence = 8;
  for (const auto& [name, value] : details) config.details[name] = value;
  return config;
}

/// The model with an adapter, so that all other tensors are frozen, and quantised.
Architecture quantized(const ModelConfig& config, const std::string& target = "q_proj") {
  Architecture model = build_architecture(config);
  adapt(model, {.targets = {target}}, [](std::string_view key, const std::string& rule) {
    throw Error(ErrorCategory::config, std::string(key) + ": " + rule);
  });
  quantize(model, {.format = Quantization::Format::nf4},
           [](const std::string& rule) { throw Error(ErrorCategory::config, rule); });
  return model;
}

/// Names without the layer's prefix of the matrices that are quantised, or not.
std::set<std::string> matrices_of(const Architecture& model, bool is_quantized) {
  std::set<std::string> names;
  for (const BlockSpec& block : model.blocks) {
    for (const TensorSpec& tensor : block.tensors) {
      const bool map = tensor.shape.size() > 1 && block.kind == BlockKind::layer;
      if (map && tensor.quantized == is_quantized && !tensor.adapter) {
        names.insert(tensor.name.substr(block.prefix.size()));
      }
    }
  }
  return names;
}

const std::set<std::string> kAttention = {"self_attn.q_proj.weight", "self_attn.k_proj.weight",
                                          "self_attn.v_proj.weight", "self_attn.o_proj.weight"};

/// Matrices that choose experts or weigh a shared expert are not quantised.
TEST(QuantizedBase, LeavesRoutersAndTheGateOfASharedExpert) {
  const Architecture model =
      quantized(small("qwen2_moe", {{"num_experts", 4},
                                    {"num_experts_per_tok", 2},
                                    {"moe_intermediate_size", 16},
                                    {"shared_expert_intermediate_size", 16}}));
  EXPECT_EQ(matrices_of(model, false),
            (std::set<std::string>{"mlp.gate.weight", "mlp.shared_expert_gate.weight"}));
  EXPECT_EQ(matrices_of(model, true).size(), 4U + 3U + 4U * 3U);
}

/// Names of maps in stacks of experts do not end with ".weight".
TEST(QuantizedBase, IncludesStacksOfExpertsUnlessTransposed) {
  const Architecture model = quantized(small("mistral4", {{"n_routed_experts", 3},
                                                          {"num_experts_per_tok", 2},
                                                          {"moe_intermediate_size", 16},
                                                          {"first_k_dense_replace", 0},
                                                          {"q_lora_rank", 8},
                                                          {"kv_lora_rank", 16},
                                                          {"qk_nope_head_dim", 8},
                                                          {"qk_rope_head_dim", 8},
                                                          {"v_head_dim", 8}}),
                                       "q_b_proj");
  const std::set<std::string> found = matrices_of(model, true);
  EXPECT_TRUE(found.contains("mlp.experts.gate_up_proj"));
  EXPECT_TRUE(found.contains("mlp.experts.down_proj"));
  EXPECT_EQ(matrices_of(model, false), (std::set<std::string>{"mlp.gate.weight"}));
  const Architecture transposed =
      quantized(small("gpt_oss", {{"num_local_experts", 3}, {"num_experts_per_tok", 2}}));
  EXPECT_EQ(matrices_of(transposed, true), kAttention);
}

TEST(QuantizedBase, IncludesExpertsInTheBlockOfALayer) {
  std::set<std::string> wanted = kAttention;
  wanted.insert({"mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight",
                 "experts.gate_up_proj", "experts.down_proj"});
  const Architecture model = quantized(small("gemma4", {{"enable_moe_block", true},
                                                        {"num_experts", 3},
                                                        {"top_k_experts", 2},
                                                        {"moe_intermediate_size", 8}}));
  EXPECT_EQ(matrices_of(model, true), wanted);
  EXPECT_EQ(matrices_of(model, false), (std::set<std::string>{"router.proj.weight"}));
  const BlockSpec& layer = model.blocks[1];
  EXPECT_EQ(BlockCodes(model, layer).matrices.size(), wanted.size());
}

}  // namespace
}  // namespace ballast::model::quantized_base_test
