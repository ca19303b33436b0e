#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/model/architecture.h"
#include "ballast/model/block_layout.h"
#include "ballast/model/compute.h"
#include "ballast/model/family.h"

// Layers in tiles: the parts of a tensor are those of the whole one, in values and in files.

namespace ballast::model::tile_values_test {
namespace {

constexpr std::uint64_t kSeed = 7;

/// Three tiles of an MLP and two of attention; no width is a multiple of what the generator makes
/// at a time.
ModelConfig config_of(const std::string& family, std::uint64_t layer_tiles) {
  ModelConfig c = default_config(family);
  c.vocab_size = 61;
  c.hidden_size = 36;
  c.num_layers = 2;
  c.num_heads = 4;
  c.num_kv_heads = 2;
  c.head_dim = 14;
  c.intermediate_size = 99;
  c.max_sequence = 80;
  c.init_stddev = 0.5;
  c.vocabulary_tiles = 1;
  c.layer_tiles = layer_tiles;
  if (c.details.contains("n_routed_experts")) c.details["n_routed_experts"] = std::uint64_t{4};
  if (family == "gpt2" || family == "gpt_neox") c.num_kv_heads = c.num_heads;
  if (family == "qwen3_5") {
    c.head_dim = 16;
    c.details["full_attention_interval"] = std::uint64_t{2};
    c.details["linear_num_key_heads"] = std::uint64_t{3};
    c.details["linear_num_value_heads"] = std::uint64_t{6};
    c.details["linear_key_head_dim"] = std::uint64_t{10};
    c.details["linear_value_head_dim"] = std::uint64_t{9};
  }
  if (family == "lfm2") {
    c.head_dim = 16;
    c.details["full_attn_idxs"] = text::Json::array({1});
    c.details["conv_bias"] = true;
    c.details["block_multiple_of"] = std::uint64_t{3};
  }
  if (family != "gpt_neox") return c;
  c.head_dim = 9;
  c.details["partial_rotary_factor"] = 0.5;
  c.details["use_parallel_residual"] = false;
  return c;
}

std::vector<std::string> families_with_tiles() {
  std::vector<std::string> found;
  for (const std::string& name : family_names()) {
    if (cuts_layers(config_of(name, 1))) found.push_back(name);
  }
  return found;
}

std::size_t attention_tiles_of_both_layers(const Architecture& model) {
  return attention_tiles(model.config, 0) + attention_tiles(model.config, 1);
}

/// Values by the tensor's name.
using Tensors = std::map<std::string, std::vector<float>>;

/// Values in the order of files.
Tensors values_of_whole(const Architecture& model) {
  Tensors values;
  for (const BlockSpec& block : model.blocks) {
    for (const TensorSpec& tensor : block.tensors) {
      std::vector<float> in_memory(tensor.size);
      initialize(tensor, kSeed, 0, in_memory);
      std::vector<float>& of_tensor = values[tensor.name];
      of_tensor.resize(tensor.size);
      for (Elems at = 0; at < tensor.size; ++at) {
        of_tensor.at(run_in_files(tensor, at).first) = in_memory[at];
      }
    }
  }
  return values;
}

/// Calls `visit(tensor)` for each tensor or part of one.
template <class Visit>
void for_tensors(const Architecture& model, const Visit& visit) {
  for (const BlockSpec& block : model.blocks) {
    SCOPED_TRACE(block.name);
    for (const TensorSpec& tensor : block.tensors) {
      SCOPED_TRACE(tensor.name);
      visit(tensor);
    }
  }
}

TEST(TileValues, AreThoseOfTheWholeTensor) {
  EXPECT_EQ(families_with_tiles(),
            (std::vector<std::string>{"gpt2", "llama", "mistral", "ministral3", "qwen2", "qwen3",
                                      "smollm3", "phi3", "granite", "granitemoehybrid", "arcee",
                                      "lfm2", "seed_oss", "hunyuan_v1_dense", "ernie4_5",
                                      "gpt_neox", "qwen3_5"}));
  for (const std::string& name : families_with_tiles()) {
    SCOPED_TRACE(name);
    const Architecture whole = build_architecture(config_of(name, 1));
    const Architecture tiles = build_architecture(config_of(name, 3));
    ASSERT_EQ(tiles.blocks.size(),
              whole.blocks.size() + attention_tiles_of_both_layers(tiles) + 2 * (2 + 3 - 1));
    EXPECT_EQ(tiles.parameters(), whole.parameters());
    Tensors missing = values_of_whole(whole);
    const Tensors expected = missing;
    for_tensors(tiles, [&](const TensorSpec& tensor) {
      std::vector<float> values(tensor.size);
      initialize(tensor, kSeed, 0, values);
      const std::vector<float>& in_all = expected.at(tensor.name);
      Elems wrong = 0;
      for (Elems at = 0; at < tensor.size; ++at) {
        const TensorRun run = run_in_files(tensor, at);
        ASSERT_LT(run.first, in_all.size());
        if (values[at] != in_all[run.first]) ++wrong;
        missing[tensor.name][run.first] = -1000.0F;
      }
      EXPECT_EQ(wrong, 0U);
    });
    for (const auto& [tensor, left] : missing) {
      EXPECT_EQ(left, std::vector<float>(left.size(), -1000.0F)) << tensor;
    }
  }
}

TEST(TileValues, DoNotDependOnThePieceTheyAreDrawnIn) {
  std::mt19937 random(3);
  for (const char* name : {"qwen2", "gpt2", "gpt_neox", "lfm2", "qwen3_5"}) {
    SCOPED_TRACE(name);
    for_tensors(build_architecture(config_of(name, 3)), [&](const TensorSpec& tensor) {
      std::vector<float> whole(tensor.size);
      initialize(tensor, kSeed, 0, whole);
      for (int i = 0; i < 50; ++i) {
        const Elems first = random() % tensor.size;
        const Elems count = random() % std::min<Elems>(tensor.size - first, 400) + 1;
        std::vector<float> piece(count);
        initialize(tensor, kSeed, first, piece);
        const auto begin = whole.begin() + static_cast<std::ptrdiff_t>(first);
        EXPECT_TRUE(std::equal(piece.begin(), piece.end(), begin)) << first << ", " << count;
      }
    });
  }
}

TEST(TileValues, HaveTheShapeOfTheWholeTensorInFiles) {
  for (const std::string& name : families_with_tiles()) {
    SCOPED_TRACE(name);
    const Architecture whole = build_architecture(config_of(name, 1));
    std::map<std::string, std::vector<std::uint64_t>> shapes;
    for_tensors(whole, [&](const TensorSpec& tensor) { shapes[tensor.name] = tensor.shape; });
    const Architecture tiles = build_architecture(config_of(name, 3));
    std::size_t cut = 0;
    for_tensors(tiles, [&](const TensorSpec& tensor) {
      EXPECT_EQ(tensor.whole_shape(), shapes.at(tensor.name));
      if (tensor.cuts_rows()) ++cut;
    });
    // The last matrices of attention and of the MLP, or with Conv1D the first ones, three of which
    // are one tensor.
    const std::size_t attention = attention_tiles_of_both_layers(tiles);
    EXPECT_EQ(cut, (name == "gpt2" ? 3 * attention : attention) + 2 * 3);
  }
}

TEST(TileValues, OfFusedMapsAreRangesOfOneTensor) {
  const auto of_tile = [](const char* family) {
    const Architecture model = build_architecture(config_of(family, 3));
    return model.blocks[model.first_layer() + 2];  // the second tile of attention
  };
  const BlockSpec phi3 = of_tile("phi3");
  ASSERT_EQ(phi3.name, "layer 0 attention 1");
  // Two of four heads of queries, after which come two heads of keys and two of values.
  const std::array<std::uint64_t, 3> first_rows = {2 * 14, (4 + 1) * 14, (4 + 2 + 1) * 14};
  for (std::size_t i = 0; i < first_rows.size(); ++i) {
    EXPECT_EQ(phi3.tensors[i].name, "model.layers.0.self_attn.qkv_proj.weight");
    EXPECT_EQ(phi3.tensors[i].first_row, first_rows[i]);
    EXPECT_EQ(phi3.tensors[i].shape.front(), (i == 0 ? 2U : 1U) * 14);
  }
  const BlockSpec gpt2 = of_tile("gpt2");
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(gpt2.tensors[i].name, "transformer.h.0.attn.c_attn.weight");
    EXPECT_EQ(gpt2.tensors[i].first_column, (4 * i + 2) * 14);
    EXPECT_EQ(gpt2.tensors[3 + i].name, "transformer.h.0.attn.c_attn.bias");
    EXPECT_EQ(gpt2.tensors[3 + i].first_row, (4 * i + 2) * 14);
  }
  // Files have queries, keys and values head by head.
  const BlockSpec gpt_neox = of_tile("gpt_neox");
  EXPECT_EQ(gpt_neox.tensors[0].first_row, 2U * 3 * 9);
  EXPECT_EQ(gpt_neox.tensors[0].shape.front(), 2U * 3 * 9);
}

TEST(TileValues, OnlyTheFirstTileHasTheBiasOfTheLastMap) {
  const Architecture model = build_architecture(config_of("gpt2", 3));
  std::map<std::string, std::vector<std::string>> owners;
  for (const BlockSpec& block : model.blocks) {
    for (const TensorSpec& tensor : block.tensors) {
      if (tensor.name.ends_with("c_proj.bias")) owners[tensor.name].push_back(block.name);
    }
  }
  const std::map<std::string, std::vector<std::string>> expected = {
      {"transformer.h.0.attn.c_proj.bias", {"layer 0 attention 0"}},
      {"transformer.h.0.mlp.c_proj.bias", {"layer 0 mlp 0"}},
      {"transformer.h.1.attn.c_proj.bias", {"layer 1 attention 0"}},
      {"transformer.h.1.mlp.c_proj.bias", {"layer 1 mlp 0"}}};
  EXPECT_EQ(owners, expected);
}

}  // namespace
}  // namespace ballast::model::tile_values_test
