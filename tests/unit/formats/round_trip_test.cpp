#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <map>
#include <regex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "ballast/config/config.h"
#include "ballast/config/hugging_face_config.h"
#include "ballast/core/memory.h"
#include "ballast/engine/engine.h"
#include "ballast/formats/export.h"
#include "ballast/formats/model_folder.h"
#include "ballast/formats/weight_files.h"
#include "ballast/setup/setup.h"

#include "src/train/initial_weights.h"
#include "src/train/saved_weights.h"
#include "tests/support/fixtures.h"
#include "tests/support/tags.h"
#include "tests/support/temp_dir.h"

// Folders that are exported as they came in: the same files with the same tensors in the same
// order, directly and from a run that has not trained.

namespace ballast::formats::round_trip_test {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

config::Config config_of(const fs::path& model, const fs::path& out,
                         const std::vector<std::string>& overrides = {}) {
  const json text = {{"data", {{"tokens", "none.bin"}, {"sequence_length", 8}}},
                     {"bf16", {{"enabled", true}}},
                     {"model", {{"path", model.string()}}},
                     {"train_micro_batch_size_per_gpu", 1},
                     {"ballast",
                      {{"device", "host"},
                       {"device_bytes", "64MiB"},
                       {"host_bytes", "64MiB"},
                       {"out", out.string()}}}};
  return config::parse(text.dump(), "/", "test", overrides);
}

/// Saves the weights of a run that has made no step, or one. Returns its directory.
fs::path run_of(const fs::path& model, const fs::path& out,
                const std::vector<std::string>& overrides = {}, bool trains = false) {
  const config::Config config = config_of(model, out, overrides);
  train::check_initial_weights(config);
  fs::create_directories(out);
  engine::Engine engine = setup::make_engine(config);
  train::start_from_weights(engine, config, [](Bytes, Bytes) {});
  if (trains) {
    const std::vector<std::int32_t> tokens = {1, 5, 9, 2, 7, 3, 8, 4};
    engine.train_step({tokens, tokens}, 0.1);
  }
  Bytes total = 0;
  train::save_weights(engine, config, true, [&](Bytes done, Bytes all) {
    EXPECT_LE(done, all);
    EXPECT_TRUE(total == 0 || total == all);
    total = all;
  });
  for (const char* name : {"run.json", "metrics.jsonl"}) std::ofstream(out / name) << "{}";
  return out;
}

fs::path exported(const fs::path& from, const fs::path& out, const ExportOptions& options = {}) {
  fs::remove_all(out);
  const ExportSummary summary = export_model(from, out, options, [](Bytes, Bytes) {});
  EXPECT_EQ(summary.quantized.tensors > 0, options.codes);
  return out;
}

/// A tensor of a file: name, type, shape and bytes.
using Content =
    std::tuple<std::string, std::string, std::vector<std::uint64_t>, std::vector<std::byte>>;

std::vector<Content> content_of(const fs::path& path) {
  const SafetensorsReader file(path);
  std::vector<Content> content;
  for (const StoredTensor& tensor : file.tensors()) {
    std::vector<std::byte> bytes(tensor.bytes);
    read_stored({&tensor, &file}, 0, bytes);
    content.emplace_back(tensor.name, tensor.dtype, tensor.shape, std::move(bytes));
  }
  return content;
}

std::vector<std::string> files_in(const fs::path& folder) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) {
    names.push_back(entry.path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

/// Expects the same files with the same tensors, and equal small files.
void expect_same(const fs::path& found, const fs::path& wanted) {
  SCOPED_TRACE(wanted.string());
  ASSERT_EQ(files_in(found), files_in(wanted));
  for (const std::string& name : files_in(wanted)) {
    if (name.ends_with(".safetensors")) {
      EXPECT_TRUE(content_of(found / name) == content_of(wanted / name)) << name;
      EXPECT_EQ(SafetensorsReader(found / name).metadata(),
                SafetensorsReader(wanted / name).metadata());
    } else if (name == kWeightsIndex) {
      json index = json::parse(read_small_file(wanted / name));
      index["metadata"]["total_size"] = WeightFiles(found).bytes();
      json ours = json::parse(read_small_file(found / name));
      EXPECT_EQ(ours["weight_map"], index["weight_map"]);
      EXPECT_EQ(ours["metadata"].size(), index["metadata"].size());
    } else {
      EXPECT_EQ(read_small_file(found / name), read_small_file(wanted / name)) << name;
    }
  }
}

/// Expects that a folder comes back, directly and through a run.
void expect_round_trip(const fs::path& folder, const test::TempDir& dir,
                       const std::vector<std::string>& overrides = {}) {
  fs::remove_all(dir.path() / "run");
  expect_same(exported(folder, dir.path() / "copy"), folder);
  const fs::path run = run_of(folder, dir.path() / "run", overrides);
  expect_same(exported(run, dir.path() / "out"), folder);
}

/// A folder of a family whose files are unlike those that Ballast writes by default.
class FamilyFolder {
 public:
  FamilyFolder(const std::string& family, const fs::path& folder)
      : from_(test::fixture("families") / (family + ".safetensors")), folder_(folder) {
    fs::create_directories(folder);
    json record;
    std::ifstream(test::fixture("families") / (family + ".json")) >> record;
    const json text = {{"model", record["model"]},
                       {"data", {{"tokens", "none.bin"}, {"sequence_length", 8}}},
                       {"train_micro_batch_size_per_gpu", 1}};
    const config::Config config = config::parse(text.dump(), "/", "test", {});
    model_ = model::build_architecture(config.model);
    const auto write = [&](const char* name, const std::string& content) {
      std::ofstream(folder / name) << content;
    };
    write(config::kCheckpointConfig, config::make_checkpoint_config(config).pretty());
    write("generation_config.json", R"({"eos_token_id":  2})");
    write("chat_template.jinja", "{{ messages }}");
    write("tokenization_own.py", "pass\n");
    write_weights();
  }

 private:
  /// Two files: later layers first, types in turn, and tensors that the model does not use.
  void write_weights() {
    std::vector<std::vector<TensorToStore>> files(2);
    for (const StoredTensor& tensor : from_.tensors()) {
      const std::string& name = tensor.name;
      const bool result =
          name.starts_with("gradient.") || name.starts_with("final.") || name.ends_with("logits");
      if (!result) files[files[0].size() % 2].push_back({name, type_for(tensor), tensor.shape});
    }
    if (model_.config.tie_embeddings) {
      files[1].push_back({model_.outer.output, DType::f16, shape_of(model_.outer.tokens)});
    }
    files[0].insert(files[0].begin(), {.name = "mtp.layers.0.fc.weight",
                                       .shape = {7, 3},
                                       .copied_dtype = "F8_E4M3",
                                       .copied_bytes = 21});
    files[1].push_back(
        {.name = "visual.steps", .shape = {3}, .copied_dtype = "I64", .copied_bytes = 24});
    for (auto& file : files) std::reverse(file.begin(), file.end());
    json map;
    for (std::size_t i = 0; i < files.size(); ++i) {
      const std::string name = "model-0000" + std::to_string(i + 1) + "-of-000002.safetensors";
      for (const TensorToStore& tensor : files[i]) map[tensor.name] = name;
      write_file(folder_ / name, files[i]);
    }
    std::ofstream(folder_ / kWeightsIndex)
        << json{{"metadata", {{"total_size", 1}, {"more", "x"}}}, {"weight_map", map}};
  }

  void write_file(const fs::path& path, const std::vector<TensorToStore>& tensors) const {
    SafetensorsWriter writer(path, tensors, {{"format", "pt"}, {"by", "test"}});
    for (const TensorToStore& tensor : tensors) {
      if (!tensor.copied_dtype.empty()) {
        writer.write_bytes(tensor.name,
                           std::vector<std::byte>(tensor.copied_bytes, std::byte{0x31}), 0);
        continue;
      }
      const bool copy = from_.find(tensor.name) == nullptr;
      const std::string& name = copy ? model_.outer.tokens : tensor.name;
      std::vector<float> values(from_.find(name)->elements);
      from_.read(name, values);
      // Both halves represent the values of the embedding and its copy.
      for (float& value : values) value = to_float(to_bf16(value));
      writer.write(tensor.name, values);
    }
    writer.finish();
  }

  /// Matrices in bf16, other tensors in fp32. Values have the precision of bf16.
  [[nodiscard]] static DType type_for(const StoredTensor& tensor) {
    const bool router = tensor.name.ends_with("gate.weight");
    return tensor.shape.size() == 1 || router ? DType::f32 : DType::bf16;
  }
  [[nodiscard]] std::vector<std::uint64_t> shape_of(const std::string& name) const {
    return from_.find(name)->shape;
  }

  SafetensorsReader from_;
  fs::path folder_;
  model::Architecture model_;
};

std::vector<std::string> families() {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(test::fixture("families"))) {
    const std::string name = entry.path().stem().string();
    // Other routing has the same tensors.
    const bool twin = name.ends_with("_ties") || name.ends_with("_one");
    if (entry.path().extension() == ".safetensors" && !twin) names.push_back(name);
  }
  std::sort(names.begin(), names.end());
  return names;
}

TAG_TESTS("one_thread", "RoundTrip.*");
TEST(RoundTrip, FoldersOfAllFamiliesComeBackByteForByte) {
  ASSERT_GT(families().size(), 20U);
  for (const std::string& family : families()) {
    SCOPED_TRACE(family);
    const test::TempDir dir;
    const FamilyFolder folder(family, dir.path() / "model");
    expect_same(exported(run_of(dir.path() / "model", dir.path() / "run"), dir.path() / "out"),
                dir.path() / "model");
  }
}

TEST(RoundTrip, ModelsOfTextAndImagesComeBackByteForByte) {
  std::size_t folders = 0;
  for (const auto& entry : fs::directory_iterator(test::fixture("passing"))) {
    if (!entry.is_directory()) continue;
    ++folders;
    const test::TempDir dir;
    expect_round_trip(entry.path(), dir);
  }
  EXPECT_GE(folders, 3U);
}

/// Trains the norm before the head alone.
const std::string kFrozen = R"(ballast.train=["model.norm.weight"])";

TEST(RoundTrip, FrozenCodesComeBackByteForByte) {
  for (const char* name : {"fp8/model", "mxfp4/model"}) {
    const test::TempDir dir;
    expect_round_trip(test::fixture(name), dir, {kFrozen});
    // Also through the weights of a run that a second run imports.
    const fs::path again = run_of(dir.path() / "run/weights", dir.path() / "again", {kFrozen});
    expect_same(exported(again, dir.path() / "twice"), test::fixture(name));
  }
  for (const char* name : {"bitsandbytes/nested", "bitsandbytes/int8"}) {
    const test::TempDir dir;
    expect_same(exported(test::fixture(name), dir.path() / "copy"), test::fixture(name));
  }
}

/// The tensors of a folder by name.
std::map<std::string, Content> tensors_of(const fs::path& folder) {
  std::map<std::string, Content> tensors;
  for (const std::string& name : files_in(folder)) {
    if (!name.ends_with(".safetensors")) continue;
    for (Content& tensor : content_of(folder / name)) {
      const std::string& key = std::get<0>(tensor);
      tensors.emplace(key, std::move(tensor));
    }
  }
  return tensors;
}

json description_of(const fs::path& folder) {
  return json::parse(read_small_file(folder / "config.json"));
}

/// Modules that `folder` lists as not quantised in addition to those of `from`.
std::vector<std::string> unquantized_modules(const fs::path& folder, const fs::path& from) {
  const auto listed = [](const fs::path& path) {
    const json quantization = description_of(path)["quantization_config"];
    return quantization.value("modules_to_not_convert", std::vector<std::string>());
  };
  std::vector<std::string> modules = listed(folder);
  for (const std::string& known : listed(from)) std::erase(modules, known);
  std::sort(modules.begin(), modules.end());
  return modules;
}

/// Expects that exactly the tensors with `part` in their names are in bf16 instead of codes.
void expect_dequantized(const fs::path& found, const fs::path& wanted, const std::string& part) {
  const auto ours = tensors_of(found);
  std::size_t changed = 0;
  for (const auto& [name, tensor] : tensors_of(wanted)) {
    const bool scales = name.ends_with("_scale_inv");
    if (name.find(part) == std::string::npos) {
      EXPECT_TRUE(ours.at(name) == tensor) << name;
    } else if (scales) {
      EXPECT_FALSE(ours.contains(name)) << name;
    } else {
      ++changed;
      EXPECT_EQ(std::get<1>(ours.at(name)), "BF16") << name;
    }
  }
  EXPECT_EQ(unquantized_modules(found, wanted).size(), changed);
  train::check_initial_weights(config_of(found, found));
}

constexpr const char* kLayer = "model.layers.0.";

bool have_equal_values_in(const WeightFiles& one, const WeightFiles& other,
                          const std::string& name) {
  std::vector<float> left(one.find(name)->tensor->elements);
  std::vector<float> right(other.find(name)->tensor->elements);
  one.read(name, left);
  other.read(name, right);
  return left == right;
}

TEST(RoundTrip, TrainedFp8IsDequantisedOrQuantisedAgain) {
  const test::TempDir dir;
  const fs::path folder = test::fixture("fp8/model");
  const fs::path run = run_of(folder, dir.path() / "run", {R"(ballast.train=["*.mlp.*"])"});
  expect_dequantized(exported(run, dir.path() / "out"), folder, ".mlp.");
  const std::string mlp = std::string(kLayer) + "mlp.";
  EXPECT_EQ(unquantized_modules(dir.path() / "out", folder),
            (std::vector{mlp + "down_proj", mlp + "gate_proj", mlp + "up_proj"}));
  const ExportSummary summary = export_model(run, dir.path() / "codes", {.codes = true},
                                             [](Bytes done, Bytes all) { EXPECT_LE(done, all); });
  EXPECT_EQ(files_in(dir.path() / "codes"), files_in(folder));
  EXPECT_EQ(description_of(dir.path() / "codes"), description_of(folder));
  EXPECT_EQ(summary.quantized.tensors, 3U);
  const WeightFiles before(folder);
  const WeightFiles after(dir.path() / "codes");
  double errors = 0.0;
  double squares = 0.0;
  for (const char* name : {"down_proj", "gate_proj", "up_proj"}) {
    const WeightPlace& place = *before.find(mlp + name + ".weight");
    ASSERT_NE(after.find(place.tensor->name)->quantized, nullptr);
    std::vector<float> wanted(place.tensor->elements);
    std::vector<float> found(wanted.size());
    before.read(place.tensor->name, wanted);
    after.read(place.tensor->name, found);
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      // Half the distance of E4M3's values, and the rounding to bf16.
      const double error = found[i] - wanted[i];
      EXPECT_LE(std::abs(error), std::abs(wanted[i]) * 0.068 + 1e-4) << name << i;
      errors += error * error;
      squares += static_cast<double>(wanted[i]) * wanted[i];
    }
  }
  EXPECT_NEAR(summary.quantized.rms, std::sqrt(errors / squares), 0.002);
  EXPECT_GT(summary.quantized.rms, 0.0);
  EXPECT_LE(summary.quantized.largest, 16.0 / 448.0);
}

