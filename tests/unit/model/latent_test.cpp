// Layers with latent attention, as a model describes them.
#include <cmath>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/core/error.h"
#include "ballast/model/architecture.h"
#include "ballast/model/attention.h"
#include "ballast/model/family.h"

#include "src/model/compute/layer_shapes.h"
#include "src/model/description/layer_rules.h"
#include "tests/support/layer_specs.h"

namespace ballast::model::latent_test {
namespace {

ModelConfig small(const char* family = "deepseek_v3") {
  ModelConfig c = default_config(family);
  c.vocab_size = 61;
  c.hidden_size = 50;  // not a multiple of the heads
  c.num_layers = 1;
  c.num_heads = 3;
  c.max_sequence = 8;
  c.details["q_lora_rank"] = std::uint64_t{9};
  c.details["kv_lora_rank"] = std::uint64_t{11};
  c.details["qk_nope_head_dim"] = std::uint64_t{10};
  c.details["qk_rope_head_dim"] = std::uint64_t{6};
  c.details["v_head_dim"] = std::uint64_t{13};
  return c;
}

using Shape = std::vector<std::uint64_t>;

TEST(LatentAttention, HasMapsOfLowRankAndTheirNorms) {
  for (const char* family : {"deepseek_v3", "glm4_moe_lite"}) {
    const Architecture model = build_architecture(small(family));
    const BlockSpec& layer = model.blocks[1];
    std::map<std::string, Shape> shapes;
    std::uint64_t matrices = 0;
    for (const TensorSpec& tensor : layer.tensors) {
      shapes[tensor.name.substr(std::string("model.layers.0.").size())] = tensor.shape;
      if (tensor.shape.size() == 2) matrices += tensor.size;
    }
    EXPECT_EQ(shapes["self_attn.q_a_proj.weight"], (Shape{9, 50}));
    EXPECT_EQ(shapes["self_attn.q_a_layernorm.weight"], (Shape{9}));
    EXPECT_EQ(shapes["self_attn.q_b_proj.weight"], (Shape{3 * 16, 9}));
    EXPECT_EQ(shapes["self_attn.kv_a_proj_with_mqa.weight"], (Shape{11 + 6, 50}));
    EXPECT_EQ(shapes["self_attn.kv_a_layernorm.weight"], (Shape{11}));
    EXPECT_EQ(shapes["self_attn.kv_b_proj.weight"], (Shape{3 * (10 + 13), 11}));
    EXPECT_EQ(shapes["self_attn.o_proj.weight"], (Shape{50, 3 * 13}));
    EXPECT_EQ(shapes.size(), 7U + 3U + 2U);
    EXPECT_EQ(model.config.head_dim, 16U);
    EXPECT_EQ(layer.product_elements, matrices);
    EXPECT_EQ(layer.attention_width, 3U * 16U);  // what the kernels compute
  }
}

/// Kernels need not compute the padding of values, so they have to see how wide it is.
TEST(LatentAttention, TellsKernelsTheWidthOfValues) {
  for (const char* name : {"deepseek_v3", "glm4_moe_lite"}) {
    const ModelConfig c = build_architecture(small(name)).config;
    const AttentionShape shape = attention_shape(c, {.sequences = 2, .length = 4});
    EXPECT_EQ(shape.head_dim, 16U);
    EXPECT_EQ(shape.value_columns(), 13U);
  }
}

/// Devices have memory for sums over rows of this width.
TEST(LatentAttention, HasSumsAsWideAsItsRanks) {
  ModelConfig c = small();
  c.intermediate_size = 16;
  EXPECT_EQ(widest_sum(*build_architecture(c).layers), 11U + 6);
  c.details["q_lora_rank"] = std::uint64_t{100};
  EXPECT_EQ(widest_sum(*build_architecture(c).layers), 100U);
}

TEST(LatentAttention, ScalesScoresByTheSquareOfYarnsFactor) {
  ModelConfig c = build_architecture(small()).config;
  EXPECT_NEAR(test::attention_of(c, 0).scale, 0.25, 1e-15);
  c.details["rope_scaling"] = text::parse_json(
      R"({"rope_type": "yarn", "factor": 40, "original_max_position_embeddings": 4096,
          "mscale": 1.0, "mscale_all_dim": 0.5})",
      "scaling");
  const double m = 0.05 * std::log(40.0) + 1.0;
  EXPECT_NEAR(test::attention_of(c, 0).scale, 0.25 * m * m, 1e-15);
}

