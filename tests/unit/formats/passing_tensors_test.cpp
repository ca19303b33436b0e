#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "ballast/config/config.h"
#include "ballast/formats/export.h"
#include "ballast/formats/model_folder.h"
#include "ballast/formats/weight_files.h"

#include "src/formats/folder_layout.h"
#include "src/train/initial_weights.h"
#include "tests/support/expect_error.h"
#include "tests/support/fixtures.h"
#include "tests/support/temp_dir.h"

// The files are those of tests/data/make_passing_fixture.py.

namespace ballast::formats::passing_tensors_test {
namespace {

namespace fs = std::filesystem;
using test::expect_error;

constexpr std::array kFixtures = {"gemma3",      "qwen3_vl",       "qwen2_5_vl",
                                  "glm_moe_dsa", "mistral3",       "kimi_k25",
                                  "qwen3_5_moe", "gemma4_experts", "gemma4"};

fs::path fixture(const std::string& name) {
  return test::fixture("passing") / name;
}

config::Config config_of(const fs::path& folder) {
  const nlohmann::json text = {{"data", {{"tokens", "none.bin"}, {"sequence_length", 8}}},
                               {"model", {{"path", folder.string()}}},
                               {"train_micro_batch_size_per_gpu", 1}};
  return config::parse(text.dump(), "/", "test", {});
}

/// Name, type, shape and bytes of a tensor.
using Content =
    std::tuple<std::string, std::string, std::vector<std::uint64_t>, std::vector<std::byte>>;

/// The tensors of a folder by name.
std::vector<Content> content_of(const fs::path& folder) {
  const WeightFiles files(folder);
  std::vector<Content> content;
  for (const WeightPlace& place : files.tensors()) {
    std::vector<std::byte> bytes(place.tensor->bytes);
    read_stored(place, 0, bytes);
    content.emplace_back(place.tensor->name, place.tensor->dtype, place.tensor->shape,
                         std::move(bytes));
  }
  std::sort(content.begin(), content.end());
  return content;
}

std::vector<std::string> files_of(const fs::path& folder) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) {
    const std::string name = entry.path().filename().string();
    if (!name.starts_with("model")) names.push_back(name);
  }
  std::sort(names.begin(), names.end());
  return names;
}

/// The part of tensor `name` in a file that also has `others`.
std::optional<PassingPart> part_of(const std::string& name,
                                   const std::vector<std::string>& others = {}) {
  const test::TempDir dir;
  std::vector<TensorToStore> tensors = {{name, DType::f32, {0}}};
  for (const std::string& other : others) tensors.push_back({other, DType::f32, {0}});
  SafetensorsWriter(dir.path() / kSingleWeights, tensors).finish();
  return passing_part(WeightFiles(dir.path()), name);
}

TEST(PassingTensors, AreKnownByTheirNames) {
  EXPECT_EQ(part_of("mtp.fc.weight"), PassingPart::mtp);
  EXPECT_EQ(part_of("model.mtp_layers.0.norm.weight"), PassingPart::mtp);
  EXPECT_EQ(part_of("visual.blocks.0.bias"), PassingPart::vision);
  EXPECT_EQ(part_of("model.visual.blocks.0.bias"), PassingPart::vision);
  EXPECT_EQ(part_of("model.vision_tower.layers.0.weight"), PassingPart::vision);
  EXPECT_EQ(part_of("multi_modal_projector.linear_1.weight"), PassingPart::projector);
  EXPECT_EQ(part_of("model.language_model.visual.x"), PassingPart::vision);
  EXPECT_EQ(part_of("audio_tower.conv1.weight"), PassingPart::audio);
  EXPECT_EQ(part_of("image_newline"), PassingPart::vision);
  for (const char* name : {"model.layers.2.mlp.up_proj.weight", "visuals.x", "lm_head.weight",
                           "model.layers.0.mtp.weight", "model", "", "other.visual.x"}) {
    EXPECT_EQ(part_of(name), std::nullopt) << name;
  }
}

