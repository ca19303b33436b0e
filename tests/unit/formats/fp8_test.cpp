#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "ballast/config/config.h"
#include "ballast/formats/export.h"
#include "ballast/formats/model_folder.h"
#include "ballast/formats/weight_files.h"

#include "src/formats/quantized_matrices.h"
#include "src/formats/weight_reader.h"
#include "src/train/initial_weights.h"
#include "tests/support/expect_error.h"
#include "tests/support/fixtures.h"
#include "tests/support/temp_dir.h"

// The files are those of tests/data/make_fp8_fixture.py.

namespace ballast::formats::fp8_test {
namespace {

namespace fs = std::filesystem;
using test::expect_error;

const std::string kGate = "model.layers.0.mlp.gate_proj.weight";

fs::path fixture(const std::string& name) {
  return test::fixture("fp8") / name;
}

config::Config config_of(const fs::path& folder) {
  const nlohmann::json text = {{"data", {{"tokens", "none.bin"}, {"sequence_length", 8}}},
                               {"bf16", {{"enabled", true}}},
                               {"model", {{"path", folder.string()}}},
                               {"train_micro_batch_size_per_gpu", 1}};
  return config::parse(text.dump(), "/", "test", {});
}

TEST(Fp8, EveryCodeHasTheValueOfPyTorch) {
  const SafetensorsReader file(fixture("decoded.safetensors"));
  std::vector<float> expected(256);
  file.read("codes", expected);
  for (std::size_t code = 0; code < expected.size(); ++code) {
    const float value = fp8::value_of(static_cast<std::uint8_t>(code));
    EXPECT_EQ(std::isnan(value), std::isnan(expected[code])) << code;
    if (!std::isnan(value)) {
      EXPECT_EQ(std::memcmp(&value, &expected[code], sizeof value), 0) << code;
    }
  }
}

TEST(Fp8, AnyRangeIsDequantisedAsTransformersDoes) {
  train::check_initial_weights(config_of(fixture("model")));
  const WeightFiles files(fixture("model"));
  const WeightPlace& place = *files.find(kGate);
  ASSERT_NE(place.quantized, nullptr);
  EXPECT_EQ(type_of(place), DType::bf16);
  const SafetensorsReader decoded(fixture("decoded.safetensors"));
  std::vector<std::byte> expected(place.tensor->elements * sizeof(Bf16));
  read_stored({decoded.find("gate"), &decoded}, 0, expected);
  std::mt19937 random(3);
  for (int round = 0; round < 50; ++round) {
    const Elems first = round == 0 ? 0 : random() % place.tensor->elements;
    const Elems count =
        round == 0 ? place.tensor->elements : random() % (place.tensor->elements - first + 1);
    std::vector<std::byte> found(count * sizeof(Bf16));
    read_elements(place, first, found, nullptr);
    ASSERT_TRUE(std::equal(found.begin(), found.end(),
                           expected.begin() + static_cast<std::ptrdiff_t>(first * sizeof(Bf16))))
        << first << " " << count;
  }
}

/// Writes a safetensors file of tensors with these types and shapes, all of whose bytes are `byte`.
struct Stored {
  std::string name;
  std::string dtype;
  std::vector<std::uint64_t> shape;
  Bytes bytes;
};
void write_file(const fs::path& path, const std::vector<Stored>& tensors, std::uint8_t byte) {
  std::vector<TensorToStore> list;
  for (const Stored& one : tensors) {
    list.push_back({.name = one.name,
                    .shape = one.shape,
                    .copied_dtype = one.dtype,
                    .copied_bytes = one.bytes});
  }
  SafetensorsWriter writer(path, list);
  for (const Stored& one : tensors) {
    writer.write_bytes(one.name, std::vector<std::byte>(one.bytes, std::byte{byte}), 0);
  }
  writer.finish();
}

TEST(Fp8, BlocksAtTheEndsAreSmaller) {
  const test::TempDir dir;
  constexpr Elems kRows = 130;
  constexpr Elems kColumns = 200;
  const std::vector<float> scales = {1.0F, 2.0F, 4.0F, 8.0F};
  const std::vector<std::byte> ones(kRows * kColumns, std::byte{0x38});  // 1.0
  SafetensorsWriter writer(dir.path() / kSingleWeights, {{.name = "w",
                                                          .shape = {kRows, kColumns},
                                                          .copied_dtype = "F8_E4M3",
                                                          .copied_bytes = kRows * kColumns},
                                                         {"w_scale_inv", DType::f32, {2, 2}}});
  writer.write_bytes("w", ones, 0);
  writer.write("w_scale_inv", scales);
  writer.finish();
  const WeightFiles files(dir.path());
  EXPECT_EQ(files.tensors().size(), 1U);
  std::vector<float> values(kRows * kColumns);
  files.read("w", values);
  for (Elems i = 0; i < values.size(); ++i) {
    const Elems block = i / kColumns / fp8::kBlock * 2 + i % kColumns / fp8::kBlock;
    ASSERT_EQ(values[i], scales[block]) << i;
  }
}

/// Codes and scales of one tensor, all of them random.
struct RandomTensor {
  std::vector<std::uint64_t> shape;
  std::vector<std::uint64_t> of_scales;
  std::string suffix = "_scale_inv";

