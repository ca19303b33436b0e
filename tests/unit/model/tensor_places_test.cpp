#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/core/error.h"
#include "ballast/model/architecture.h"
#include "ballast/model/family.h"

namespace ballast::model::tensor_places_test {
namespace {

/// Four tiles of attention, eight of an MLP and of the vocabulary. Tiles of the last two differ in
/// their sizes.
ModelConfig in_tiles(const std::string& family, bool tied) {
  ModelConfig c = default_config(family);
  c.vocab_size = 300;
  c.hidden_size = 64;
  c.num_layers = 2;
  c.num_heads = 8;
  if (family == "llama" || family == "phi3") c.num_kv_heads = 4;
  if (family == "gpt_neox") c.details["use_parallel_residual"] = false;
  c.intermediate_size = 176;
  c.max_sequence = 16;
  c.tie_embeddings = tied;
  c.layer_tiles = 8;
  c.vocabulary_tiles = 8;
  return c;
}

std::vector<ModelConfig> models() {
  std::vector<ModelConfig> all;
  for (const char* family : {"llama", "gpt2", "phi3", "gpt_neox"}) {
    for (const bool tied : {false, true}) all.push_back(in_tiles(family, tied));
  }
  return all;
}

void expect_equal(const BlockSpec& found, const BlockSpec& wanted) {
  EXPECT_EQ(found.name, wanted.name);
  EXPECT_EQ(found.number, wanted.number);
  EXPECT_EQ(found.elements, wanted.elements) << wanted.name;
  EXPECT_EQ(found.parameters, wanted.parameters) << wanted.name;
  ASSERT_EQ(found.tensors.size(), wanted.tensors.size()) << wanted.name;
  for (std::size_t t = 0; t < wanted.tensors.size(); ++t) {
    const TensorSpec& one = found.tensors[t];
    const TensorSpec& other = wanted.tensors[t];
    EXPECT_EQ(one.name, other.name);
    EXPECT_EQ(one.offset, other.offset) << other.name;
    EXPECT_EQ(one.shape, other.shape) << other.name;
    EXPECT_EQ(one.first_element(), other.first_element()) << other.name;
  }
}

TEST(TensorPlaces, HaveTheBlocksOfOneRankTogether) {
  for (const ModelConfig& config : models()) {
    const Architecture one = build_architecture(config);
    for (const std::uint64_t places : {1U, 2U, 4U}) {
      const Architecture model = build_architecture(config, {.tensor = places});
      EXPECT_EQ(count_blocks(model.config, model.split), model.blocks.size());
      EXPECT_EQ(model.parameters(), one.parameters());
      const std::vector<BlockSpec> whole = whole_blocks(model);
      ASSERT_EQ(whole.size(), one.blocks.size());
      for (std::size_t b = 0; b < whole.size(); ++b) expect_equal(whole[b], one.blocks[b]);
    }
  }
}

TEST(TensorPlaces, HaveConsecutiveTiles) {
  for (const ModelConfig& config : models()) {
    const Architecture one = build_architecture(config);
    const Architecture model = build_architecture(config, {.tensor = 4});
    std::uint64_t tokens = 0;
    for (std::uint64_t place = 0; place < 4; ++place) {
      const Architecture own = at_tensor_place(model, place);
      ASSERT_EQ(own.blocks.size(), model.blocks.size());
      for (std::size_t b = 0; b < own.blocks.size(); ++b) {
        const BlockSpec& block = own.blocks[b];
        EXPECT_EQ(block.pieces, 1U);
        EXPECT_EQ(block.elements, model.blocks[b].own_elements());
        EXPECT_EQ(block.name, one.blocks[block.number].name);
      }
      ASSERT_EQ(own.own_vocabulary_tiles(), 2U);
      for (std::size_t t = 0; t < 2; ++t) {
        const VocabularyTile tile = own.tile(t);
        EXPECT_EQ(tile.first, tokens);
        tokens += tile.rows;
        const std::string& matrix = config.tie_embeddings ? own.outer.tokens : own.outer.output;
        EXPECT_EQ(own.blocks[tile.block].tensor(matrix).first_row, tile.first);
        EXPECT_EQ(own.blocks[tile.block].tensor(matrix).shape.front(), tile.rows);
      }
    }
    EXPECT_EQ(tokens, config.vocab_size);
  }
}

TEST(TensorPlaces, ShareDefaultNumbersOfTiles) {
  ModelConfig config = in_tiles("llama", true);
  config.layer_tiles = config.vocabulary_tiles = 0;
  for (const std::uint64_t places : {2U, 4U}) {
    const Architecture model = build_architecture(config, {.tensor = places});
    EXPECT_EQ(model.config.layer_tiles, places);
    EXPECT_EQ(attention_tiles(model.config), places);
    EXPECT_EQ(model.config.vocabulary_tiles, places);
  }
}

std::string refusal(ModelConfig config, std::uint64_t places) {
  try {
    build_architecture(std::move(config), {.tensor = places});
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(TensorPlaces, RefuseTilesThatTheyCannotShare) {
  ModelConfig config = in_tiles("llama", false);
  config.layer_tiles = 3;
  EXPECT_NE(refusal(config, 2).find("model.layer_tiles"), std::string::npos);
  config = in_tiles("llama", false);
  config.num_kv_heads = 1;
  EXPECT_NE(refusal(config, 2).find("1 heads of keys"), std::string::npos);
  config = in_tiles("llama", false);
  config.vocabulary_tiles = 3;
  EXPECT_NE(refusal(config, 2).find("model.vocabulary_tiles"), std::string::npos);
}

}  // namespace
}  // namespace ballast::model::tensor_places_test