TEST(PassingTensors, IncludeLayersForMultiTokenPrediction) {
  const std::string mark = "model.layers.61.eh_proj.weight";
  EXPECT_EQ(part_of("model.layers.61.mlp.up_proj.weight", {mark}), PassingPart::mtp);
  EXPECT_EQ(part_of("model.layers.61.shared_head.norm.weight", {mark}), PassingPart::mtp);
  EXPECT_EQ(part_of(mark), PassingPart::mtp);
  EXPECT_EQ(part_of("model.layers.6.mlp.up_proj.weight", {mark}), std::nullopt);
  EXPECT_EQ(part_of("model.layers.x.up_proj.weight", {mark}), std::nullopt);
  EXPECT_EQ(part_of("model.layers.61", {mark}), std::nullopt);
}

TEST(PassingTensors, AreAcceptedByTheirModelAndCounted) {
  for (const char* name : kFixtures) {
    train::check_initial_weights(config_of(fixture(name)));
  }
  const WeightFiles files(fixture("qwen3_vl"));
  const auto totals = passing_totals(files);
  ASSERT_EQ(totals.size(), 2U);
  EXPECT_EQ(totals.at(PassingPart::mtp).tensors, 4U);
  EXPECT_EQ(totals.at(PassingPart::mtp).elements, 30U + 21 + 2 + 3);
  EXPECT_EQ(totals.at(PassingPart::mtp).bytes, 60U + 21 + 16 + 12);
  std::size_t visual = 0;
  for (const WeightPlace& place : files.tensors()) {
    visual += place.tensor->name.starts_with("model.visual.") ? 1 : 0;
  }
  EXPECT_EQ(totals.at(PassingPart::vision).tensors, visual);
  EXPECT_EQ(passing_tensors(files).size(), visual + 4);
}

TEST(PassingTensors, IncludeIndexersOfModelsWithSparseAttention) {
  EXPECT_EQ(part_of("model.layers.0.self_attn.indexer.wk.weight"), PassingPart::indexer);
  EXPECT_EQ(part_of("model.layers.0.self_attn.indexers.weight"), std::nullopt);
  const auto totals = passing_totals(WeightFiles(fixture("glm_moe_dsa")));
  ASSERT_EQ(totals.size(), 1U);
  EXPECT_EQ(totals.at(PassingPart::indexer).tensors, 2U * 5);
  EXPECT_EQ(totals.at(PassingPart::indexer).elements, 2U * (16 * 8 + 8 * 32 + 2 * 32 + 8 + 8));

  const test::TempDir dir;
  fs::copy(fixture("glm_moe_dsa") / kSingleWeights, dir.path() / kSingleWeights);
  auto dense = nlohmann::json::parse(read_small_file(fixture("glm_moe_dsa") / "config.json"));
  dense["model_type"] = "glm4_moe_lite";
  for (const char* key : {"index_head_dim", "index_n_heads", "index_topk", "indexer_types",
                          "layer_types", "first_k_dense_replace"}) {
    dense.erase(key);
  }
  dir.write("config.json", dense.dump());
  expect_error(ErrorCategory::data, {"has 10 tensors that this model does not use"},
               [&] { train::check_initial_weights(config_of(dir.path())); });
}

TEST(PassingTensors, IncludeKeysThatNoLayerReads) {
  const auto totals = passing_totals(WeightFiles(fixture("gemma4")));
  EXPECT_EQ(totals.at(PassingPart::unread_keys).tensors, 3U);
  EXPECT_EQ(totals.at(PassingPart::unread_keys).elements, 2U * 24 * 32 + 24);
  // Without shared keys, the layer reads them.
  const test::TempDir dir;
  fs::copy(fixture("gemma4") / kSingleWeights, dir.path() / kSingleWeights);
  auto other = nlohmann::json::parse(read_small_file(fixture("gemma4") / "config.json"));
  other["text_config"]["num_kv_shared_layers"] = 0;
  dir.write("config.json", other.dump());
  EXPECT_FALSE(passing_totals(WeightFiles(dir.path())).contains(PassingPart::unread_keys));
}