/// Values of MXFP4 have codes without error, so trained experts that have not changed are exact.
TEST(RoundTrip, TrainedMxfp4IsDequantisedOrQuantisedAgain) {
  const test::TempDir dir;
  const fs::path folder = test::fixture("mxfp4/model");
  const fs::path run =
      run_of(folder, dir.path() / "run", {R"(ballast.train=["*.0.mlp.experts*"])"});
  exported(run, dir.path() / "out");
  EXPECT_EQ(unquantized_modules(dir.path() / "out", folder),
            (std::vector{std::string(kLayer) + "mlp.experts"}));
  const auto decoded = tensors_of(dir.path() / "out");
  EXPECT_EQ(std::get<1>(decoded.at(std::string(kLayer) + "mlp.experts.down_proj")), "BF16");
  const ExportSummary summary =
      export_model(run, dir.path() / "codes", {.codes = true}, [](Bytes, Bytes) {});
  EXPECT_EQ(files_in(dir.path() / "codes"), files_in(folder));
  EXPECT_EQ(summary.quantized.tensors, 2U);
  EXPECT_EQ(summary.quantized.largest, 0.0);
  for (const auto& [name, tensor] : tensors_of(folder)) {
    const Content found = tensors_of(dir.path() / "codes").at(name);
    EXPECT_EQ(std::get<1>(found), std::get<1>(tensor)) << name;
    EXPECT_EQ(std::get<2>(found), std::get<2>(tensor)) << name;
  }
  exported(dir.path() / "codes", dir.path() / "wide", {.type = DType::f32});
  exported(folder, dir.path() / "wanted", {.type = DType::f32});
  const WeightFiles wanted(dir.path() / "wanted");
  const WeightFiles found(dir.path() / "wide");
  for (const WeightPlace& place : wanted.tensors()) {
    EXPECT_TRUE(have_equal_values_in(found, wanted, place.tensor->name)) << place.tensor->name;
  }
}

