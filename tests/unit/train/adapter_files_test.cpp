// Folders of PEFT: import, export and adapters that are merged into their model.
#include "src/train/adapter_files.h"

#include <cmath>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "ballast/config/adapter_folder.h"
#include "ballast/model/architecture.h"
#include "ballast/model/family.h"
#include "ballast/train/export.h"

#include "tests/support/fixtures.h"
#include "tests/support/temp_dir.h"
#include "tests/unit/train/expect_error.h"

namespace ballast::train::adapter_files_test {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using test::expect_error;

/// A folder that PEFT has written, over a copy of its model.
struct Folder {
  explicit Folder(const std::string& name) : name(name) {
    fs::create_directories(base());
    fs::copy(test::fixture("training") / name, adapters());
    std::ifstream(test::fixture("training") / (name + ".json")) >> reference;
    const std::string initial = reference["initial"];
    fs::copy(test::fixture("training") / (initial + ".initial.safetensors"),
             base() / kSingleWeights);
    std::ofstream(base() / "config.json") << R"({"torch_dtype": "float32"})";
    change("base_model_name_or_path", base().string());
  }
  [[nodiscard]] fs::path base() const { return dir.path() / "base"; }
  [[nodiscard]] fs::path adapters() const { return dir.path() / "adapters"; }
  [[nodiscard]] fs::path out() const { return dir.path() / "out"; }
  /// Changes a key of adapter_config.json.
  void change(const std::string& key, const json& value) const {
    json settings;
    std::ifstream(adapters() / config::kAdapterConfig) >> settings;
    settings[key] = value;
    std::ofstream(adapters() / config::kAdapterConfig) << settings.dump();
  }
  ExportSummary write(const ExportOptions& options) const {
    return export_model(adapters(), out(), options, [](Bytes, Bytes) {});
  }
  [[nodiscard]] model::Architecture model(std::vector<std::string> targets,
                                          std::vector<std::string> saved) const {
    const json& section = reference["model"];
    model::ModelConfig c = model::default_config(section["family"].get<std::string>());
    c.vocab_size = section["vocab_size"];
    c.hidden_size = section["hidden_size"];
    c.num_layers = section["num_layers"];
    c.num_heads = section["num_heads"];
    c.num_kv_heads = section["num_kv_heads"];
    c.intermediate_size = section["intermediate_size"];
    c.max_sequence = section["max_sequence"];
    c.tie_embeddings = section["tie_embeddings"];
    model::Architecture model = model::build_architecture(c);
    model::adapt(model,
                 {.rank = reference["adapters"]["r"],
                  .targets = std::move(targets),
                  .modules_to_save = std::move(saved)},
                 [](std::string_view, const std::string& rule) { FAIL() << rule; });
    return model;
  }

