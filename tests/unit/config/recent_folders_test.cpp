// config.json of families whose keys have other names, forms or meanings than those of Llama.
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "ballast/config/config.h"
#include "ballast/config/hugging_face_config.h"
#include "ballast/core/error.h"
#include "ballast/model/architecture.h"
#include "ballast/model/family.h"

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

TEST(RecentFolders, OfTrinityHaveKeysThatTheClassDoesNotRead) {
  const json keys = {{"num_experts", 4},
                     {"num_experts_per_tok", 2},
                     {"num_shared_experts", 1},
                     {"moe_intermediate_size", 16},
                     {"num_dense_layers", 2},
                     {"global_attn_every_n_layers", 4},
                     {"mup_enabled", true},
                     {"route_scale", 2.826},
                     {"route_norm", true},
                     {"score_func", "sigmoid"},
                     {"n_group", 1},
                     {"topk_group", 1},
                     {"num_expert_groups", 1},
                     {"num_limited_groups", 1},
                     {"use_grouped_mm", true},
                     {"load_balance_coeff", 0.001},
                     {"head_dim", 8}};
  const Config c = twice("afmoe", keys);
  const model::Architecture model = model::build_architecture(c.model);
  EXPECT_EQ(model.blocks.size(), 1 + 2 + 2 * (1 + 1 + 1 + 4 + 1) + 1U);
  EXPECT_EQ(model.outer.token_factor, std::sqrt(48.0));
  EXPECT_EQ(names_of(c, 3 + 1),
            (std::vector<std::string>{"pre_mlp_layernorm.weight", "mlp.router.gate.weight",
                                      "mlp.expert_bias"}));
  EXPECT_EQ(names_of(c, 3 + 7), std::vector<std::string>{"post_mlp_layernorm.weight"});
  const auto layers = model::layers_of(c.model);
  EXPECT_EQ(layers[2].find<model::AttentionSpec>()->window, 1024U);
  EXPECT_TRUE(layers[2].find<model::AttentionSpec>()->rotary);
  EXPECT_EQ(layers[3].find<model::AttentionSpec>()->window, 0U);
  EXPECT_FALSE(layers[3].find<model::AttentionSpec>()->rotary);
  json other = keys;
  other["score_func"] = "softmax";
  refuse("afmoe", other, R"(score_func is "softmax", but Ballast supports only sigmoid)");
  other = keys;
  other["num_shared_experts"] = 0;
  refuse("afmoe", other, "num_shared_experts");
}

TEST(RecentFolders, OfCommandAPlusHaveDenseFirstLayersWithTheirOwnWindows) {
  const json keys = {{"num_experts", 4},
                     {"num_experts_per_tok", 2},
                     {"first_k_dense_replace", 1},
                     {"prefix_dense_intermediate_size", 80},
                     {"sliding_window_pattern", 2},
                     {"num_shared_experts", 2}};
  const Config c = twice("cohere2_moe", keys);
  const auto layers = model::layers_of(c.model);
  EXPECT_EQ(layers[0].find<model::MlpSpec>()->width, 80U);
  EXPECT_EQ(layers[0].find<model::AttentionSpec>()->window, 0U);
  EXPECT_TRUE(layers[0].find<model::AttentionSpec>()->rotary);
  EXPECT_EQ(layers[1].find<model::AttentionSpec>()->window, 4096U);
  EXPECT_FALSE(layers[2].find<model::AttentionSpec>()->rotary);
  const auto* const experts = layers[1].find<model::ExpertsSpec>();
  EXPECT_EQ(experts->factor, 0.5);
  EXPECT_EQ(experts->shared_factor, 0.5);
  EXPECT_EQ(experts->shared_width, 128U);
  EXPECT_EQ(names_of(c, 1 + 1 + 1), std::vector<std::string>{"mlp.gate.weight"})
      << "the norm is in the block of attention";
  json other = keys;
  other["expert_selection_fn"] = "relu";
  refuse("cohere2_moe", other, R"(must be "softmax" or "sigmoid", got the string "relu")");
  other = keys;
  other.update({{"rms_norm_eps", 0.01}, {"shared_expert_combination_strategy", "sum"}});
  const auto normed = model::layers_of(twice("cohere2_moe", other).model);
  EXPECT_EQ(*normed[1].sublayers[0].before,
            (model::NormSpec{.name = "input_layernorm", .epsilon = 0.01}));
  EXPECT_EQ(normed[1].find<model::ExpertsSpec>()->shared_factor, 1.0);
}

/// A config.json of MiniMax-M3 with smaller sizes, spelled like the published ones.
json minimax_m3() {
  const json text = small("minimax_m3_vl_text", {{"hidden_act", "swigluoai"},
                                                 {"head_dim", 8},
                                                 {"rotary_dim", 4},
                                                 {"num_local_experts", 4},
                                                 {"num_experts_per_tok", 2},
                                                 {"dense_intermediate_size", 80},
                                                 {"shared_intermediate_size", 24},
                                                 {"moe_layer_freq", {0, 1, 1, 1}},
                                                 {"sparse_attention_config",
                                                  {{"sparse_num_index_heads", 2},
                                                   {"sparse_index_dim", 8},
                                                   {"sparse_block_size", 8},
                                                   {"sparse_topk_blocks", 4},
                                                   {"sparse_local_block", 1},
                                                   {"sparse_attention_freq", {0, 0, 1, 1}}}}});
  return {{"model_type", "minimax_m3_vl"},
          {"text_config", text},
          {"vision_config", {{"hidden_size", 32}}},
          {"image_token_index", 7}};
}

TEST(RecentFolders, OfMiniMaxM3AreReadWithTheirNumbersForTypesOfLayers) {
  const Config c = read(minimax_m3());
  EXPECT_EQ(c.model.family, "minimax_m3_vl_text");
  EXPECT_EQ(c.model.number("partial_rotary_factor"), 0.5);
  const auto layers = model::layers_of(c.model);
  const auto* const mlp = layers[0].find<model::MlpSpec>();
  EXPECT_EQ(mlp->width, 80U);
  EXPECT_EQ(mlp->limit, 7.0F);
  EXPECT_EQ(layers[1].find<model::ExpertsSpec>()->shared_width, 24U);
  EXPECT_EQ(names_of(c, 2 + 2),
            (std::vector<std::string>{"block_sparse_moe.shared_experts.gate_proj.weight",
                                      "block_sparse_moe.shared_experts.up_proj.weight",
                                      "block_sparse_moe.shared_experts.down_proj.weight"}));
  const json written = json::parse(make_checkpoint_config(c).compact());
  EXPECT_EQ(section_of(read(written)), section_of(c)) << written;
  EXPECT_EQ(written.at("layer_types")[2], "minimax_m3_sparse");
}

TEST(RecentFolders, OfMiniMaxM3LimitTheLengthOfSequencesIfTheyChooseKeys) {
  const Config c = read(minimax_m3());
  const model::Family& family = model::family(c.model.family);
  EXPECT_EQ(family.obstacle_to_length(c.model, 32), "");
  const std::string obstacle = family.obstacle_to_length(c.model, 33);
  EXPECT_NE(obstacle.find("33 is above the 32 tokens"), std::string::npos) << obstacle;
  json dense = minimax_m3();
  dense["text_config"]["sparse_attention_config"]["sparse_attention_freq"] = {0, 0, 0, 0};
  EXPECT_EQ(family.obstacle_to_length(read(dense).model, 33), "");
}

}  // namespace
}  // namespace ballast::config::recent_folders_test
