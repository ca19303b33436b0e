// PEFT folders: import, export and adapters that are merged into their model.
#include "src/formats/adapter_files.h"

#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "ballast/config/adapter_folder.h"
#include "ballast/formats/export.h"
#include "ballast/formats/model_folder.h"
#include "ballast/model/architecture.h"
#include "ballast/model/family.h"

#include "tests/support/expect_error.h"
#include "tests/support/fixtures.h"
#include "tests/support/tags.h"
#include "tests/support/temp_dir.h"

namespace ballast::formats::adapter_files_test {
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

TAG_TESTS("one_thread", "MergedAdapters.*");
TEST(MergedAdapters, AreThoseOfPeft) {
  for (const std::string name :
       {"llama_lora", "gpt2_lora", "llama_dora", "gpt2_dora", "llama_patterns", "qwen2_moe_lora"}) {
    const Folder folder(name);
    folder.write({.merged = true});
    const WeightFiles ours(folder.out());
    const WeightFiles before(folder.base());
    const WeightFiles theirs(test::fixture("training") / (name + ".merged.safetensors"));
    EXPECT_EQ(ours.tensors().size(), before.tensors().size());
    std::size_t changed = 0;
    for (const WeightPlace& place : theirs.tensors()) {
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
  EXPECT_LT(other, ours.size() / 500);  // values between two representable ones
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

/// A model of two matrices, an embedding and optionally an output matrix, and adapters for it. Each
/// value is computed from the tensor's name and the element.
struct SmallFolder {
  using Tensors = std::map<std::string, std::vector<std::uint64_t>>;
  static constexpr std::size_t kIn = 3;
  static constexpr std::size_t kTokens = 5;
  static inline const std::string kMap = "model.layers.1.self_attn.q_proj";

  explicit SmallFolder(bool tied, const json& config = json::object()) {
    Tensors tensors = {{"model.embed_tokens.weight", {kTokens, kIn}},
                       {"model.layers.0.self_attn.q_proj.weight", {4, kIn}},
                       {kMap + ".weight", {4, kIn}},
                       {kMap + ".bias", {4}}};
    if (!tied) tensors["lm_head.weight"] = {kTokens, kIn};
    write("base", kSingleWeights, tensors);
    dir.write(
        "base/config.json",
        json{{"model_type", "llama"}, {"tie_word_embeddings", tied}, {"torch_dtype", "float32"}}
            .dump());
    json settings = {{"peft_type", "LORA"},
                     {"r", 2},
                     {"lora_alpha", 6},
                     {"base_model_name_or_path", (dir.path() / "base").string()}};
    settings.update(config);
    dir.write("adapters/adapter_config.json", settings.dump());
  }

  static float value(const std::string& name, std::size_t element) {
    const std::size_t hash = std::hash<std::string>()(name) + element * 7919;
    return static_cast<float>(hash % 97) / 32.0F - 1.5F;
  }
  void write(const std::string& folder, const char* file, const Tensors& tensors) const {
    fs::create_directories(dir.path() / folder);
    std::vector<TensorToStore> list;
    for (const auto& [name, shape] : tensors) list.push_back({name, DType::f32, shape});
    SafetensorsWriter writer(dir.path() / folder / file, list);
    for (const auto& [name, shape] : tensors) {
      std::vector<float> all(shape[0] * (shape.size() > 1 ? shape[1] : 1));
      for (std::size_t i = 0; i < all.size(); ++i) all[i] = value(name, i);
      writer.write(name, all);
    }
    writer.finish();
  }
  /// Merges adapters with these tensors, whose names follow "base_model.model.".
  [[nodiscard]] WeightFiles merge(const Tensors& adapters) const {
    Tensors named;
    for (const auto& [name, shape] : adapters) named[config::kAdapterPrefix + name] = shape;
    write("adapters", config::kAdapterWeights, named);
    fs::remove_all(dir.path() / "out");
    export_model(dir.path() / "adapters", dir.path() / "out", {.merged = true},
                 [](Bytes, Bytes) {});
    return WeightFiles(dir.path() / "out");
  }
  [[nodiscard]] bool is_tied() const {
    return json::parse(read_small_file(dir.path() / "out" / "config.json"))["tie_word_embeddings"];
  }
  void refuses(const Tensors& adapters, std::initializer_list<std::string_view> parts,
               ErrorCategory category = ErrorCategory::data) const {
    SCOPED_TRACE(std::string(*(parts.end() - 1)));
    expect_error(category, parts, [&] { static_cast<void>(merge(adapters)); });
  }
  test::TempDir dir;
};

/// Expects element [row, column] of a merged matrix to be before + scale * sum of B A.
void expect_product(const WeightFiles& merged, const std::string& module, std::size_t rows,
                    const std::string& before, double scale, std::size_t rank) {
  const auto part = [&](const std::string& suffix, std::size_t element) {
    return SmallFolder::value(config::kAdapterPrefix + module + suffix, element);
  };
  constexpr std::size_t kIn = SmallFolder::kIn;
  const std::vector<float> found = values(merged, module + ".weight");
  ASSERT_EQ(found.size(), rows * kIn);
  for (std::size_t row = 0; row < rows; ++row) {
    for (std::size_t column = 0; column < kIn; ++column) {
      double sum = 0.0;
      for (std::size_t k = 0; k < rank; ++k) {
        sum +=
            before.find("embedding") != std::string::npos
                ? part(".lora_embedding_B", column * rank + k) *
                      part(".lora_embedding_A", k * rows + row)
                : part(".lora_B.weight", row * rank + k) * part(".lora_A.weight", k * kIn + column);
      }
      const std::size_t at = row * kIn + column;
      const std::string name =
          before.empty() || before == "embedding" ? module + ".weight" : before;
      EXPECT_NEAR(found[at], SmallFolder::value(name, at) + scale * sum, 1e-5) << module << at;
    }
  }
}

TEST(MergedAdapters, HaveTheRanksAndScalesOfPatterns) {
  const SmallFolder folder(
      false,
      {{"target_modules", R"(.*\.(q|v)_proj)"},
       {"layers_to_transform", {0, 1}},
       {"exclude_modules", "x"},
       {"rank_pattern", {{R"(layers\.1\..*)", 4}}},
       {"alpha_pattern",
        {{"^model.layers.0.self_attn.q_proj", 10}, {"q_proj|x", 2}, {"self_attn.q_proj", 30}}}});
  const std::string first = "model.layers.0.self_attn.q_proj";
  const WeightFiles merged = folder.merge({{first + ".lora_A.weight", {2, 3}},
                                           {first + ".lora_B.weight", {4, 2}},
                                           {folder.kMap + ".lora_A.weight", {4, 3}},
                                           {folder.kMap + ".lora_B.weight", {4, 4}}});
  expect_product(merged, first, 4, "", 10.0 / 2, 2);
  expect_product(merged, folder.kMap, 4, "", 2.0 / 4, 4);
  EXPECT_EQ(values(merged, "lm_head.weight")[0], SmallFolder::value("lm_head.weight", 0));
}

TEST(MergedAdapters, IncludeEmbeddingsOutputMatricesBiasesAndTokens) {
  const SmallFolder folder(false, {{"trainable_token_indices", {4, 1}}});
  const auto prefixed = [](const std::string& name) { return config::kAdapterPrefix + name; };
  const WeightFiles merged =
      folder.merge({{"lm_head.base_layer.weight", {5, 3}},
                    {"lm_head.lora_A.weight", {2, 3}},
                    {"lm_head.lora_B.weight", {5, 2}},
                    {folder.kMap + ".lora_A.weight", {2, 3}},
                    {folder.kMap + ".lora_B.weight", {4, 2}},
                    {folder.kMap + ".lora_B.bias", {4}},
                    {"model.embed_tokens.token_adapter.trainable_tokens_delta", {2, 3}}});
  expect_product(merged, "lm_head", 5, prefixed("lm_head.base_layer.weight"), 3.0, 2);
  const auto bias = values(merged, folder.kMap + ".bias");
  for (std::size_t i = 0; i < bias.size(); ++i) {
    EXPECT_NEAR(bias[i],
                SmallFolder::value(folder.kMap + ".bias", i) +
                    3.0F * SmallFolder::value(prefixed(folder.kMap + ".lora_B.bias"), i),
                1e-5);
  }
  const auto rows = values(merged, "model.embed_tokens.weight");
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const std::string delta = prefixed("model.embed_tokens.token_adapter.trainable_tokens_delta");
    const float own = SmallFolder::value("model.embed_tokens.weight", i);
    const std::size_t row = i / 3;
    EXPECT_EQ(rows[i], row == 4   ? SmallFolder::value(delta, i % 3)
                       : row == 1 ? SmallFolder::value(delta, 3 + i % 3)
                                  : own);
  }
  const SmallFolder other(false);
  expect_product(other.merge({{"model.embed_tokens.lora_embedding_A", {2, 5}},
                              {"model.embed_tokens.lora_embedding_B", {3, 2}}}),
                 "model.embed_tokens", 5, "embedding", 3.0, 2);
}

TEST(MergedAdapters, UntieEmbeddingsThatDiffer) {
  const std::string head = "lm_head.weight";
  const std::string tokens = "model.embed_tokens.weight";
  const auto own = [](const std::string& name) { return SmallFolder::value(name, 7); };
  const auto theirs = [&](const std::string& name) { return own(config::kAdapterPrefix + name); };
  const SmallFolder folder(true);
  WeightFiles merged = folder.merge({{tokens, {5, 3}}});
  EXPECT_FALSE(folder.is_tied());
  EXPECT_EQ(values(merged, tokens)[7], theirs(tokens));
  EXPECT_EQ(values(merged, head)[7], own(tokens));
  merged = folder.merge({{head, {5, 3}}});
  EXPECT_FALSE(folder.is_tied());
  EXPECT_EQ(values(merged, tokens)[7], own(tokens));
  EXPECT_EQ(values(merged, head)[7], theirs(head));
  merged = folder.merge({{head, {5, 3}}, {tokens, {5, 3}}});
  EXPECT_FALSE(folder.is_tied());
  EXPECT_EQ(values(merged, tokens)[7], theirs(tokens));
  EXPECT_EQ(values(merged, head)[7], theirs(head));
  static_cast<void>(folder.merge(
      {{folder.kMap + ".lora_A.weight", {2, 3}}, {folder.kMap + ".lora_B.weight", {4, 2}}}));
  EXPECT_TRUE(folder.is_tied());
  const SmallFolder rows(true, {{"trainable_token_indices", {{"embed_tokens", {2}}}}});
  merged = rows.merge({{"model.embed_tokens.token_adapter.trainable_tokens_delta", {1, 3}}});
  EXPECT_TRUE(rows.is_tied());
  EXPECT_EQ(merged.find(head), nullptr);
  for (const char* suffix : {"lm_head.lora_", "model.embed_tokens.lora_embedding_"}) {
    const bool output = suffix[0] == 'l';
    const std::string end = output ? ".weight" : "";
    folder.refuses({{suffix + ("A" + end), {2, output ? 3U : 5U}},
                    {suffix + ("B" + end), {output ? 5U : 3U, 2}}},
                   {"adapter_model.safetensors: there are adapters of '", "which the model ties to",
                    "tie_word_embeddings false"});
  }
}

TEST(MergedAdapters, AreCompleteOrRefused) {
  const SmallFolder folder(false);
  const std::string map = folder.kMap;
  folder.refuses({{map + ".lora_B.weight", {4, 2}}}, {"q_proj.lora_B.weight' is there without '"});
  folder.refuses({{map + ".lora_A.default.weight", {2, 3}}}, {"a PEFT model in training"});
  folder.refuses({{"_orig_mod." + map + ".lora_A.weight", {2, 3}}},
                 {"wrapped module (torch.compile"});
  folder.refuses({{map + ".lora_E", {2, 1}}}, {"adapters that Ballast does not have"});
  folder.refuses({{"model.extra.weight", {2, 1}}}, {"belongs to 'model.extra.weight', which"});
  folder.refuses({{"model.embed_tokens.weight", {6, 3}}},
                 {"has shape [6, 3]", "has [5, 3]", "resize_token_embeddings"});
  folder.refuses({{"model.embed_tokens.token_adapter.trainable_tokens_delta", {1, 3}}},
                 {"does not fit the model and trainable_token_indices"});
  folder.refuses({{map + ".lora_A.weight", {2, 3}},
                  {map + ".lora_B.weight", {4, 2}},
                  {map + ".lora_magnitude_vector", {4}}},
                 {"does not say use_dora"});
  folder.write("adapters", config::kAdapterWeights, {{"model.norm.lora_A.weight", {2, 3}}});
  expect_error(ErrorCategory::data, {"does not begin with 'base_model.model.'"}, [&] {
    export_model(folder.dir.path() / "adapters", folder.dir.path() / "out", {.merged = true},
                 [](Bytes, Bytes) {});
  });
  const auto refuses_config = [](const json& settings, std::string_view rule) {
    const SmallFolder other(false, settings);
    other.refuses({}, {"adapter_config.json: ", rule}, ErrorCategory::config);
  };
  refuses_config({{"init_lora_weights", "pissa_niter_4"}}, "changed base model");
  refuses_config({{"target_parameters", {"experts.down_proj_bias"}}}, "of no other parameters");
  refuses_config({{"alora_invocation_tokens", {1}}}, "no such adapters");
  refuses_config({{"kasa_config", {{"beta", 1}}}}, "no such adapters");
  refuses_config({{"alpha_pattern", {{"(?<=x)q_proj", 3}}}}, "cannot read the regular expression");
  refuses_config({{"alpha_pattern", {{"(q_proj", 3}}}}, "cannot read the regular expression");
  refuses_config({{"rank_pattern", {{"q_proj", 0}}}}, "whole numbers above 0");
  refuses_config({{"rank_pattern", {{"q_proj", 1e30}}}}, "whole numbers above 0");
  refuses_config({{"r", -2}}, "a whole number is expected");
  refuses_config({{"lora_alpha", "6"}}, "a number is expected");
  refuses_config({{"trainable_token_indices", {{"embed_tokens", 3}}}}, "lists of ids of tokens");
  refuses_config({{"peft_type", "VERA"}, {"d_initial", 0.1}}, "type \"LORA\"");
}

TEST(AdapterFolder, OfPickledTensorsSaysHowToConvertThem) {
  const SmallFolder folder(false);
  folder.dir.write("adapters/adapter_model.bin", "");
  expect_error(ErrorCategory::data, {"adapter_model.bin is not safetensors", "save_pretrained"},
               [&] {
                 export_model(folder.dir.path() / "adapters", folder.dir.path() / "out",
                              {.merged = true}, [](Bytes, Bytes) {});
               });
}

TEST(AdapterFolder, InsideTheGivenFolderIsNamed) {
  const SmallFolder folder(false);
  expect_error(ErrorCategory::usage, {"has no adapters; its folder adapters has: give that"}, [&] {
    export_model(folder.dir.path(), folder.dir.path() / "out", {.merged = true},
                 [](Bytes, Bytes) {});
  });
  folder.dir.write("adapters/adapter_config.json",
                   json{{"base_model_name_or_path", "org/model"}}.dump());
  expect_error(ErrorCategory::data,
               {"org/model does not exist here (it may be a model of the Hub)"}, [&] {
                 export_model(folder.dir.path() / "adapters", folder.dir.path() / "out",
                              {.merged = true}, [](Bytes, Bytes) {});
               });
}

TEST(AdapterFolder, IsExportedAsItIsOrInAnotherType) {
  const Folder folder("gpt2_lora");
  EXPECT_EQ(folder.write({}).files, 1U);
  const WeightFiles files(folder.out() / config::kAdapterWeights);
  const WeightFiles before(folder.adapters() / config::kAdapterWeights);
  ASSERT_EQ(files.tensors().size(), before.tensors().size());
  for (const WeightPlace& place : before.tensors()) {
    EXPECT_EQ(values(files, place.tensor->name), values(before, place.tensor->name));
  }
  EXPECT_EQ(config::read_adapter_folder(folder.out()).compact(),
            config::read_adapter_folder(folder.adapters()).compact());
  fs::remove_all(folder.out());
  folder.write({.type = DType::bf16});
  const WeightFiles narrow(folder.out() / config::kAdapterWeights);
  EXPECT_EQ(type_of(narrow.tensors().front()), DType::bf16);
}

TEST(AdapterFiles, ContainExactlyTheTrainedTensors) {
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
  refuses("init_lora_weights", "mica", true, "trains only one matrix");
  refuses("bias", "all", "none", "only \"none\"");
  refuses("init_lora_weights", "pissa", true, "changed base model");
  refuses("use_dora", 1, false, "a flag is expected");
  refuses("use_qalora", true, false, "no such adapters");
  refuses("rank_pattern", json{"q_proj"}, json::object(), "an object is expected");
  refuses("layers_to_transform", json{0}, nullptr, "list their full names");
  refuses("exclude_modules", "x", nullptr, "list their full names");
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
}  // namespace ballast::formats::adapter_files_test