  std::string name;
  test::TempDir dir;
  json reference;
};

std::vector<float> values(const WeightFiles& files, const std::string& name) {
  std::vector<float> found(files.find(name)->tensor->elements);
  files.read(name, found);
  return found;
}

TEST(MergedAdapters, AreThoseOfPeft) {
  for (const std::string name : {"llama_lora", "gpt2_lora", "llama_dora", "gpt2_dora"}) {
    const Folder folder(name);
    folder.write({.merged = true});
    const WeightFiles ours(folder.out());
    const WeightFiles before(folder.base());
    const WeightFiles theirs(test::fixture("training") / (name + ".merged.safetensors"));
    EXPECT_EQ(ours.tensors().size(), before.tensors().size());
    std::size_t changed = 0;
    for (const WeightFiles::Place& place : theirs.tensors()) {
      const std::string& tensor = place.tensor->name;
      const std::vector<float> found = values(ours, tensor);
      const std::vector<float> expected = values(theirs, tensor);
      ASSERT_EQ(found.size(), expected.size()) << tensor;
      for (std::size_t i = 0; i < found.size(); ++i) {
        ASSERT_NEAR(found[i], expected[i], 1e-6) << tensor << i;
      }
      changed += found != values(before, tensor) ? 1 : 0;
    }
    EXPECT_GE(changed, 2U) << name;
    const std::string norm =
        name.starts_with("gpt2") ? "transformer.h.0.ln_1.weight" : "model.norm.weight";
    EXPECT_EQ(values(ours, norm), values(before, norm));
    EXPECT_TRUE(fs::exists(folder.out() / "config.json"));
  }
}

TEST(MergedAdapters, AreRoundedOnce) {
  const Folder folder("llama_lora");
  folder.write({.type = DType::bf16, .merged = true});
  const std::string name = "model.layers.1.mlp.down_proj.weight";
  const auto theirs =
      values(WeightFiles(test::fixture("training") / "llama_lora.merged.safetensors"), name);
  const auto ours = values(WeightFiles(folder.out()), name);
  std::size_t other = 0;
  for (std::size_t i = 0; i < ours.size(); ++i) {
    other += ours[i] == to_float(to_bf16(theirs[i])) ? 0 : 1;
  }
  EXPECT_LT(other, ours.size() / 500);  // those that lie between two values
}

TEST(MergedAdapters, NeedTheModelThatTheyBelongTo) {
  const Folder folder("llama_lora");
  const auto refuses = [&](ErrorCategory category, std::initializer_list<std::string_view> parts) {
    expect_error(category, parts, [&] { folder.write({.merged = true}); });
    EXPECT_FALSE(fs::exists(folder.out()));
  };
  folder.change("base_model_name_or_path", nullptr);
  refuses(ErrorCategory::data, {"adapter_config.json: names no base_model_name_or_path"});
  folder.change("base_model_name_or_path", "/nowhere");
  refuses(ErrorCategory::data, {"base_model_name_or_path /nowhere does not exist"});
  const Folder other("gpt2_lora");
  folder.change("base_model_name_or_path", other.base().string());
  refuses(ErrorCategory::data, {"adapter_model.safetensors: tensor '", "lacks"});
  folder.change("base_model_name_or_path", folder.base().string());
  folder.change("r", 5);
  refuses(ErrorCategory::data, {"has no A and B of rank 5"});
  expect_error(ErrorCategory::usage, {"--merged: ", "has no adapters"}, [&] {
    export_model(folder.base(), folder.out(), {.merged = true}, [](Bytes, Bytes) {});
  });
}

TEST(AdapterFolder, IsExportedAsItIsOrInAnotherType) {
  const Folder folder("gpt2_lora");
  EXPECT_EQ(folder.write({}).files, 1U);
  const WeightFiles files(folder.out() / config::kAdapterWeights);
  const WeightFiles before(folder.adapters() / config::kAdapterWeights);
  ASSERT_EQ(files.tensors().size(), before.tensors().size());
  for (const WeightFiles::Place& place : before.tensors()) {
    EXPECT_EQ(values(files, place.tensor->name), values(before, place.tensor->name));
  }
  EXPECT_EQ(config::read_adapter_folder(folder.out()).compact(),
            config::read_adapter_folder(folder.adapters()).compact());
  fs::remove_all(folder.out());
  folder.write({.type = DType::bf16});
  const WeightFiles narrow(folder.out() / config::kAdapterWeights);
  EXPECT_EQ(type_of(narrow.tensors().front()), DType::bf16);
}

TEST(AdapterFiles, HoldExactlyWhatIsTrained) {
  const Folder folder("llama_lora");
  const AdapterFiles files(folder.adapters());
  const std::vector<std::string> all = {"q_proj", "v_proj", "o_proj", "up_proj", "down_proj"};
  files.check(folder.model(all, {"lm_head"}));
  expect_error(ErrorCategory::data, {"'base_model.model.lm_head.weight' belongs to nothing"},
               [&] { files.check(folder.model(all, {})); });
  expect_error(ErrorCategory::data, {"has no tensor '", "k_proj.lora_A.weight'"},
               [&] { files.check(folder.model({"all-linear"}, {"lm_head"})); });
  model::Architecture wide = folder.model(all, {"lm_head"});
  wide.blocks[1].tensors[0].rows_in_all = 7;
  wide.blocks[1].tensors[0].shape[0] = 7;
  expect_error(ErrorCategory::data, {"has shape [4, 48], but the model needs [7, 48]"},
               [&] { files.check(wide); });
}

TEST(AdapterConfigJson, OfOtherKindsOfAdaptersIsRefused) {
  const Folder folder("llama_lora");
  const auto refuses = [&](const std::string& key, const json& value, const json& before,
                           std::string_view rule) {
    folder.change(key, value);
    expect_error(ErrorCategory::config, {"adapter_config.json: " + key + " is ", rule},
                 [&] { config::read_adapter_folder(folder.adapters()); });
    folder.change(key, before);
  };
  refuses("peft_type", "IA3", "LORA", "type \"LORA\"");
  refuses("bias", "all", "none", "only \"none\"");
  refuses("init_lora_weights", "pissa", true, "changed base model");
  refuses("use_dora", 1, false, "a flag is expected");
  refuses("use_qalora", true, false, "no such adapters");
  refuses("rank_pattern", json{{"q_proj", 2}}, json::object(), "no such adapters");
  refuses("layers_to_transform", json{0}, nullptr, "no such adapters");
  refuses("something_new", 3, nullptr, "no such adapters");
  refuses("r", "4", 4, "a number is expected");
  refuses("use_rslora", 1, false, "a flag is expected");
  refuses("modules_to_save", json{3}, nullptr, "a list of names is expected");
  refuses("target_modules", ".*_proj", json{"q_proj"}, "only lists of names");
  expect_error(ErrorCategory::config, {"adapter_config.json"},
               [&] { config::read_adapter_folder(folder.base()); });
}

TEST(AdapterConfigJson, ComesBackAsItWasWritten) {
  const Folder folder("llama_lora");
  const model::Architecture model = folder.model({"q_proj", "up_proj"}, {"*.norm.weight"});
  std::ofstream(folder.adapters() / config::kAdapterConfig)
      << config::make_adapter_config(model, folder.base()).pretty();
  EXPECT_EQ(config::read_adapter_folder(folder.adapters()).compact(),
            R"({"rank":4,"alpha":8.0,"dropout":0.0,"rslora":false,"dora":false,)"
            R"("targets":["q_proj","up_proj"],"modules_to_save":["model.norm"]})");
  EXPECT_EQ(base_of_adapters(folder.adapters()), folder.base());
}

}  // namespace
}  // namespace ballast::train::adapter_files_test