TEST(RoundTrip, AdaptersChangeTheirMatricesAlone) {
  const test::TempDir dir;
  const fs::path folder = test::fixture("fp8/model");
  const fs::path run = run_of(
      folder, dir.path() / "run",
      {"ballast.train=adapters", R"(ballast.adapters={"targets": ["q_proj"], "rank": 2})"}, true);
  expect_dequantized(exported(run, dir.path() / "out", {.merged = true}), folder, "q_proj");
  exported(run, dir.path() / "codes", {.merged = true, .codes = true});
  EXPECT_EQ(description_of(dir.path() / "codes"), description_of(folder));
  const auto ours = tensors_of(dir.path() / "codes");
  EXPECT_EQ(ours.size(), tensors_of(folder).size());
  for (const auto& [name, tensor] : tensors_of(folder)) {
    const bool changed = name.find("q_proj") != std::string::npos;
    EXPECT_EQ(ours.at(name) == tensor, !changed) << name;
  }
}

/// Writes a folder again in one file with the experts of each layer stacked, as transformers has
/// them in memory.
fs::path stack_experts(const fs::path& from, const fs::path& to) {
  const std::regex matrix(R"((.*\.experts\.)(\d+)\.(gate|up|down)_proj\.weight)");
  std::map<std::string, Content> tensors;
  std::map<std::tuple<std::string, int, bool>, Content> matrices;  // sorted as in stacks
  for (auto& [name, tensor] : tensors_of(from)) {
    std::smatch parts;
    if (std::regex_match(name, parts, matrix)) {
      const std::string stack = parts[1].str() + (parts[3] == "down" ? "down" : "gate_up");
      matrices.emplace(std::tuple(stack + "_proj", std::stoi(parts[2]), parts[3] == "up"), tensor);
    } else {
      tensors.emplace(name, tensor);
    }
  }
  for (const auto& [key, one] : matrices) {
    const auto& [name, expert, up] = key;
    const auto& shape = std::get<2>(one);
    auto& [own, type, extents, bytes] = tensors[name];
    own = name;
    type = std::get<1>(one);
    extents = {static_cast<std::uint64_t>(expert) + 1, shape[0] * (up ? 2 : 1), shape[1]};
    bytes.insert(bytes.end(), std::get<3>(one).begin(), std::get<3>(one).end());
  }
  std::vector<TensorToStore> stored;
  for (const auto& [name, tensor] : tensors) {
    stored.push_back({.name = name,
                      .shape = std::get<2>(tensor),
                      .copied_dtype = std::get<1>(tensor),
                      .copied_bytes = std::get<3>(tensor).size()});
  }
  fs::create_directories(to);
  fs::copy_file(from / config::kCheckpointConfig, to / config::kCheckpointConfig);
  SafetensorsWriter writer(to / kSingleWeights, stored, {{"format", "pt"}});
  for (const auto& [name, tensor] : tensors) writer.write_bytes(name, std::get<3>(tensor), 0);
  writer.finish();
  return to;
}

