// Adapters of experts, shared experts and routers.
#include <cstdint>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/core/error.h"
#include "ballast/model/architecture.h"
#include "ballast/model/family.h"
#include "ballast/text/json.h"

#include "tests/support/expect_error.h"

namespace ballast::model::expert_adapters_test {
namespace {

using Names = std::set<std::string>;
using Shape = std::vector<std::uint64_t>;

ModelConfig small(const std::string& family, const char* count, const char* width) {
  ModelConfig config = default_config(family);
  config.hidden_size = 32;
  config.num_layers = 1;
  config.num_heads = 2;
  config.max_sequence = 8;
  config.intermediate_size = 16;
  config.details[count] = text::Json(4);
  config.details["num_experts_per_tok"] = text::Json(2);
  if (*width != '\0') config.details[width] = text::Json(16);
  return config;
}
ModelConfig small_qwen2() {
  ModelConfig config = small("qwen2_moe", "num_experts", "moe_intermediate_size");
  config.details["shared_expert_intermediate_size"] = text::Json(24);
  return config;
}

Architecture adapted(const ModelConfig& config, const AdapterConfig& adapters,
                     const RankSplit& split = {}) {
  Architecture model = build_architecture(config, split);
  adapt(model, adapters, [](std::string_view key, const std::string& rule) {
    throw Error(ErrorCategory::config, std::string(key) + ": " + rule);
  });
  return model;
}

/// The block of expert `number` of the first layer.
const BlockSpec& expert(const Architecture& model, std::uint64_t number) {
  for (const BlockSpec& block : model.blocks) {
    if (block.content == BlockContent::expert && block.expert == number) return block;
  }
  throw Error(ErrorCategory::state, "no such expert");
}

/// Names of the trained tensors of all blocks with this content.
Names trained(const Architecture& model, BlockContent content) {
  Names names;
  for (const BlockSpec& block : model.blocks) {
    if (block.content != content) continue;
    for (const TensorSpec& tensor : block.tensors) {
      if (!tensor.frozen) names.insert(tensor.name);
    }
  }
  return names;
}

TEST(AdaptersOfExperts, OfSingleMapsAreInTheBlocksOfTheExperts) {
  const Architecture model = adapted(small_qwen2(), {.rank = 3, .targets = {"up_proj"}});
  const std::string name = "model.layers.0.mlp.experts.2.up_proj.lora_";
  const BlockSpec& block = expert(model, 2);
  EXPECT_EQ(block.tensor(name + "A.weight").shape, (Shape{3, 32}));
  EXPECT_EQ(block.tensor(name + "B.weight").shape, (Shape{16, 3}));
  EXPECT_EQ(block.tensor(name + "B.weight").name_in_files, name + "B.weight");
  EXPECT_FALSE(block.tensor(name + "A.weight").frozen);
  EXPECT_TRUE(block.tensor("mlp.experts.2.up_proj.weight").frozen);
  EXPECT_EQ(trained(model, BlockContent::shared_expert),
            (Names{"model.layers.0.mlp.shared_expert.up_proj.lora_A.weight",
                   "model.layers.0.mlp.shared_expert.up_proj.lora_B.weight"}));
  const Architecture alone = adapted(small_qwen2(), {.rank = 3, .targets = {"experts.*.up_proj"}});
  EXPECT_TRUE(trained(alone, BlockContent::shared_expert).empty());
  EXPECT_EQ(trained(alone, BlockContent::expert), trained(model, BlockContent::expert));
}

TEST(AdaptersOfExperts, OfAllExpertsArePartsOfTwoMatricesInFiles) {
  const AdapterConfig wanted = {.rank = 3,
                                .targets = {"experts.gate_up_proj", "mlp.experts.down_proj"}};
  const Architecture model = adapted(small_qwen2(), wanted);
  EXPECT_TRUE(trained(model, BlockContent::shared_expert).empty());
  const std::string module = "model.layers.0.mlp.experts.";
  const BlockSpec& block = expert(model, 2);
  const TensorSpec& a = block.tensor(module + "gate_up_proj.lora_A.weight");
  const TensorSpec& b = block.tensor(module + "gate_up_proj.lora_B.weight");
  EXPECT_EQ(a.shape, (Shape{3, 32}));
  EXPECT_EQ(a.whole_shape(), (Shape{12, 32}));
  EXPECT_EQ(b.shape, (Shape{32, 3}));
  EXPECT_EQ(b.whole_shape(), (Shape{32, 12}));
  // Row e r + j of A, column j E + e of B.
  EXPECT_EQ(run_in_files(a, 33).first, (2 * 3 + 1) * 32 + 1);
  EXPECT_EQ(run_in_files(b, 5 * 3 + 1).first, 5 * 12 + 1 * 4 + 2);
  EXPECT_EQ(run_in_files(b, 5 * 3 + 1).count, 1);
  EXPECT_EQ(a.name_in_files, module + "base_layer.lora_A.weight");
  EXPECT_EQ(block.tensor(module + "down_proj.lora_B.weight").name_in_files,
            module + "lora_B.weight");
  const Architecture one = adapted(small_qwen2(), {.targets = {"gate_up_proj"}});
  EXPECT_EQ(expert(one, 0).tensor(module + "gate_up_proj.lora_A.weight").name_in_files,
            module + "lora_A.weight");
}

/// Rows of gate and up alternate in files.
TEST(AdaptersOfExperts, HaveTheRowsOfTransposedParameters) {
  const Architecture model = adapted(small("gpt_oss", "num_local_experts", ""),
                                     {.rank = 2, .targets = {"gate_up_proj", "down_proj"}});
  const TensorSpec& b =
      expert(model, 1).tensor("model.layers.0.mlp.experts.gate_up_proj.lora_B.weight");
  EXPECT_EQ(b.shape, (Shape{32, 2}));
  EXPECT_EQ(run_in_files(b, 3 * 2).first, 6 * 8 + 1);         // gate 3
  EXPECT_EQ(run_in_files(b, (16 + 3) * 2).first, 7 * 8 + 1);  // up 3
}

TEST(AdaptersOfExperts, AreNamedAsInTheClass) {
  const Architecture model =
      adapted(small("mixtral", "num_local_experts", ""),
              {.rank = 2, .targets = {"mlp.gate", "mlp.experts.gate_up_proj"}});
  const std::string router = "model.layers.0.block_sparse_moe.gate.lora_A.weight";
  EXPECT_TRUE(trained(model, BlockContent::router).contains(router));
  for (const BlockSpec& block : model.blocks) {
    if (block.content != BlockContent::router) continue;
    EXPECT_EQ(block.tensor(router).name_in_files, "model.layers.0.mlp.gate.lora_A.weight");
  }
  EXPECT_EQ(
      expert(model, 1).tensor("model.layers.0.mlp.experts.gate_up_proj.lora_A.weight").first_row,
      2U);
}

TEST(AdaptersOfExperts, RefuseWhatTheyDoNotHave) {
  const auto refuses = [](const AdapterConfig& adapters,
                          std::initializer_list<std::string_view> parts,
                          const RankSplit& split = {}) {
    test::expect_error(ErrorCategory::config, parts,
                       [&] { adapted(small_qwen2(), adapters, split); });
  };
  refuses({.dropout = 0.1, .targets = {"experts.down_proj"}},
          {"dropout: is 0.1", "experts and routers support neither"});
  refuses({.dora = true, .targets = {"mlp.gate"}}, {"dora: is true", "mlp.gate"});
  refuses({.targets = {"gate_up_proj", "down_proj"}},
          {"targets: 'model.layers.0.mlp.experts.0.down_proj' has its own adapter"});
  refuses({.targets = {"up_proj"}}, {"expert parallelism", "ballast.expert_parallel"},
          {.experts = 2});
  // Adapters of attention alone may have both.
  adapted(small_qwen2(), {.dropout = 0.1, .targets = {"q_proj"}});
}

}  // namespace
}  // namespace ballast::model::expert_adapters_test
