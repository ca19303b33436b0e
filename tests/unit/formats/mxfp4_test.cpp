#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "ballast/config/config.h"
#include "ballast/formats/export.h"
#include "ballast/formats/model_folder.h"
#include "ballast/formats/weight_files.h"

#include "src/formats/quantized_matrices.h"
#include "src/train/initial_weights.h"
#include "src/train/saved_weights.h"
#include "tests/support/expect_error.h"
#include "tests/support/fixtures.h"
#include "tests/support/temp_dir.h"

// The files are those of tests/data/make_mxfp4_fixture.py.

namespace ballast::formats::mxfp4_test {
namespace {

namespace fs = std::filesystem;
using test::expect_error;

fs::path fixture(const std::string& name) {
  return test::fixture("mxfp4") / name;
}

/// The bytes of a tensor as they are stored.
std::vector<std::byte> stored(const WeightFiles& files, const std::string& name) {
  const WeightPlace* const place = files.find(name);
  EXPECT_NE(place, nullptr) << name;
  std::vector<std::byte> bytes(place == nullptr ? 0 : place->tensor->bytes);
  if (place != nullptr) read_stored(*place, 0, bytes);
  return bytes;
}

config::Config config_of(const fs::path& folder) {
  const nlohmann::json text = {{"data", {{"tokens", "none.bin"}, {"sequence_length", 8}}},
                               {"bf16", {{"enabled", true}}},
                               {"model", {{"path", folder.string()}}},
                               {"train_micro_batch_size_per_gpu", 1}};
  return config::parse(text.dump(), "/", "test", {});
}

TEST(Mxfp4, EveryCodeAndScaleIsDecodedAsTransformersDoes) {
  const SafetensorsReader file(fixture("decoded.safetensors"));
  const auto read = [&](const char* name) {
    const StoredTensor& tensor = *file.find(name);
    std::vector<std::byte> bytes(tensor.bytes);
    read_stored({&tensor, &file}, 0, bytes);
    return bytes;
  };
  const std::vector<std::byte> codes = read("blocks");
  const std::vector<std::byte> scales = read("scales");
  std::vector<Bf16> found(codes.size() * 2);
  mxfp4::decode(codes, scales, 0, found);
  // Their table is [1, 32, 255].
  const std::vector<std::byte> expected = read("decoded");
  ASSERT_EQ(expected.size(), found.size() * sizeof(Bf16));
  for (std::size_t i = 0; i < found.size(); ++i) {
    Bf16 value;
    std::memcpy(&value, expected.data() + (i % 32 * 255 + i / 32) * sizeof value, sizeof value);
    ASSERT_EQ(found[i].bits, value.bits) << "scale " << i / 32;
  }
  std::vector<Bf16> part(45);
  mxfp4::decode(codes, scales, 77, part);
  for (std::size_t i = 0; i < part.size(); ++i) EXPECT_EQ(part[i].bits, found[77 + i].bits);
}

TEST(Mxfp4, TheLargestScaleIsNotANumber) {
  const std::vector<std::byte> codes(16, std::byte{0x31});
  std::vector<Bf16> found(32);
  mxfp4::decode(codes, std::vector{std::byte{255}}, 0, found);
  for (const Bf16 value : found) EXPECT_TRUE(std::isnan(to_float(value)));
}

TEST(Mxfp4, FoldersAreReadAsThoseWithDecodedWeights) {
  const config::Config config = config_of(fixture("model"));
  train::check_initial_weights(config);
  EXPECT_EQ(config.model.family, "gpt_oss");
  const model::Architecture model = model::build_architecture(config.model);
  const WeightFiles files(fixture("model"));
  const WeightFiles decoded(fixture("decoded.safetensors"));
  std::mt19937 random(5);
  for (const bool in_order : {true, false}) {
    WeightReader reader(files, train::reading_order(files, model, DType::bf16));
    for (const model::BlockSpec& block : model.blocks) {
      for (const model::TensorSpec& tensor : block.tensors) {
        const WeightPlace& place = train::place_of(files, tensor);
        if (place.quantized == nullptr) continue;
        EXPECT_EQ(type_of(place), DType::bf16);
        const std::vector<std::byte> theirs = stored(decoded, tensor.name);
        const Elems first = in_order ? 0 : random() % tensor.size;
        std::vector<Bf16> found(tensor.size - first);
        train::read_stored_weights(place, reader, tensor, first,
                                   std::as_writable_bytes(std::span(found)));
        for (std::size_t i = 0; i < found.size(); ++i) {
          const Elems there = model::run_in_files(tensor, first + i).first;
          ASSERT_EQ(std::memcmp(&found[i], theirs.data() + there * sizeof(Bf16), sizeof(Bf16)), 0)
              << block.name << " " << tensor.name << " " << i;
        }
      }
    }
  }
}

/// Exports to `out` and checks what is not dequantised.
void export_fixture(const fs::path& out, const ExportOptions& options) {
  Bytes last = 0;
  const ExportSummary summary =
      export_model(fixture("model"), out, options, [&](Bytes done, Bytes) { last = done; });
  EXPECT_LT(last, summary.bytes);
  const auto config = nlohmann::json::parse(read_small_file(out / "config.json"));
  EXPECT_FALSE(config.contains("quantization_config"));
  EXPECT_EQ(config["swiglu_limit"], 7.0);
  train::check_initial_weights(config_of(out));
}

/// The scale and the values of a quantised block that begins with `first`; the rest is 0.
std::pair<int, std::vector<float>> encoded(const std::vector<float>& first) {
  constexpr Elems kStep = 3;
  std::vector<float> values(mxfp4::kBlock * kStep, 99.0F);
  for (Elems i = 0; i < mxfp4::kBlock; ++i) {
    values[i * kStep] = i < first.size() ? first[i] : 0.0F;
  }
  std::array<std::byte, mxfp4::kCodes> codes = {};
  const std::uint8_t scale = mxfp4::encode(values.data(), kStep, codes);
  std::array<float, mxfp4::kBlock> decoded = {};
  mxfp4::decode(codes, scale, decoded);
  return {scale - 127,
          {decoded.begin(), decoded.begin() + static_cast<std::ptrdiff_t>(first.size())}};
}

TEST(Mxfp4, TheNearestCodesOfTheBetterScaleAreTaken) {
  using Found = std::pair<int, std::vector<float>>;
  // Middles go to even codes: 0, 1, 1, 2, 2, 4, 4.
  EXPECT_EQ(encoded({6, 0.25F, 0.75F, 1.25F, 1.75F, 2.5F, 3.5F, 5}),
            (Found{0, {6, 0, 1, 1, 2, 2, 4, 4}}));
  EXPECT_EQ(encoded({-0.375F, 0.03125F}), (Found{-4, {-0.375F, 0.03125F}}));
  // 7.5 would be cut off at 6 with the scale 1, but the small values need it.
  EXPECT_EQ(encoded({7.5F}), (Found{1, {8}}));
  EXPECT_EQ(encoded({6.5F, 0.5F, 0.5F, 0.5F}), (Found{0, {6, 0.5F, 0.5F, 0.5F}}));
  EXPECT_EQ(encoded({0.0F}), (Found{0, {0}}));
  EXPECT_EQ(encoded({0x1p127F, 0x1p-140F}), (Found{125, {0x1p127F, 0.0F}}));
  EXPECT_EQ(encoded({0x1p-140F}).first, -127);
}

TEST(Mxfp4, ExportWritesDecodedWeights) {
  const test::TempDir dir;
  export_fixture(dir.path() / "out", {.type = DType::bf16});
  const WeightFiles from(fixture("model"));
  const WeightFiles found(dir.path() / "out");
  const WeightFiles decoded(fixture("decoded.safetensors"));
  EXPECT_EQ(found.tensors().size(), from.tensors().size());
  for (const WeightPlace& place : from.tensors()) {
    const std::string& name = place.tensor->name;
    ASSERT_NE(found.find(name), nullptr) << name;
    EXPECT_EQ(found.find(name)->tensor->shape, place.tensor->shape) << name;
    EXPECT_EQ(found.find(name)->tensor->dtype, "BF16") << name;
    EXPECT_EQ(stored(found, name), stored(place.quantized == nullptr ? from : decoded, name))
        << name;
  }
  export_fixture(dir.path() / "wide", {.type = DType::f32});
  const WeightFiles wide(dir.path() / "wide");
  for (const WeightPlace& place : found.tensors()) {
    std::vector<float> expected(place.tensor->elements);
    std::vector<float> values(place.tensor->elements);
    found.read(place.tensor->name, expected);
    wide.read(place.tensor->name, values);
    EXPECT_EQ(values, expected) << place.tensor->name;
  }
}

/// After import and export, every tensor of a folder has the same values.
TEST(Mxfp4, StackedExpertsComeBackAsTheyWere) {
  const test::TempDir dir;
  export_fixture(dir.path() / "wide", {.type = DType::f32});
  const model::Architecture model = model::build_architecture(config_of(dir.path() / "wide").model);
  const WeightFiles files(dir.path() / "wide");
  ModelFolderWriter writer(dir.path() / "again",
                           name_files(split_into_files(train::tensors_of(model), kShardSize)));
  WeightReader reader(files, train::reading_order(files, model, {}));
  for (const model::BlockSpec& block : model.blocks) {
    std::vector<float> values(block.elements);
    for (const model::TensorSpec& tensor : block.tensors) {
      train::read_initial_weights(train::place_of(files, tensor), reader, tensor, 0,
                                  std::span(values).subspan(tensor.offset, tensor.size));
    }
    train::write_block(writer, block, values);
  }
  writer.finish();
  const WeightFiles again(dir.path() / "again");
  EXPECT_EQ(again.tensors().size(), files.tensors().size());
  for (const WeightPlace& place : files.tensors()) {
    EXPECT_EQ(again.find(place.tensor->name)->tensor->shape, place.tensor->shape);
    EXPECT_EQ(stored(again, place.tensor->name), stored(files, place.tensor->name))
        << place.tensor->name;
  }
}

/// A file with these tensors of zeros.
fs::path write_file(const test::TempDir& dir, const nlohmann::json& tensors) {
  nlohmann::json header = nlohmann::json::object();
  std::size_t end = 0;
  for (const auto& [name, about] : tensors.items()) {
    std::size_t bytes = about[0] == "U8" ? 1 : 2;
    for (const std::size_t extent : about[1]) bytes *= extent;
    header[name] = {{"dtype", about[0]}, {"shape", about[1]}, {"data_offsets", {end, end + bytes}}};
    end += bytes;
  }
  const std::string text = header.dump();
  std::string content(8, '\0');
  for (std::size_t i = 0; i < 8; ++i) content[i] = static_cast<char>(text.size() >> 8 * i);
  return dir.write("model.safetensors", content + text + std::string(end, '\0'));
}

TEST(Mxfp4, MalformedFilesAreRefusedInOneLine) {
  const test::TempDir dir;
  const auto expect_refused = [&](const nlohmann::json& tensors,
                                  std::initializer_list<std::string_view> parts) {
    const fs::path path = write_file(dir, tensors);
    expect_error(ErrorCategory::data, {path.native()}, [&] { WeightFiles files(path); });
    expect_error(ErrorCategory::data, parts, [&] { WeightFiles files(path); });
  };
  const nlohmann::json codes = {"U8", {2, 4, 3, 16}};
  expect_refused({{"x_blocks", codes}}, {"'x_blocks' is a matrix in MXFP4, but tensor 'x_scales'"});
  expect_refused({{"x_blocks", codes}, {"x_scales", {"U8", {2, 4, 2}}}},
                 {"'x_scales' is U8 [2, 4, 2], but the scales of 'x_blocks' are U8 [2, 4, 3]"});
  expect_refused({{"x_blocks", codes}, {"x_scales", {"BF16", {2, 4, 3}}}},
                 {"'x_scales' is BF16 [2, 4, 3]"});
  expect_refused({{"x_blocks", {"U8", {2, 4, 48}}}, {"x_scales", {"U8", {2, 4, 3}}}},
                 {"'x_blocks' has shape [2, 4, 48], but matrices in MXFP4 have 4 dimensions"});
  expect_refused({{"x_blocks", {"U8", {2, 4, 3, 8}}}, {"x_scales", {"U8", {2, 4, 3}}}},
                 {"'x_blocks' has shape [2, 4, 3, 8]"});
  expect_refused(
      {{"x", {"BF16", {2, 96, 4}}}, {"x_blocks", codes}, {"x_scales", {"U8", {2, 4, 3}}}},
      {"tensor 'x' is stored twice, also in MXFP4"});
  EXPECT_EQ(WeightFiles(write_file(dir, {{"x_blocks", codes}, {"x_scales", {"U8", {2, 4, 3}}}}))
                .find("x")
                ->tensor->shape,
            (std::vector<std::uint64_t>{2, 96, 4}));
}

/// A copy of the fixture whose config.json has these changes.
fs::path with_config(const test::TempDir& dir, const nlohmann::json& changes) {
  const fs::path folder = dir.path() / "copy";
  fs::remove_all(folder);
  fs::copy(fixture("model"), folder);
  auto config = nlohmann::json::parse(read_small_file(folder / "config.json"));
  config.merge_patch(changes);
  dir.write("copy/config.json", config.dump());
  return folder;
}

TEST(Mxfp4, OtherQuantizationsAreRefused) {
  const test::TempDir dir;
  expect_error(ErrorCategory::config,
               {"config.json: quantization_config.quant_method is \"gptq\", but Ballast reads "
                "only mxfp4"},
               [&] {
                 config_of(with_config(dir, {{"quantization_config", {{"quant_method", "gptq"}}}}));
               });
  // transformers' class does not read it.
  const config::Config noted =
      config_of(with_config(dir, {{"quantization_config", {{"bits", 3}}}}));
  EXPECT_TRUE(std::ranges::any_of(noted.notes, [](const std::string& note) {
    return note.starts_with("model.path: transformers' ") &&
           note.ends_with("config.json: quantization_config.bits");
  }));
}

TEST(Mxfp4, OtherShapesAreRefused) {
  const test::TempDir dir;
  const auto expect_refused = [&](const nlohmann::json& changes,
                                  std::initializer_list<std::string_view> parts) {
    const config::Config config = config_of(with_config(dir, changes));
    expect_error(ErrorCategory::data, parts, [&] { train::check_initial_weights(config); });
  };
  expect_refused({{"intermediate_size", 64}},
                 {"experts.gate_up_proj' has shape [3, 64, 64], but the model needs [3, 64, 128]"});
  expect_refused({{"num_local_experts", 4}}, {"has shape [3, 64], but the model needs [4, 64]"});
  const config::Config config = config_of(with_config(dir, nlohmann::json::object()));
  fs::resize_file(dir.path() / "copy/model-00001-of-00002.safetensors", 50'000);
  expect_error(ErrorCategory::data, {"model-00001-of-00002.safetensors"},
               [&] { train::check_initial_weights(config); });
}

}  // namespace
}  // namespace ballast::formats::mxfp4_test