  [[nodiscard]] static Elems elements(const std::vector<std::uint64_t>& shape) {
    Elems product = 1;
    for (const std::uint64_t extent : shape) product *= extent;
    return product;
  }
};

TEST(Fp8, ScalesOfRowsAndMatricesAreAppliedToAnyRange) {
  // Tensor, shape of its scales, and the scale of element [matrix, row, column].
  using ScaleOf = Elems (*)(Elems matrix, Elems row, Elems column);
  const ScaleOf one = [](Elems, Elems, Elems) -> Elems { return 0; };
  const ScaleOf row = [](Elems, Elems r, Elems) { return r; };
  const ScaleOf matrix = [](Elems m, Elems, Elems) { return m; };
  const ScaleOf half = [](Elems m, Elems r, Elems) { return 2 * m + r / 20; };
  const std::vector<std::pair<RandomTensor, ScaleOf>> cases = {
      {{{130, 40}, {}}, one},           {{{130, 40}, {1}, "_scale"}, one},
      {{{130, 200}, {1, 1}}, one},      {{{131, 40}, {131, 1}, "_scale"}, row},
      {{{131, 40}, {131}}, row},        {{{3, 40, 50}, {}}, one},
      {{{3, 40, 50}, {3}}, matrix},     {{{3, 40, 50}, {3, 1, 1}}, matrix},
      {{{3, 40, 50}, {3, 2, 1}}, half},  // gate and up of stacked experts
  };
  std::mt19937 random(11);
  for (const auto& [tensor, scale_of] : cases) {
    SCOPED_TRACE(testing::PrintToString(tensor.of_scales));
    const test::TempDir dir;
    const Elems size = RandomTensor::elements(tensor.shape);
    const std::string scales_name = "w" + tensor.suffix;
    std::vector<std::byte> codes(size);
    for (std::byte& code : codes) code = static_cast<std::byte>(random() % 120);
    std::vector<float> scales(RandomTensor::elements(tensor.of_scales));
    for (float& scale : scales) scale = static_cast<float>(1 + random() % 1000) / 64.0F;
    SafetensorsWriter writer(
        dir.path() / kSingleWeights,
        {{.name = "w", .shape = tensor.shape, .copied_dtype = "F8_E4M3", .copied_bytes = size},
         {scales_name, DType::f32, tensor.of_scales}});
    writer.write_bytes("w", codes, 0);
    writer.write(scales_name, scales);
    writer.finish();
    const WeightFiles files(dir.path());
    ASSERT_EQ(files.tensors().size(), 1U);
    const Elems columns = tensor.shape.back();
    const Elems rows = tensor.shape[tensor.shape.size() - 2];
    for (int round = 0; round < 20; ++round) {
      const Elems first = round == 0 ? 0 : random() % size;
      std::vector<float> found(round == 0 ? size : random() % (size - first) + 1);
      files.read("w", found, first);
      for (Elems i = 0; i < found.size(); ++i) {
        const Elems at = first + i;
        const Elems scale = scale_of(at / columns / rows, at / columns % rows, at % columns);
        const float code = fp8::value_of(std::to_integer<std::uint8_t>(codes[at]));
        ASSERT_EQ(found[i], code * scales[scale]) << first << " " << at;
      }
    }
  }
}

TEST(Fp8, ScalesOfActivationsStayWithTheirCodes) {
  const std::string gate = "model.layers.0.mlp.gate_proj.";
  EXPECT_EQ(fp8::scaled_by(gate + "activation_scale"), gate + "weight");
  EXPECT_EQ(fp8::scaled_by(gate + "input_scale"), gate + "weight");
  EXPECT_EQ(fp8::scaled_by("x.experts.down_proj_activation_scale"), "x.experts.down_proj");
  EXPECT_EQ(fp8::scaled_by("activation_scale"), "");
  EXPECT_EQ(fp8::scaled_by(gate + "weight"), "");
  const test::TempDir dir;
  train::check_initial_weights(config_of(fixture("matrices")));
  const auto exported = [&](const char* name, const ExportOptions& options) {
    export_model(fixture("matrices"), dir.path() / name, options, [](Bytes, Bytes) {});
    return WeightFiles(dir.path() / name).find(gate + "activation_scale") != nullptr;
  };
  EXPECT_TRUE(exported("copy", {}));
  EXPECT_FALSE(exported("decoded", {.type = DType::bf16}));
  train::check_initial_weights(config_of(dir.path() / "copy"));
  train::check_initial_weights(config_of(dir.path() / "decoded"));
}

TEST(Fp8, ExportWritesDequantisedWeights) {
  const test::TempDir dir;
  export_model(fixture("model"), dir.path() / "out", {.type = DType::bf16}, [](Bytes, Bytes) {});
  const auto config = nlohmann::json::parse(read_small_file(dir.path() / "out/config.json"));
  EXPECT_FALSE(config.contains("quantization_config"));
  train::check_initial_weights(config_of(dir.path() / "out"));
  const WeightFiles from(fixture("model"));
  const WeightFiles found(dir.path() / "out");
  EXPECT_EQ(found.tensors().size(), from.tensors().size());
  for (const WeightPlace& place : from.tensors()) {
    std::vector<float> expected(place.tensor->elements);
    std::vector<float> values(place.tensor->elements);
    from.read(place.tensor->name, expected);
    found.read(place.tensor->name, values);
    EXPECT_EQ(values, expected) << place.tensor->name;
  }
}

TEST(Fp8, TheNearestCodeIsTaken) {
  constexpr unsigned kFinite = 127;  // codes of positive values
  for (unsigned code = 0; code < kFinite; ++code) {
    const float value = fp8::value_of(static_cast<std::uint8_t>(code));
    EXPECT_EQ(fp8::code_of(value), code);
    EXPECT_EQ(fp8::code_of(-value), code + 128);
    if (code + 1 == kFinite) continue;
    const float middle = (value + fp8::value_of(static_cast<std::uint8_t>(code + 1))) / 2.0F;
    EXPECT_EQ(fp8::code_of(middle), code % 2 == 0 ? code : code + 1);
    EXPECT_EQ(fp8::code_of(std::nextafter(middle, 0.0F)), code);
    EXPECT_EQ(fp8::code_of(std::nextafter(middle, 1000.0F)), code + 1);
  }
  EXPECT_EQ(fp8::code_of(1e30F), kFinite - 1);
  EXPECT_EQ(fp8::code_of(std::nanf("")), kFinite);
}

TEST(Fp8, TheLargestValueOfABlockGetsTheLargestCode) {
  constexpr Elems kColumns = 130;
  std::vector<float> values(3 * kColumns, 0.25F);
  values[kColumns + 5] = -7.0F;
  std::vector<std::byte> codes(values.size());
  EXPECT_EQ(fp8::encode(values, kColumns, 0, {}, codes), 7.0F / 448.0F);
  EXPECT_EQ(fp8::encode(values, kColumns, 1, {DType::f32, true}, codes), 0x1p-10F);
  EXPECT_EQ(codes[kColumns + 5], std::byte{0xFE});
  EXPECT_EQ(codes[4], std::byte{fp8::code_of(16.0F)});
  EXPECT_EQ(codes[kColumns - 1], std::byte{fp8::code_of(256.0F)});
  const float rounded = fp8::encode(values, kColumns, 0, {DType::bf16, false}, codes);
  EXPECT_EQ(rounded, to_float(to_bf16(7.0F / 448.0F)));
  std::fill(values.begin(), values.end(), 0.0F);
  EXPECT_EQ(fp8::encode(values, kColumns, 0, {}, codes), 1.0F);
  EXPECT_EQ(codes[4], std::byte{0});
}

TEST(Fp8, ScalesThatDoNotFitAreNamed) {
  const test::TempDir dir;
  const auto refused = [&](const Stored& codes, const Stored& scales,
                           std::initializer_list<std::string_view> parts) {
    write_file(dir.path() / kSingleWeights, {codes, scales}, 0);
    expect_error(ErrorCategory::data, parts, [&] { const WeightFiles files(dir.path()); });
  };
  const Stored codes = {"w", "F8_E4M3", {130, 4}, 520};
  refused(codes, {"w_scale_inv", "F32", {3, 1}, 12},
          {"model.safetensors: tensor 'w_scale_inv' is F32 [3, 1], but 'w' with shape [130, 4]",
           "each block of 128 x 128"});
  refused(codes, {"w_scale_inv", "F32", {1, 3}, 12}, {"is F32 [1, 3], but"});
  refused(codes, {"w_scale_inv", "F32", {2, 1, 1}, 8}, {"is F32 [2, 1, 1], but"});
  refused({"w", "F8_E4M3", {2, 65, 4}, 520}, {"w_scale_inv", "F32", {3}, 12}, {"is F32 [3], but"});
  refused(codes, {"w_scale_inv", "U8", {2, 1}, 2}, {"is U8 [2, 1], but"});
  refused({"w", "F8_E4M3", {4}, 4}, {"w_scale_inv", "F32", {1}, 4}, {"'w' with shape [4]"});
  // Codes without scales are not weights.
  write_file(dir.path() / kSingleWeights, {codes}, 0);
  const WeightFiles files(dir.path());
  expect_error(ErrorCategory::data, {"tensor 'w'", "dtype F8_E4M3", "it is quantised"},
               [&] { type_of(*files.find("w")); });
}

TEST(Fp8, OtherSizesOfBlocksAreRefused) {
  const test::TempDir dir;
  auto config = nlohmann::json::parse(read_small_file(fixture("model/config.json")));
  fs::copy_file(fixture("model/model.safetensors"), dir.path() / kSingleWeights);
  config["quantization_config"]["weight_block_size"] = {1, 128};
  dir.write("config.json", config.dump());
  expect_error(ErrorCategory::config,
               {"quantization_config.weight_block_size is [1,128], but", "blocks of [128,128]"},
               [&] { config_of(dir.path()); });
  for (const char* method : {"gptq", "awq", "compressed-tensors", "hqq"}) {
    config["quantization_config"] = {{"quant_method", method}};
    dir.write("config.json", config.dump());
    expect_error(ErrorCategory::config, {method, "give the folder of the original model"},
                 [&] { config_of(dir.path()); });
  }
}

}  // namespace
}  // namespace ballast::formats::fp8_test