TEST(RoundTrip, StackedExpertsComeBackAndTrainLikeSeparateOnes) {
  for (const char* family : {"qwen3_5_moe", "qwen3_moe", "glm4_moe", "deepseek_v3_experts"}) {
    SCOPED_TRACE(family);
    const test::TempDir dir;
    const FamilyFolder folder(family, dir.path() / "separate");
    const fs::path stacked = stack_experts(dir.path() / "separate", dir.path() / "stacked");
    ASSERT_LT(tensors_of(stacked).size(), tensors_of(dir.path() / "separate").size());
    expect_round_trip(stacked, dir);
    const fs::path wanted =
        exported(run_of(dir.path() / "separate", dir.path() / "one", {}, true), dir.path() / "a");
    const fs::path found =
        exported(run_of(stacked, dir.path() / "two", {}, true), dir.path() / "b");
    EXPECT_TRUE(tensors_of(found) == tensors_of(stack_experts(wanted, dir.path() / "c")));
    EXPECT_FALSE(tensors_of(found) == tensors_of(stacked));
  }
}

TEST(RoundTrip, OneExpertOfAStackIsTrained) {
  const test::TempDir dir;
  const fs::path folder = test::fixture("passing/qwen3_5_moe");
  const fs::path run = run_of(folder, dir.path() / "run",
                              {R"(ballast.train=["*.0.mlp.experts.1.down_proj*"])"}, true);
  const auto found = tensors_of(exported(run, dir.path() / "out"));
  for (auto& [name, tensor] : tensors_of(folder)) {
    const bool trained =
        name.ends_with("layers.0.mlp.experts.down_proj") && !name.starts_with("mtp");
    ASSERT_EQ(found.at(name) == tensor, !trained) << name;
    if (!trained) continue;
    const std::vector<std::byte>& before = std::get<3>(tensor);
    const std::vector<std::byte>& after = std::get<3>(found.at(name));
    ASSERT_EQ(after.size(), before.size());
    const auto third = static_cast<std::ptrdiff_t>(before.size() / 3);
    EXPECT_TRUE(std::equal(before.begin(), before.begin() + third, after.begin()));
    EXPECT_TRUE(std::equal(before.end() - third, before.end(), after.end() - third));
  }
}

}  // namespace
}  // namespace ballast::formats::round_trip_test
