#include <algorithm>
#include <cstddef>
#include <limits>
#include <map>
#include <ostream>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/core/error.h"
#include "ballast/model/architecture.h"
#include "ballast/model/block_layout.h"
#include "ballast/model/compute.h"
#include "ballast/model/family.h"
#include "ballast/text/json.h"

#include "tests/support/tags.h"
#include "tests/unit/model/fixture.h"
#include "tests/unit/model/layers_run.h"

// Layers in tiles have the results of layers in one piece, up to the order of sums.

namespace ballast::model::layer_tiles_test {
namespace {

using test::Bench;
using test::LayerResults;
using test::LayersRun;
using Values = std::vector<double>;

constexpr MicroBatchShape kShape = {2, 21};
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

/// Four heads, two of them with keys. The MLP is five steps of a tile wide, the last of which is
/// not full.
ModelConfig small(std::string_view family) {
  ModelConfig c = default_config(family);
  c.vocab_size = 61;
  c.hidden_size = test::odd(36, 40);
  c.num_layers = 2;
  c.num_heads = 4;
  c.num_kv_heads = 2;
  c.head_dim = test::odd(10, 8);
  c.intermediate_size = test::odd(70, 72);
  c.layer_tiles = 1;
  return c;
}
ModelConfig with_kv_heads(ModelConfig config, std::uint64_t heads) {
  config.num_kv_heads = heads;
  return config;
}
ModelConfig with_detail(ModelConfig config, const std::string& key, const text::Json& value) {
  config.details[key] = value;
  return config;
}
ModelConfig with_biases(const ModelConfig& config) {
  return with_detail(with_detail(config, "attention_bias", true), "mlp_bias", true);
}
ModelConfig small_gpt2() {
  ModelConfig config = with_kv_heads(small("gpt2"), 4);
  config.max_sequence = 32;
  return config;
}
/// Attention and the MLP follow each other, as in most families.
ModelConfig small_gpt_neox() {
  ModelConfig config = with_kv_heads(small("gpt_neox"), 4);
  config.hidden_size = test::odd(36, 32);
  config.head_dim = config.hidden_size / config.num_heads;
  config.details["partial_rotary_factor"] = 0.5;
  config.details["use_parallel_residual"] = false;
  return config;
}
/// The first layer is a gated delta net of three or six heads of keys, the second has attention.
ModelConfig small_delta(std::string_view family) {
  ModelConfig config = small(family);
  config.head_dim = test::odd(12, 8);
  config.details["partial_rotary_factor"] = 0.5;
  config.details["full_attention_interval"] = std::uint64_t{2};
  config.details["linear_num_key_heads"] = std::uint64_t{6};
  config.details["linear_num_value_heads"] = std::uint64_t{test::odd(12, 48)};
  config.details["linear_key_head_dim"] = std::uint64_t{test::odd(7, 8)};
  config.details["linear_value_head_dim"] = std::uint64_t{test::odd(13, 16)};
  if (family == "qwen3_next") {
    config.details["num_experts"] = std::uint64_t{12};
    config.details["mlp_only_layers"] = text::Json::array({std::uint64_t{0}, std::uint64_t{1}});
  }
  return config;
}
/// The first layer is a short convolution, the second has attention.
ModelConfig small_lfm2(bool biased) {
  ModelConfig config = small("lfm2");
  config.details["full_attn_idxs"] = text::Json::array({std::uint64_t{1}});
  config.details["conv_bias"] = biased;
  config.details["block_multiple_of"] = std::uint64_t{test::odd(1, 8)};
  return config;
}
/// Documents of more than 4 tokens have different rotary frequencies.
ModelConfig with_dynamic_scaling(ModelConfig config) {
  config.details["rope_scaling"] = text::Json::object(
      {{"rope_type", "dynamic"}, {"factor", 3.0}, {"original_max_position_embeddings", 4.0}});
  return config;
}
ModelConfig in_tiles(ModelConfig config, std::uint64_t tiles) {
  config.layer_tiles = tiles;
  return config;
}

struct Case {
  const char* name;
  ModelConfig config;
  std::uint64_t tiles = 2;
  DType type = DType::f32;
  bool packed = false;
};

std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << c.name;
}

std::vector<Case> cases() {
  const ModelConfig llama = small("llama");
  return {
      {"llama", llama},
      {"llama_3_tiles", llama, 3},
      {"llama_5_tiles", llama, 5},
      {"llama_packed", llama, 4, DType::f32, true},
      {"llama_in_bf16", llama, 4, DType::bf16},
      {"llama_packed_in_bf16", llama, 3, DType::bf16, true},
      {"llama_dynamic_packed", with_dynamic_scaling(llama), 3, DType::f32, true},
      {"llama_one_attention_tile", with_kv_heads(llama, 1), 3},
      {"llama_four_kv_heads", with_kv_heads(llama, 4), 5},
      {"llama_with_biases", with_biases(llama), 3},
      {"gpt2", small_gpt2()},
      {"gpt2_5_tiles", small_gpt2(), 5},
      {"gpt2_in_bf16", small_gpt2(), 4, DType::bf16},
      {"gpt2_packed", small_gpt2(), 3, DType::f32, true},
      {"phi3", small("phi3"), 3},
      {"phi3_packed_in_bf16", small("phi3"), 2, DType::bf16, true},
      {"gpt_neox", small_gpt_neox(), 4},
      {"gpt_neox_packed", small_gpt_neox(), 3, DType::f32, true},
      {"qwen3", small("qwen3"), 3},
      {"qwen3_four_kv_heads", with_kv_heads(small("qwen3"), 4), 4},
      {"qwen3_packed_in_bf16", small("qwen3"), 2, DType::bf16, true},
      {"qwen2", small("qwen2"), 4},
      {"qwen2_in_bf16", small("qwen2"), 2, DType::bf16},
      {"qwen3_5", small_delta("qwen3_5")},
      {"qwen3_5_3_tiles", small_delta("qwen3_5"), 3},
      {"qwen3_5_packed_in_bf16", small_delta("qwen3_5"), 3, DType::bf16, true},
      {"qwen3_5_with_biases", with_detail(small_delta("qwen3_5"), "attention_bias", true), 2},
      {"qwen3_next_packed", small_delta("qwen3_next"), 3, DType::f32, true},
      {"lfm2", small_lfm2(false)},
      {"lfm2_with_biases", small_lfm2(true), 3},
      {"lfm2_packed_in_bf16", small_lfm2(true), 3, DType::bf16, true},
      // The second layer has no rotary positions.
      {"smollm3", with_detail(small("smollm3"), "no_rope_layer_interval", 2), 3},
      {"mistral", with_detail(small("mistral"), "sliding_window", 5), 3},
      {"mistral_packed", with_detail(small("mistral"), "sliding_window", 5), 2, DType::f32, true}};
}

Bench make(const Case& c, std::uint64_t tiles) {
  return {in_tiles(c.config, tiles), c.type, kShape};
}

LayerResults train(const Case& c, std::uint64_t tiles, double before = kNan) {
  return LayersRun(make(c, tiles), c.packed, before).train();
}

class LayerTiles : public testing::TestWithParam<Case> {};

TEST_P(LayerTiles, EqualLayersInOnePiece) {
  const double tolerance = GetParam().type == DType::f32 ? 5e-6 : 2e-2;
  const LayerResults whole = train(GetParam(), 1);
  const LayerResults tiles = train(GetParam(), GetParam().tiles);
  // A comparison with NaN fails.
  EXPECT_LT(test::relative_error(tiles.out, whole.out), tolerance);
  EXPECT_LT(test::relative_error(tiles.dx, whole.dx), tolerance);
  ASSERT_EQ(tiles.gradients.size(), whole.gradients.size());
  for (const auto& [name, expected] : whole.gradients) {
    ASSERT_TRUE(tiles.gradients.contains(name)) << name;
    const Values& found = tiles.gradients.at(name);
    ASSERT_EQ(found.size(), expected.size()) << name;
    EXPECT_GT(test::dot(expected, expected), 0.0) << name;
    EXPECT_LT(test::relative_error(found, expected), tolerance) << name;
  }
}

TAG_TESTS(
    "slow_emulated",
    "*MemoryContent/*tiles:*MemoryContent/*packed*:*MemoryContent/*heads:*MemoryContent/*biases");
TEST_P(LayerTiles, DoNotDependOnPreviousMemoryContent) {
  const LayerResults expected = train(GetParam(), GetParam().tiles, 0.0);
  for (const double before : {0.0, 7.0, kNan}) {
    EXPECT_EQ(train(GetParam(), GetParam().tiles, before), expected) << before;
  }
}

TAG_TESTS("slow_sanitized,slow_emulated", "*LayerTiles.NeedLess*");
TEST_P(LayerTiles, NeedLessWorkspaceAndNoIntermediates) {
  const Bench whole = make(GetParam(), 1);
  const Bench tiles = make(GetParam(), GetParam().tiles);
  EXPECT_LT(tiles.compute->sizes().workspace, whole.compute->sizes().workspace);
  EXPECT_EQ(whole.compute->sizes().rows, 0U);
  // Norms of heads come after the rows.
  const std::string& family = GetParam().config.family;
  const bool norms = family.starts_with("qwen3") || family == "lfm2";
  EXPECT_EQ(tiles.compute->sizes().rows > tiles.compute->activation_bytes(), norms);
  EXPECT_GE(tiles.compute->sizes().rows, tiles.compute->activation_bytes());
  for (const Bytes bytes : tiles.compute->sizes().intermediates) EXPECT_EQ(bytes, 0U);
}

INSTANTIATE_TEST_SUITE_P(Families, LayerTiles, testing::ValuesIn(cases()),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(LayerTilesInMemory, ShareTheRowsWithTilesOfTheVocabulary) {
  const auto rows = [](std::uint64_t vocabulary_tiles, std::uint64_t layer_tiles) {
    ModelConfig config = in_tiles(small("llama"), layer_tiles);
    config.vocabulary_tiles = vocabulary_tiles;
    return Bench(config, DType::bf16, kShape).compute->sizes().rows;
  };
  EXPECT_EQ(rows(3, 2), std::max(rows(3, 1), rows(1, 2)));
  EXPECT_GT(rows(3, 2), 0U);
}

TEST(LayerTilesInMemory, AreRefusedByPassesOfOtherBlocks) {
  Bench b(in_tiles(small("llama"), 2), DType::f32, kShape);
  const DeviceBytes rows = b.device->allocate(b.compute->sizes().rows, "rows");
  const DeviceBytes some = b.activation();
  const auto sums = b.gradient(b.activations());
  const std::size_t norm = b.architecture.first_layer();
  test::KernelCalls compute = b.kernels();
  for (const std::size_t block : {norm, norm + 1}) {
    EXPECT_THROW(compute.layer_forward(*b.stream, block, some, {}, some, some, {}), Error);
  }
  for (const std::size_t block : {std::size_t{0}, norm, b.architecture.head()}) {
    EXPECT_THROW(compute.tile_forward(*b.stream, block, some, {}, rows, sums, some), Error);
    EXPECT_THROW(compute.tile_backward(*b.stream, block, some, {}, rows, some, sums, {},
                                       Accumulation::first),
                 Error);
  }
  EXPECT_THROW(compute.normalize(*b.stream, norm + 1, some, some, rows, sums), Error);
  EXPECT_THROW(compute.normalize(*b.stream, norm, some, some, {}, sums), Error);
  EXPECT_THROW(compute.norm_backward(*b.stream, norm + 1, some, some, sums, some, {}), Error);
  EXPECT_THROW(compute.norm_backward(*b.stream, b.architecture.head(), some, some, sums, some, {}),
               Error);
}

TEST(LayerTileRules, HoldEveryElementOnce) {
  for (const Case& c : cases()) {
    const Architecture whole = build_architecture(c.config);
    const Architecture tiles = build_architecture(in_tiles(c.config, c.tiles));
    EXPECT_EQ(tiles.parameters(), whole.parameters()) << c.name;
    std::map<std::string, std::vector<int>> held;
    for (const BlockSpec& block : tiles.blocks) {
      for (const TensorSpec& tensor : block.tensors) {
        std::vector<int>& counts = held[tensor.name];
        counts.resize(test::whole_size(tensor));
        test::for_elements(tensor, [&](Elems, Elems in_all) { ++counts.at(in_all); });
      }
    }
    for (const BlockSpec& block : whole.blocks) {
      for (const TensorSpec& tensor : block.tensors) {
        EXPECT_EQ(held[tensor.name], std::vector<int>(tensor.size, 1)) << c.name << tensor.name;
      }
    }
  }
}

TEST(LayerTileRules, CutAnExtentAtMultiplesOfAStep) {
  for (const std::uint64_t size : {1U, 16U, 70U, 72U, 80U, 1000U}) {
    for (std::uint64_t tiles = 1; tiles <= (size + kTileStep - 1) / kTileStep; ++tiles) {
      std::uint64_t next = 0;
      for (std::uint64_t t = 0; t < tiles; ++t) {
        const TileRange range = tile_range(size, tiles, t);
        EXPECT_EQ(range.first, next);
        EXPECT_EQ(range.first % kTileStep, 0U);
        EXPECT_GT(range.size, 0U) << size << " in " << tiles;
        next += range.size;
      }
      EXPECT_EQ(next, size);
    }
  }
}

TEST(LayerTileRules, DependOnlyOnTheShape) {
  // Up to 2^30 elements a layer is whole: Llama 2 with 70 billion parameters.
  EXPECT_EQ(usual_layer_tiles(855'654'400, 80), 1U);
  EXPECT_EQ(usual_layer_tiles(Elems{1} << 30, 1), 1U);
  // Above, tiles of an MLP have up to 2^25 elements.
  EXPECT_EQ(usual_layer_tiles((Elems{1} << 30) + 1, 16), 22U);
  EXPECT_EQ(usual_layer_tiles(Elems{1} << 40, 1), 64U);
  // Larger ones in a model of many layers: Llama 3.1 with 405 billion parameters.
  EXPECT_EQ(usual_layer_tiles(3'187'703'808, 126), 4U);
  EXPECT_EQ(usual_layer_tiles(Elems{1} << 40, 10000), 4U);
}

TEST(LayerTileRules, GiveEveryTileOfAttentionEquallyManyHeadsOfKeys) {
  const auto tiles = [](std::uint64_t kv_heads, std::uint64_t layer_tiles) {
    ModelConfig config = in_tiles(small("llama"), layer_tiles);
    config.num_heads = 24;
    config.num_kv_heads = kv_heads;
    return attention_tiles(build_architecture(config).config);
  };
  EXPECT_EQ(tiles(2, 5), 2U);
  EXPECT_EQ(tiles(1, 5), 1U);
  EXPECT_EQ(tiles(4, 3), 2U);
  EXPECT_EQ(tiles(8, 5), 4U);
  EXPECT_EQ(tiles(3, 2), 1U);
}

TEST(LayerTileRules, AreOwnNumbersForDeltaNetsAndForAttention) {
  const ModelConfig three = build_architecture(in_tiles(small_delta("qwen3_5"), 3)).config;
  EXPECT_EQ(attention_tiles(three, 0), 3U);
  EXPECT_EQ(attention_tiles(three, 1), 2U);
  const ModelConfig one = config_of_tile(three);
  EXPECT_EQ(one.num_kv_heads, 1U);
  EXPECT_EQ(one.detail("linear_num_key_heads").whole(), 2U);
  EXPECT_EQ(one.detail("linear_num_value_heads").whole(), test::odd(4, 16));
}

TEST(LayerTileRules, ReportTheWidestTile) {
  const ModelConfig whole = build_architecture(small("llama")).config;
  const ModelConfig one = config_of_tile(build_architecture(in_tiles(small("llama"), 3)).config);
  EXPECT_EQ(one.num_heads, 2U);
  EXPECT_EQ(one.num_kv_heads, 1U);
  EXPECT_EQ(one.head_dim, whole.head_dim);
  EXPECT_EQ(one.hidden_size, whole.hidden_size);
  EXPECT_EQ(one.intermediate_size, 32U);
  EXPECT_EQ(config_of_tile(whole).intermediate_size, whole.intermediate_size);
  EXPECT_EQ(config_of_tile(whole).num_heads, whole.num_heads);
}

}  // namespace
}  // namespace ballast::model::layer_tiles_test
