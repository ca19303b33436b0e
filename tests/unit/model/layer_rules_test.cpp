#include "src/model/description/layer_rules.h"

#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/model/family.h"

// Layers that no family has yet, and what follows from descriptions of several layers.

namespace ballast::model::layer_rules_test {
namespace {

using Names = std::vector<std::string>;

ModelConfig config_of(std::uint64_t tiles = 1) {
  ModelConfig config;
  config.hidden_size = 32;
  config.num_layers = 4;
  config.layer_tiles = tiles;
  return config;
}

AttentionSpec attention() {
  return {.heads = {4, 2, 8}, .maps = HeadMaps{.maps = {{"q"}, {"k"}, {"v"}}}, .out = {"mix"}};
}
MlpSpec mlp() {
  return {.in = {{"gate"}, {"up"}}, .out = {"down"}, .width = 48};
}
LayerSpec layer_of(std::vector<SublayerSpec> sublayers) {
  return {.prefix = "0.", .sublayers = std::move(sublayers)};
}

Names names_of(const BlockSpec& block) {
  Names names;
  for (const TensorSpec& tensor : block.tensors) names.push_back(tensor.name);
  return names;
}

TEST(LayerBlocks, MayHaveOneSublayer) {
  for (const BodySpec& body : {BodySpec(attention()), BodySpec(mlp())}) {
    const LayerSpec layer = layer_of({{.before = NormSpec{"norm"}, .body = body}});
    const std::vector<BlockSpec> blocks = blocks_of(layer, config_of(), 3);
    ASSERT_EQ(blocks.size(), 1U);
    EXPECT_EQ(blocks[0].name, "layer 3");
    EXPECT_EQ(blocks[0].last_product_elements, blocks[0].tensors.back().size);
    EXPECT_EQ(names_of(blocks[0]).front(), "0.norm.weight");
    EXPECT_EQ(count_blocks(layer, config_of(), {}), 1U);
  }
}

TEST(LayerBlocks, MayHaveTwoSublayersOnOneNorm) {
  const LayerSpec layer = layer_of({{.before = NormSpec{"norm"}, .body = attention()},
                                    {.body = mlp(), .reads = Reads::same_norm}});
  const std::vector<BlockSpec> blocks = blocks_of(layer, config_of(), 0);
  ASSERT_EQ(blocks.size(), 1U);
  EXPECT_EQ(names_of(blocks[0]),
            (Names{"0.norm.weight", "0.q.weight", "0.k.weight", "0.v.weight", "0.mix.weight",
                   "0.gate.weight", "0.up.weight", "0.down.weight"}));
  EXPECT_EQ(blocks[0].last_product_elements, 48U * 32);
  EXPECT_NE(obstacle_to_tiles(std::vector{layer}, 1), "");
}

ExpertsSpec experts_of(std::uint64_t count, std::uint64_t per_token) {
  return {.count = count,
          .per_token = per_token,
          .width = 16,
          .router = "router",
          .prefix = "experts.",
          .gate = "gate",
          .up = "up",
          .down = "down"};
}

TEST(LayerBlocks, NeedNoSublayerBeforeExperts) {
  const ExpertsSpec experts = experts_of(6, 2);
  const LayerSpec layer = layer_of({{.before = NormSpec{"norm"}, .body = experts}});
  const std::vector<BlockSpec> blocks = joined_blocks_of(layer, config_of(), 0, {.experts = 2});
  ASSERT_EQ(blocks.size(), 1U + 3);
  EXPECT_EQ(blocks[0].content, BlockContent::router);
  EXPECT_EQ(blocks[3].name, "layer 0 experts 4-5");
  EXPECT_EQ(count_blocks(layer, config_of(), {.experts = 2}), blocks.size());
  EXPECT_EQ(count_blocks(layer, config_of(), {}), 1U + 6);
}

TEST(LayerBlocks, HaveNormsOnBothSidesOfExperts) {
  const ExpertsSpec experts = experts_of(2, 1);
  LayerSpec layer =
      layer_of({{.before = NormSpec{"first"}, .body = attention(), .after = NormSpec{"second"}},
                {.before = NormSpec{"third"}, .body = experts, .after = NormSpec{"fourth"}}});
  const std::vector<BlockSpec> blocks = blocks_of(layer, config_of(), 0);
  ASSERT_EQ(blocks.size(), 1U + 1 + 2 + 1);
  EXPECT_EQ(count_blocks(layer, config_of(), {}), blocks.size());
  EXPECT_NE(blocks[0].find("second.weight"), nullptr);
  EXPECT_EQ(blocks[4].content, BlockContent::result_norm);
  EXPECT_EQ(names_of(blocks[4]), (Names{"0.fourth.weight"}));
  layer.sublayers[1].before.reset();
  layer.sublayers[1].reads = Reads::same_norm;
  EXPECT_THROW(blocks_of(layer, config_of(), 0), Error) << "its sum has a norm";
  layer.sublayers[1].after.reset();
  EXPECT_EQ(names_of(blocks_of(layer, config_of(), 0)[1]), (Names{"0.router.weight"}));
}

TEST(LayerBlocks, AreCutByHeadsAndWidths) {
  const LayerSpec layer = layer_of({{.before = NormSpec{"first"}, .body = attention()},
                                    {.before = NormSpec{"second"}, .body = mlp()}});
  EXPECT_EQ(obstacle_to_tiles(std::vector{layer}, 2), "");
  const std::vector<BlockSpec> blocks = blocks_of(layer, config_of(3), 0);
  EXPECT_EQ(blocks.size(), 1U + 2 + 1 + 3);
  EXPECT_EQ(count_blocks(layer, config_of(3), {}), blocks.size());
  LayerSpec widest = widest_tile(layer, 3);
  EXPECT_EQ(attention_of(widest).heads, (HeadExtents{2, 1, 8}));
  EXPECT_EQ(mlp_of(widest).width, 16U);
}

TEST(LayerBlocks, AreNotCutForTheFirstReason) {
  const SublayerSpec experts = {.before = NormSpec{"norm"}, .body = ExpertsSpec{.count = 2}};
  const LayerSpec delta = layer_of({{.before = NormSpec{"norm"}, .body = DeltaSpec{}},
                                    {.before = NormSpec{"norm"}, .body = mlp()}});
  const std::vector<LayerSpec> layers = {delta, layer_of({experts})};
  EXPECT_EQ(obstacle_to_tiles(layers, 2), "tensor places cannot share delta nets");
  EXPECT_EQ(obstacle_to_tiles(layers, 1), "some have experts");
  LayerSpec normed = delta;
  normed.sublayers[1].after = NormSpec{"after"};
  EXPECT_EQ(obstacle_to_tiles(std::vector{delta, normed}, 1),
            "they have norms after attention or the MLP");
  EXPECT_EQ(obstacle_to_tiles(std::vector{delta}, 1), "");
  LayerSpec convolution = delta;
  convolution.sublayers[0].body = ConvolutionSpec{.channels = 48, .taps = 3};
  EXPECT_EQ(obstacle_to_tiles(std::vector{convolution}, 2),
            "tensor places cannot share convolutions");
  EXPECT_EQ(obstacle_to_tiles(std::vector{convolution}, 1), "");
  EXPECT_EQ(tiles_of(convolution.sublayers[0].body, 4), 3U) << "groups of 8 channels";
  EXPECT_EQ(widest_tile(convolution, 3).find<ConvolutionSpec>()->channels, 16U);
  convolution.input_norm = NormSpec{.offset = 1.0F};
  EXPECT_EQ(obstacle_to_tiles(std::vector{convolution}, 1), "their input has a norm");
  LayerSpec gated = layer_of({{.before = NormSpec{"norm"}, .body = attention()},
                              {.before = NormSpec{"norm"}, .body = mlp()}});
  maps_of(gated).gate = {"gates"};
  EXPECT_EQ(obstacle_to_tiles(std::vector{gated}, 1), "gates of attention have their own map");
  maps_of(gated).gate = {};
  maps_of(gated).query_norm = maps_of(gated).key_norm = NormSpec{.offset = 1.0F};
  EXPECT_EQ(obstacle_to_tiles(std::vector{gated}, 1), "norms of queries and keys have no weights");
}

TEST(LinkedLayers, ReadTheKeysOfTheLayerThatTheyName) {
  const LayerSpec own = layer_of({{.before = NormSpec{"norm"}, .body = attention()}});
  std::vector<LayerSpec> layers(4, own);
  EXPECT_FALSE(links_layers(layers));
  attention_of(layers[3]).keys_of = 1;
  EXPECT_TRUE(links_layers(layers));
  EXPECT_EQ(keys_of(layers, 3), 1U);
  EXPECT_EQ(keys_of(layers, 2), 2U);
  EXPECT_EQ(last_reader_of_keys(layers, 1), 3U);
  EXPECT_EQ(last_reader_of_keys(layers, 0), 0U);
  EXPECT_EQ(layer_input_width(layers), 0U);
  layers[1].sublayers.push_back({.body = LayerEmbeddingSpec{.width = 5}});
  EXPECT_EQ(layer_input_width(layers), 5U);
}

}  // namespace
}  // namespace ballast::model::layer_rules_test
