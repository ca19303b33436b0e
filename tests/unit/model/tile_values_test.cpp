#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/model/architecture.h"
#include "ballast/model/family.h"
#include "ballast/model/initialize.h"

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
  return c;
}

std::vector<std::string> families_with_tiles() {
  std::vector<std::string> found;
  for (const std::string& name : family_names()) {
    if (family(name).cuts_layers(default_config(name))) found.push_back(name);
  }
  return found;
}

/// Values by the tensor's name.
using Tensors = std::map<std::string, std::vector<float>>;

Tensors values_of_whole(const Architecture& model) {
  Tensors values;
  for (const BlockSpec& block : model.blocks) {
    for (const TensorSpec& tensor : block.tensors) {
      std::vector<float>& of_tensor = values[tensor.name];
      of_tensor.resize(tensor.size);
      initialize(tensor, kSeed, 0, of_tensor);
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
            (std::vector<std::string>{"llama", "mistral", "qwen2", "smollm3"}));
  for (const std::string& name : families_with_tiles()) {
    SCOPED_TRACE(name);
    const Architecture whole = build_architecture(config_of(name, 1));
    const Architecture tiles = build_architecture(config_of(name, 3));
    ASSERT_EQ(tiles.blocks.size(), whole.blocks.size() + 2 * (2 + 2 + 3 - 1));
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
  const Architecture model = build_architecture(config_of("qwen2", 3));
  for_tensors(model, [&](const TensorSpec& tensor) {
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

TEST(TileValues, HaveTheShapeOfTheWholeTensorInFiles) {
  const Architecture whole = build_architecture(config_of("llama", 1));
  std::map<std::string, std::vector<std::uint64_t>> shapes;
  for_tensors(whole, [&](const TensorSpec& tensor) { shapes[tensor.name] = tensor.shape; });
  const Architecture tiles = build_architecture(config_of("llama", 3));
  std::size_t cut = 0;
  for_tensors(tiles, [&](const TensorSpec& tensor) {
    EXPECT_EQ(tensor.whole_shape(), shapes.at(tensor.name));
    if (tensor.cuts_rows()) ++cut;
  });
  EXPECT_EQ(cut, 2U * (2 + 3));  // the last matrices of attention and of the MLP
}

}  // namespace
}  // namespace ballast::model::tile_values_test