/// Experts of Mistral 4 are slices of two tensors.
TEST(LatentAttention, HasStackedExpertsInMistral4) {
  ModelConfig c = small("mistral4");
  c.details["n_routed_experts"] = std::uint64_t{5};
  c.details["moe_intermediate_size"] = std::uint64_t{7};
  const Architecture model = build_architecture(c);
  const BlockSpec& expert = model.blocks.at(1 + 3 + 2);
  ASSERT_EQ(expert.tensors.size(), 2U);
  const TensorSpec& gate = expert.tensors[0];
  const TensorSpec& down = expert.tensors[1];
  EXPECT_EQ(gate.name, "model.layers.0.mlp.experts.gate_up_proj");
  EXPECT_EQ(down.name, "model.layers.0.mlp.experts.down_proj");
  EXPECT_EQ(gate.whole_shape(), (Shape{5, 2 * 7, 50}));
  EXPECT_EQ(down.whole_shape(), (Shape{5, 50, 7}));
  const TensorRun run = run_in_files(down, 3);
  EXPECT_EQ(run.first, 2U * 50 * 7 + 3);
  EXPECT_EQ(run.count, 50U * 7 - 3);
}

TEST(LatentAttention, LimitsSequencesToTheTokensThatSparseAttentionSees) {
  for (const char* name : {"deepseek_v32", "glm_moe_dsa"}) {
    ModelConfig c = small(name);
    c.details["index_topk"] = std::uint64_t{40};
    EXPECT_EQ(family(name).obstacle_to_length(c, 40), "");
    EXPECT_NE(family(name).obstacle_to_length(c, 41).find("41 is above model.index_topk 40"),
              std::string::npos);
  }
  EXPECT_EQ(family("deepseek_v3").obstacle_to_length(small(), 1U << 20U), "");
}

std::string refusal(const ModelConfig& c) {
  try {
    static_cast<void>(build_architecture(c));
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(LatentAttention, RefusesWhatItCannotCompute) {
  const auto with = [](const char* key, const text::Json& value,
                       const char* family = "deepseek_v3") {
    ModelConfig c = small(family);
    c.details[key] = value;
    return refusal(c);
  };
  const auto has = [](const std::string& text, const std::string& part) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  };
  EXPECT_EQ(refusal(small()), "");
  has(with("v_head_dim", std::uint64_t{17}), "v_head_dim: 17 is above qk_nope_head_dim + ");
  has(with("kv_lora_rank", std::uint64_t{0}),
      "kv_lora_rank: must be a whole number from 1 to 65536");
  has(with("q_lora_rank", 0.5), "q_lora_rank: must be a whole number from 1 to 65536, got 0.5");
  has(with("qk_rope_head_dim", std::uint64_t{5}), "qk_rope_head_dim: must be even, got 5");
  has(with("first_k_dense_replace", std::uint64_t{0}), "n_routed_experts: must be a whole number");
  has(with("mlp_layer_types", text::parse_json(R"(["sparse"])", "types"), "glm4_moe_lite"),
      "n_routed_experts: must be a whole number");
  has(with("mlp_layer_types", text::parse_json(R"(["dense", "dense"])", "types"), "glm4_moe_lite"),
      "mlp_layer_types: must be a list of num_layers (1) words");
  has(with("q_lora_rank", {}, "glm_moe_dsa"),
      "q_lora_rank: must be a whole number from 1 to 65536");
  has(with("index_topk", std::uint64_t{0}, "deepseek_v32"), "index_topk: must be a whole number");
  has(with("n_group", std::uint64_t{2}, "mistral4"),
      "n_group: must be 1 for a router with a softm");
  has(with("qk_nope_head_dim", std::uint64_t{9}, "mistral4"),
      "qk_nope_head_dim: must be even, got 9");
  has(with("first_k_dense_replace", 0.5), "first_k_dense_replace: must be a whole number");
  ModelConfig c = small();
  c.num_kv_heads = 1;
  has(refusal(c), "num_kv_heads: must be num_heads (3), got 1");
  c = small();
  c.head_dim = 6;
  has(refusal(c), "head_dim: other keys of deepseek_v3 give heads of 16 values");
  c = small();
  c.layer_tiles = 2;
  has(refusal(c), "queries, keys and values are maps of low rank");
}

}  // namespace
}  // namespace ballast::model::latent_test
