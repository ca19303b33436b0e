#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/formats/model_folder.h"
#include "ballast/formats/weight_files.h"
#include "ballast/model/architecture.h"
#include "ballast/model/compute.h"
#include "ballast/model/family.h"

#include "src/formats/read_ahead.h"
#include "src/train/initial_weights.h"
#include "src/train/saved_weights.h"
#include "tests/support/expect_error.h"
#include "tests/support/file_size_limit.h"
#include "tests/support/tags.h"
#include "tests/support/temp_dir.h"

// Files contain whole tensors, even if layers and vocabulary of the model are in tiles.

namespace ballast::formats::tile_files_test {
namespace {

namespace fs = std::filesystem;
using test::expect_error;

constexpr std::uint64_t kSeed = 11;

/// Large enough that pieces bypass the page cache and that reading ahead takes several windows.
model::Architecture model_of(const std::string& family, std::uint64_t tiles) {
  model::ModelConfig c = model::default_config(family);
  c.vocab_size = 777;
  c.hidden_size = 600;
  c.num_layers = 2;
  c.num_heads = 10;
  c.num_kv_heads = 2;
  c.intermediate_size = 3001;
  c.max_sequence = 64;
  c.vocabulary_tiles = tiles;
  c.layer_tiles = tiles;
  if (family == "gpt2" || family == "gpt_neox") c.num_kv_heads = c.num_heads;
  if (family == "gpt_neox") {
    c.details["partial_rotary_factor"] = 0.5;
    c.details["use_parallel_residual"] = false;
  }
  if (family == "qwen3_5") {
    c.details["partial_rotary_factor"] = 0.5;
    c.details["full_attention_interval"] = std::uint64_t{2};
    c.details["linear_key_head_dim"] = c.details["linear_value_head_dim"] = std::uint64_t{12};
  }
  return model::build_architecture(c);
}

std::vector<float> values_of(const model::BlockSpec& block) {
  std::vector<float> values(block.elements);
  for (const model::TensorSpec& tensor : block.tensors) {
    model::initialize(tensor, kSeed, 0, std::span(values).subspan(tensor.offset, tensor.size));
  }
  return values;
}

void save(const model::Architecture& model, const fs::path& folder, Bytes shard_size = kShardSize,
          std::size_t omitted = SIZE_MAX) {
  ModelFolderWriter writer(folder,
                           name_files(split_into_files(train::tensors_of(model), shard_size)));
  for (std::size_t b = 0; b < model.blocks.size(); ++b) {
    if (b != omitted) train::write_block(writer, model.blocks[b], values_of(model.blocks[b]));
  }
  writer.finish();
}

/// Content by file name.
std::map<std::string, std::string> read_folder(const fs::path& folder) {
  std::map<std::string, std::string> files;
  for (const auto& entry : fs::directory_iterator(folder)) {
    files[entry.path().filename().string()] = read_small_file(entry.path());
  }
  return files;
}

TAG_TESTS("slow_sanitized", "TileFiles.AreByteForByteThoseOfTheWholeModel");
TAG_TESTS("one_thread", "TileFiles*");
TEST(TileFiles, AreByteForByteThoseOfTheWholeModel) {
  const test::TempDir dir;
  const std::vector<std::pair<std::string, Bytes>> cases = {
      {"llama", kShardSize}, {"llama", 4 * kMiB}, {"gpt2", 4 * kMiB},
      {"phi3", kShardSize},  {"qwen2", 4 * kMiB}, {"gpt_neox", kShardSize}};
  for (const auto& [family, shard_size] : cases) {
    SCOPED_TRACE(family + " in files of " + std::to_string(shard_size));
    const fs::path whole = dir.path() / "whole";
    const fs::path tiles = dir.path() / "tiles";
    save(model_of(family, 1), whole, shard_size);
    save(model_of(family, 3), tiles, shard_size);
    EXPECT_EQ(read_folder(tiles).size() == 1, shard_size == kShardSize);
    EXPECT_TRUE(read_folder(tiles) == read_folder(whole));
    fs::remove_all(whole);
    fs::remove_all(tiles);
  }
}

TAG_TESTS("slow_sanitized", "TileFiles.WithoutAllTilesAreNotFinished");
TEST(TileFiles, WithoutAllTilesAreNotFinished) {
  const test::TempDir dir;
  const model::Architecture model = model_of("llama", 3);
  for (const char* name : {"layer 1 attention 0", "layer 0 mlp 2", "head 2"}) {
    const auto block = std::find_if(model.blocks.begin(), model.blocks.end(),
                                    [&](const model::BlockSpec& b) { return b.name == name; });
    ASSERT_NE(block, model.blocks.end()) << name;
    for (const Bytes shard_size : {kShardSize, 4 * kMiB}) {
      expect_error(ErrorCategory::state, {"before all its values were written"}, [&] {
        save(model, dir.path() / "w", shard_size,
             static_cast<std::size_t>(block - model.blocks.begin()));
      });
      EXPECT_TRUE(fs::is_empty(dir.path()));
    }
  }
}

TEST(TileFiles, ThatCannotGrowLeaveNothing) {
  const test::TempDir dir;
  const model::Architecture model = model_of("llama", 3);
  const Bytes size = model.parameters() * sizeof(float);
  {
    const test::FileSizeLimit limit(size);  // size without the header
    expect_error(ErrorCategory::io, {"cannot write", "model.safetensors: File too large"},
                 [&] { save(model, dir.path() / "w"); });
  }
  EXPECT_TRUE(fs::is_empty(dir.path()));
  {
    // The limit takes effect when the file gets its space: pieces beyond it fail.
    ModelFolderWriter writer(dir.path() / "w", name_files({train::tensors_of(model)}));
    train::write_block(writer, model.blocks[0], values_of(model.blocks[0]));
    const test::FileSizeLimit limit(size / 8);
    expect_error(ErrorCategory::io, {"cannot write", "model.safetensors: File too large"}, [&] {
      for (std::size_t b = 1; b < model.blocks.size(); ++b) {
        train::write_block(writer, model.blocks[b], values_of(model.blocks[b]));
      }
    });
  }
  EXPECT_TRUE(fs::is_empty(dir.path()));
}

/// Calls `visit(tensor, values)` for the tensors of all blocks, in the order of the fill.
void for_tensors(
    const model::Architecture& model,
    const std::function<void(const model::TensorSpec&, std::span<const float>)>& visit) {
  for (const model::BlockSpec& block : model.blocks) {
    SCOPED_TRACE(block.name);
    const std::vector<float> values = values_of(block);
    for (const model::TensorSpec& tensor : block.tensors) {
      SCOPED_TRACE(tensor.name);
      visit(tensor, std::span(values).subspan(tensor.offset, tensor.size));
    }
  }
}

/// Norms of heads precede the tiles, so files of qwen3_5 in tiles have another order than those of
/// the whole model, which reads them here.
TEST(TileFiles, AreReadInAnyPieces) {
  const test::TempDir dir;
  const std::vector<std::pair<std::string, std::uint64_t>> readers = {
      {"qwen2", 3}, {"gpt2", 3}, {"phi3", 3}, {"gpt_neox", 3}, {"qwen3_5", 1}};
  for (const auto& [family, tiles] : readers) {
    SCOPED_TRACE(family);
    const fs::path folder = dir.path() / family;
    save(model_of(family, 3), folder, 4 * kMiB);
    const model::Architecture model = model_of(family, tiles);
    const WeightFiles files(folder);
    WeightReader reader(files, train::reading_order(files, model, DType::bf16));
    std::mt19937 random(5);
    for_tensors(model, [&](const model::TensorSpec& tensor, std::span<const float> values) {
      for (int i = 0; i < 20; ++i) {
        const Elems first = random() % tensor.size;
        std::vector<float> piece(random() % std::min<Elems>(tensor.size - first, 10'000) + 1);
        train::read_initial_weights(train::place_of(files, tensor), reader, tensor, first, piece);
        EXPECT_TRUE(std::equal(piece.begin(), piece.end(), values.begin() + first)) << first;
      }
    });
  }
}

/// Bytes that this process has requested from the system; nothing if it does not say.
std::optional<Bytes> bytes_asked_for() {
  std::ifstream counters("/proc/self/io");
  std::string name;
  Bytes value = 0;
  while (counters >> name >> value) {
    if (name == "rchar:") return value;
  }
  return std::nullopt;
}

/// GPT-2's first maps are cut by columns, in three ranges. Tiles of attention are five.
class TileFilesOf : public testing::TestWithParam<const char*> {};

TEST_P(TileFilesOf, TheFamilyAreReadOnce) {
  const test::TempDir dir;
  const model::Architecture model = model_of(GetParam(), 8);
  save(model, dir.path() / "w");
  const WeightFiles files(dir.path() / "w");
  const std::optional<Bytes> before = bytes_asked_for();
  const auto order = train::reading_order(files, model, {});
  Bytes ahead = 0;
  for (const ReadAhead::Source& source : order) ahead += source.end - source.begin;
  WeightReader reader(files, order);
  Bytes columns = 0;
  for_tensors(model, [&](const model::TensorSpec& tensor, std::span<const float> values) {
    if (tensor.cuts_rows()) columns += tensor.size * sizeof(float);
    std::vector<float> read(values.size());
    constexpr Elems kAtATime = 4096;
    for (Elems first = 0; first < read.size(); first += kAtATime) {
      const auto piece = std::span(read).subspan(first);
      train::read_initial_weights(train::place_of(files, tensor), reader, tensor, first,
                                  piece.first(std::min<std::size_t>(kAtATime, piece.size())));
    }
    EXPECT_TRUE(std::equal(values.begin(), values.end(), read.begin()));
  });
  EXPECT_EQ(ahead + columns, files.bytes());
  EXPECT_GT(columns, files.bytes() / 5);
  EXPECT_LE(reader.ahead().bytes_read(), ahead + order.size() * 2 * kPage);
  if (!before) return;
  EXPECT_LE(*bytes_asked_for() - *before, files.bytes() + order.size() * 2 * kPage);
}

INSTANTIATE_TEST_SUITE_P(TileFiles, TileFilesOf, testing::Values("llama", "gpt2", "phi3"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace ballast::formats::tile_files_test