TEST(PassingTensors, AreCopiedByteByByte) {
  for (const char* name : kFixtures) {
    const test::TempDir dir;
    export_model(fixture(name), dir.path() / "out", {}, [](Bytes, Bytes) {});
    EXPECT_TRUE(content_of(dir.path() / "out") == content_of(fixture(name))) << name;
    EXPECT_EQ(files_of(dir.path() / "out"), files_of(fixture(name))) << name;
    for (const std::string& file : files_of(fixture(name))) {
      EXPECT_EQ(read_small_file(dir.path() / "out" / file), read_small_file(fixture(name) / file));
    }
  }
}

TEST(PassingTensors, AreCopiedInPieces) {
  constexpr Bytes kBytes = 300'001;  // several pieces, the last one smaller
  const test::TempDir dir;
  fs::create_directory(dir.path() / "m");
  std::vector<std::byte> bytes(kBytes);
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i % 251);
  SafetensorsWriter writer(
      dir.path() / "m" / kSingleWeights,
      {{.name = "visual.w", .shape = {kBytes}, .copied_dtype = "U8", .copied_bytes = kBytes},
       {.name = "mtp.none", .shape = {0, 3}, .copied_dtype = "I64"}});
  writer.write_bytes("visual.w", bytes, 0);
  writer.finish();
  dir.write("m/config.json", "{}");
  Bytes last = 0;
  const ExportSummary summary = export_model(dir.path() / "m", dir.path() / "out", {},
                                             [&](Bytes done, Bytes) { last = done; });
  EXPECT_EQ(summary.bytes, kBytes);
  EXPECT_GT(last, kBytes / 2);
  EXPECT_LT(last, kBytes);
  EXPECT_TRUE(content_of(dir.path() / "out") == content_of(dir.path() / "m"));
}

TEST(PassingTensors, KeepTheirTypeWhenOthersAreConverted) {
  const test::TempDir dir;
  export_model(fixture("qwen3_vl"), dir.path() / "out", {.type = DType::f32, .shard_size = 20000},
               [](Bytes, Bytes) {});
  const WeightFiles from(fixture("qwen3_vl"));
  const WeightFiles found(dir.path() / "out");
  EXPECT_EQ(found.path().filename(), kWeightsIndex);
  EXPECT_EQ(found.tensors().size(), from.tensors().size());
  for (const WeightPlace& place : from.tensors()) {
    const std::string& name = place.tensor->name;
    ASSERT_NE(found.find(name), nullptr) << name;
    const bool passes = passing_part(from, name).has_value();
    EXPECT_EQ(found.find(name)->tensor->dtype, passes ? place.tensor->dtype : "F32") << name;
  }
  const auto config = nlohmann::json::parse(read_small_file(dir.path() / "out/config.json"));
  EXPECT_EQ(config["dtype"], "float32");
  train::check_initial_weights(config_of(dir.path() / "out"));
}

TEST(PassingTensors, AreNotAllUnusedTensors) {
  const test::TempDir dir;
  const WeightFiles from(fixture("gemma3"));
  std::vector<TensorToStore> tensors = {{"depth_tower.weight", DType::f32, {1}}};
  for (const WeightPlace& place : from.tensors()) {
    tensors.push_back({place.tensor->name, DType::f32, place.tensor->shape});
  }
  ModelFolderWriter writer(dir.path() / "m", name_files({tensors}));
  for (const TensorToStore& tensor : tensors) {
    const std::vector<float> zeros(bytes_of(tensor) / sizeof(float));
    writer.write(tensor.name, zeros);
  }
  writer.add("config.json", read_small_file(fixture("gemma3/config.json")));
  writer.finish();
  expect_error(ErrorCategory::data,
               {"has 1 tensor that this model does not use (depth_tower.weight)"},
               [&] { train::check_initial_weights(config_of(dir.path() / "m")); });
}

TEST(PassingTensors, AMissingTensorOfTheTextModelIsNamed) {
  const test::TempDir dir;
  SafetensorsWriter(
      dir.path() / kSingleWeights,
      {{"language_model.model.norm.weight", DType::f32, {0}}, {"vision_tower.x", DType::f32, {0}}})
      .finish();
  dir.write("config.json", read_small_file(fixture("gemma3/config.json")));
  expect_error(ErrorCategory::data, {"has no tensor 'model.embed_tokens.weight'"},
               [&] { train::check_initial_weights(config_of(dir.path())); });
}

}  // namespace
}  // namespace ballast::formats::passing_tensors_test
