// config.json of families whose keys have other names, forms or meanings than those of Llama.
#include <algorithm>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "ballast/config/config.h"
#include "ballast/config/hugging_face_config.h"
#include "ballast/core/error.h"
#include "ballast/model/architecture.h"

#include "src/model/description/layer_rules.h"
#include "tests/support/expect_error.h"
#include "tests/support/temp_dir.h"
#include "tests/unit/config/samples.h"

namespace ballast::config::recent_folders_test {
namespace {

using nlohmann::json;
using test::read;
using test::section_of;

/// A small config.json with further keys.
json small(const std::string& type, const json& added) {
  json config = {{"model_type", type},     {"vocab_size", 300},        {"hidden_size", 48},
                 {"num_hidden_layers", 4}, {"num_attention_heads", 6}, {"num_key_value_heads", 2},
                 {"intermediate_size", 64}};
  config.update(added);
  return config;
}

/// Reads the config.json, and the one that Ballast writes for the same model.
Config twice(const std::string& type, const json& added) {
  Config config = read(small(type, added));
  const json written = json::parse(make_checkpoint_config(config).compact());
  EXPECT_EQ(section_of(read(written)), section_of(config)) << written;
  return config;
}

void refuse(const std::string& type, const json& added, const std::string& message) {
  test::expect_error(ErrorCategory::config, {message}, [&] { read(small(type, added)); });
}

std::vector<std::string> names_of(const Config& config, std::size_t block) {
  std::vector<std::string> names;
  const model::Architecture model = model::build_architecture(config.model);
  for (const auto& tensor : model.blocks.at(block).tensors) {
    names.push_back(tensor.name.substr(tensor.name.find("layers.") + 9));
  }
  return names;
}

TEST(RecentFolders, OfSeedOssHaveTwoKeysForBiases) {
  const Config c = twice("seed_oss", {{"residual_dropout", 0.1}, {"pretraining_tp", 1}});
  EXPECT_TRUE(c.model.flag("attention_bias"));
  EXPECT_FALSE(c.model.flag("attention_out_bias"));
  EXPECT_EQ(c.model.head_dim, 128U);
  EXPECT_TRUE(std::ranges::any_of(c.notes, [](const std::string& note) {
    return note.find("residual_dropout is 0.1") != std::string::npos;
  }));
}

TEST(RecentFolders, OfHunyuanGrowTheirRotaryBaseByAlpha) {
  const json published = {{"alpha", 1000.0},  {"beta_fast", 32}, {"beta_slow", 1},
                          {"factor", 1.0},    {"mscale", 1.0},   {"mscale_all_dim", 0.0},
                          {"type", "dynamic"}};
  const Config c = twice("hunyuan_v1_dense", {{"rope_scaling", published}});
  EXPECT_EQ(section_of(c).at("rope_scaling"), json({{"rope_type", "dynamic"}, {"alpha", 1000.0}}));
  refuse("llama", {{"rope_scaling", published}}, "has the unknown key");
}

TEST(RecentFolders, OfErnieHaveTheirOwnNamesOfKeysOfExperts) {
  const json keys = {{"moe_num_experts", 4},        {"moe_k", 2},
                     {"moe_num_shared_experts", 1}, {"moe_intermediate_size", 16},
                     {"moe_layer_start_index", 1},  {"moe_layer_end_index", 2}};
  const Config c = twice("ernie4_5_moe", keys);
  EXPECT_TRUE(c.model.tie_embeddings);
  const model::Architecture model = model::build_architecture(c.model);
  EXPECT_EQ(model.blocks.size(), 1 + 2 + 2 * (1 + 1 + 1 + 4) + 1U);
  const model::TensorSpec& bias = model.blocks[3].tensor("mlp.moe_statics.e_score_correction_bias");
  EXPECT_EQ(bias.whole_shape(), (std::vector<std::uint64_t>{1, 4}));
  json biased = keys;
  biased["use_bias"] = true;
  refuse("ernie4_5_moe", biased, "use_bias is true, but Ballast supports only false");
  json balanced = keys;
  balanced["output_router_logits"] = true;
  refuse("ernie4_5_moe", balanced, "output_router_logits is true, but Ballast supports only false");
}

TEST(RecentFolders, OfExaoneHavePositionsWithoutAWindowOnlyIfNoLayerHasOne) {
  const auto rotating = [](const Config& c) {
    std::size_t layers = 0;
    for (const model::LayerSpec& layer : model::layers_of(c.model)) {
      layers += layer.find<model::AttentionSpec>()->rotary ? 1 : 0;
    }
    return layers;
  };
  EXPECT_EQ(rotating(twice("exaone4", {{"sliding_window_pattern", "LLLG"}})), 3U);
  EXPECT_EQ(rotating(twice("exaone4",
                           {{"sliding_window", nullptr},
                            {"layer_types", json::array({"full_attention", "full_attention",
                                                         "full_attention", "full_attention"})}})),
            4U);
  refuse("exaone4", {{"sliding_window_pattern", 3}}, "sliding_window_pattern is 3");
}

TEST(RecentFolders, OfMellumHaveRotaryPositionsByTypeOfLayer) {
  const json rope = {{"full_attention", {{"rope_type", "default"}, {"rope_theta", 7.0}}},
                     {"sliding_attention", {{"rope_type", "default"}, {"rope_theta", 3.0}}}};
  const Config c = twice(
      "mellum", {{"rope_parameters", rope}, {"num_local_experts", 4}, {"num_experts_per_tok", 2}});
  EXPECT_EQ(c.model.number("rope_theta"), 7.0);
  EXPECT_EQ(c.model.number("rope_local_base_freq"), 3.0);
  EXPECT_EQ(c.model.number("num_experts"), 4.0);
}

TEST(RecentFolders, OfGraniteWithoutMambaLayersAreRead) {
  const json keys = {{"shared_intermediate_size", 40},
                     {"num_local_experts", 0},
                     {"mamba_n_heads", 6},
                     {"position_embedding_type", "rope"},
                     {"layer_types", {"attention", "attention", "attention", "attention"}}};
  const Config c = twice("granitemoehybrid", keys);
  EXPECT_EQ(c.model.intermediate_size, 40U);
  json mixed = keys;
  mixed["layer_types"][1] = "mamba";
  refuse("granitemoehybrid", mixed, "Ballast has no Mamba layers");
  mixed.erase("layer_types");
  refuse("granitemoehybrid", mixed, "Ballast has no Mamba layers");
  mixed = keys;
  mixed["num_local_experts"] = 8;
  refuse("granitemoehybrid", mixed, "num_local_experts is 8, but Ballast supports only 0");
  mixed.erase("num_local_experts");  // which means 8 to transformers
  refuse("granitemoehybrid", mixed, "num_local_experts is 8, but Ballast supports only 0");
}

TEST(RecentFolders, OfGraniteSwashHaveARotaryBasePerLayer) {
  const Config c = twice("granite_swa", {{"layer_rope_theta", {0, 50.0, 50.0, 9.0}}});
  const auto layers = model::layers_of(c.model);
  EXPECT_FALSE(layers[0].find<model::AttentionSpec>()->rotary);
  EXPECT_EQ(layers[2].find<model::AttentionSpec>()->rotary->keys, 0U);
  EXPECT_EQ(layers[3].find<model::AttentionSpec>()->rotary->keys, 1U);
  refuse("granite_swa", {{"layer_rope_theta", {1.0}}}, "must be a list of num_layers (4) numbers");
}

TEST(RecentFolders, OfOlmoHybridMayHaveNoPositions) {
  const json none = {{"rope_type", "default"}, {"rope_theta", nullptr}};
  EXPECT_EQ(twice("olmo_hybrid", {{"rope_parameters", none}}).model.number("rope_theta"), 0.0);
  const Config c = twice("olmo_hybrid", {{"rope_parameters", nullptr}});
  EXPECT_EQ(c.model.number("rope_theta"), 10000.0);
  EXPECT_EQ(c.model.number("linear_key_head_dim"), 6.0);
  EXPECT_EQ(c.model.number("linear_value_head_dim"), 12.0);
  EXPECT_EQ(names_of(c, 1).front(), "attention_layer_norm.weight");
  EXPECT_EQ(names_of(c, 4).back(), "post_feedforward_layernorm.weight");
}

TEST(RecentFolders, OfCommandAHaveAnEpsilonOfLayerNorms) {
  const Config c = twice("cohere2", {{"layer_norm_eps", 0.01}, {"sliding_window_pattern", 2}});
  EXPECT_EQ(c.model.norm_epsilon, 0.01);
  EXPECT_EQ(c.model.number("logit_scale"), 0.0625);
}

TEST(RecentFolders, OfSolarOpenAndHy3AreRead) {
  twice("solar_open",
        {{"n_routed_experts", 4}, {"num_experts_per_tok", 2}, {"first_k_dense_replace", 0}});
  const Config c = twice("hy_v3", {{"num_experts", 4}, {"num_experts_per_tok", 2}});
  EXPECT_EQ(model::build_architecture(c.model).blocks.size(), 1 + 1 + 3 * (3 + 4) + 1U);
  refuse("hy_v3", {{"mlp_bias", true}}, "mlp_bias is true, but Ballast supports only false");
}

}  // namespace
}  // namespace ballast::config::recent_folders_test
