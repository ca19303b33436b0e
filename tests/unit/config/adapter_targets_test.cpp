// Names of adapted maps in the adapter_config.json of models with experts, where PEFT has special
// rules.
#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "ballast/config/adapter_folder.h"
#include "ballast/config/config.h"
#include "ballast/formats/safetensors.h"
#include "ballast/model/family.h"

#include "src/config/adapter_config.h"
#include "tests/support/expect_error.h"
#include "tests/support/temp_dir.h"
#include "tests/unit/config/samples.h"

namespace ballast::config::adapter_targets_test {
namespace {

using nlohmann::json;
using test::error_of;
using test::kMinimal;

/// config.json of a model whose first layer is dense and whose second one has experts.
json deepseek() {
  return json::parse(R"({
      "model_type": "deepseek_v3", "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2,
      "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 48,
      "first_k_dense_replace": 1, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
      "topk_group": 1, "moe_intermediate_size": 16, "q_lora_rank": 16, "kv_lora_rank": 12,
      "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "rope_theta": 10000.0})");
}

json qwen(const std::string& family) {
  return {{"model_type", family},   {"vocab_size", 61},         {"hidden_size", 32},
          {"num_hidden_layers", 2}, {"num_attention_heads", 2}, {"num_key_value_heads", 2},
          {"head_dim", 16},         {"intermediate_size", 48},  {"moe_intermediate_size", 16},
          {"num_experts", 4},       {"num_experts_per_tok", 2}, {"mlp_only_layers", {0}}};
}

/// A folder m of a model, and adapters that are trained over it.
class AdapterTargets : public testing::Test {
 protected:
  void write_model(const json& text) { dir_.write("m/config.json", text.dump()); }
  [[nodiscard]] Config parse(const json& adapters) const {
    const json text = {{"model", {{"path", "m"}}},
                       {"data", {{"tokens", "t"}, {"sequence_length", 8}}},
                       {"train_batch_size", 1},
                       {"ballast", {{"train", "adapters"}, {"adapters", adapters}}}};
    return config::parse(text.dump(), dir_.path(), "c.json", {});
  }
  [[nodiscard]] static model::Architecture model_of(const Config& config) {
    return config::model_of(config, [](const std::string& path, const std::string& rule) {
      FAIL() << path << ": " << rule;
    });
  }
  /// The adapter_config.json of a run with these adapters.
  [[nodiscard]] json written(const json& adapters) const {
    const auto made = make_adapter_config(model_of(parse(adapters)), dir_.path() / "m");
    return json::parse(made.compact());
  }
  /// The modules of the model that these adapters change.
  [[nodiscard]] std::set<std::string> adapted(const json& adapters) const {
    std::set<std::string> modules;
    for (const auto& block : model_of(parse(adapters)).blocks) {
      for (const auto& tensor : block.tensors) {
        const auto at = tensor.name.find(".lora_A");
        if (at != std::string::npos) modules.insert(tensor.name.substr(0, at));
      }
    }
    return modules;
  }
  /// Writes a PEFT folder a: its settings, and a tensor A of each module.
  void write_adapters(const json& settings, const std::set<std::string>& modules) const {
    dir_.write("a/adapter_config.json", settings.dump());
    std::vector<formats::TensorToStore> tensors;
    for (const std::string& module : modules) {
      tensors.push_back({kAdapterPrefix + module + ".lora_A.weight", DType::f32, {1}});
    }
    formats::SafetensorsWriter writer(dir_.path() / "a" / kAdapterWeights, tensors);
    for (const auto& tensor : tensors) writer.write(tensor.name, std::vector<float>{0.0F});
    writer.finish();
  }
  [[nodiscard]] bool has_note(const json& adapters, const std::string& words) const {
    const auto notes = parse(adapters).notes;
    return std::ranges::any_of(
        notes, [&](const std::string& note) { return note.find(words) != std::string::npos; });
  }

  test::TempDir dir_;
};

const json kAll = {{"targets", "all-linear"}, {"rank", 2}};

TEST_F(AdapterTargets, DenseMapsAreParametersWherePeftTakesThemForExperts) {
  write_model(deepseek());
  const json found = written(kAll);
  EXPECT_EQ(found["target_parameters"],
            json({"model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight",
                  "model.layers.0.mlp.down_proj.weight"}));
  EXPECT_EQ(found["target_modules"].size(), 10U);
  for (const std::string name : found["target_modules"]) {
    EXPECT_EQ(name.find(".mlp."), std::string::npos) << name;
    EXPECT_EQ(name.rfind("model.layers.", 0), 0U) << name;
  }
  EXPECT_FALSE(has_note(kAll, "ballast.adapters: "));

  json dropout = kAll;
  dropout["dropout"] = 0.25;
  EXPECT_EQ(written(dropout)["lora_dropout"], 0.0);
  EXPECT_TRUE(has_note(dropout, "lora_dropout in adapter_config.json is 0 instead of 0.25"));

  json dora = kAll;
  dora["dora"] = true;
  EXPECT_FALSE(written(dora).contains("target_parameters"));
  EXPECT_TRUE(has_note(dora, "cannot load DoRA of gate_proj, up_proj and down_proj"));

  const json attention = {{"targets", {"o_proj"}}, {"rank", 2}, {"dropout", 0.25}};
  EXPECT_EQ(written(attention)["target_modules"], json({"o_proj"}));
  EXPECT_EQ(written(attention)["lora_dropout"], 0.25);
  EXPECT_FALSE(has_note(attention, "ballast.adapters: "));
}

TEST_F(AdapterTargets, EachConvertedTypeOfModelIsKnown) {
  const std::vector<std::string> modules = {"model.layers.0.mlp.up_proj"};
  for (const char* type : {"afmoe", "cohere2_moe", "deepseek_v3", "deepseek_v32", "ernie4_5_moe",
                           "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "mellum", "olmoe",
                           "qwen3_moe", "qwen3_next", "solar_open"}) {
    EXPECT_TRUE(needs_parameters(type, modules)) << type;
  }
  for (const char* type : {"llama", "qwen2_moe", "mistral4", "gemma4_text", "qwen3_5_moe_text"}) {
    EXPECT_FALSE(needs_parameters(type, modules)) << type;
  }
  EXPECT_FALSE(needs_parameters("qwen3_moe", {"model.layers.0.self_attn.q_proj"}));
  EXPECT_FALSE(needs_parameters(
      "qwen3_moe", {"model.layers.0.mlp.up_proj", "model.layers.1.mlp.experts.0.up_proj"}));
}

TEST_F(AdapterTargets, DenseMapsAreNamedInFullAmongExperts) {
  json text = qwen("qwen2_moe");
  text.erase("head_dim");
  text["shared_expert_intermediate_size"] = 16;
  write_model(text);
  const json found = written(kAll);
  EXPECT_FALSE(found.contains("target_parameters"));
  EXPECT_NE(std::ranges::find(found["target_modules"], "model.layers.0.mlp.up_proj"),
            found["target_modules"].end());

  write_model(qwen("qwen3_moe"));
  EXPECT_EQ(written(kAll)["target_parameters"].size(), 3U);
}

TEST_F(AdapterTargets, AreReadInEachSpelling) {
  write_model(deepseek());
  const std::set<std::string> modules = adapted(kAll);
  ASSERT_EQ(modules.size(), 13U);
  const json from_folder = {{"path", "a"}};
  const json now = written(kAll);
  write_adapters(now, modules);
  EXPECT_EQ(adapted(from_folder), modules);

  json earlier = now;  // names that the experts have, too
  earlier.erase("target_parameters");
  earlier["target_modules"] = {"q_a_proj",  "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj",
                               "gate_proj", "up_proj",  "down_proj"};
  write_adapters(earlier, modules);
  EXPECT_EQ(adapted(from_folder), modules);

  json of_peft = now;  // after a save_pretrained() of PEFT 0.21
  of_peft["target_modules"] = {"q_a_proj"};
  of_peft["exclude_modules"] = nullptr;
  of_peft["rank_pattern"] = json::object();
  write_adapters(of_peft, {"model.layers.0.self_attn.q_a_proj", "model.layers.1.self_attn.q_a_proj",
                           "model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj",
                           "model.layers.0.mlp.down_proj"});
  EXPECT_EQ(adapted(from_folder).size(), 5U);

  json experts = now;
  experts["target_parameters"] = {"mlp.experts.down_proj_bias"};
  write_adapters(experts, modules);
  test::expect_error(ErrorCategory::config,
                     {"target_parameters is [\"mlp.experts.down_proj_bias\"]", "no other"},
                     [&] { static_cast<void>(parse(from_folder)); });
}

/// PEFT takes none of these names for maps of single experts.
TEST_F(AdapterTargets, OfExpertsAreParameters) {
  write_model(qwen("qwen3_moe"));
  const json found = written(
      {{"targets", {"q_proj", "experts.gate_up_proj", "mlp.gate", "mlp.up_proj"}}, {"rank", 2}});
  const auto has = [&](const char* key, const std::string& name) {
    const json& list = found[key];
    return std::find(list.begin(), list.end(), name) != list.end();
  };
  EXPECT_TRUE(has("target_parameters", "model.layers.1.mlp.experts.gate_up_proj"));
  EXPECT_TRUE(has("target_parameters", "model.layers.1.mlp.gate.weight"));
  EXPECT_TRUE(has("target_parameters", "model.layers.0.mlp.up_proj.weight"));
  EXPECT_TRUE(has("target_modules", "model.layers.0.self_attn.q_proj"));
  EXPECT_EQ(found["peft_version"], "0.21.2");
}

TEST_F(AdapterTargets, OfEarlierFoldersAreSpeltAgain) {
  write_model(deepseek());
  const json now = written(kAll);
  const std::set<std::string> set = adapted(kAll);
  const std::vector<std::string> modules(set.begin(), set.end());
  json earlier = now;
  earlier.erase("target_parameters");
  earlier["target_modules"] = {"q_a_proj", "up_proj"};
  const auto respelt = [&](const json& text) { return respell_adapters(text.dump(), modules); };

  const json found = json::parse(respelt(earlier).text);
  const auto sorted = [](const json& list) {
    return std::set<std::string>(list.begin(), list.end());
  };
  for (const char* key : {"target_parameters", "target_modules"}) {
    EXPECT_EQ(sorted(found[key]), sorted(now[key])) << key;
  }
  EXPECT_EQ(respelt(earlier).note, "");
  EXPECT_EQ(respelt(now).text, now.dump());

  json ranks = earlier;
  ranks["rank_pattern"] = {{"up_proj", 4}};
  EXPECT_EQ(respelt(ranks).text, ranks.dump());
  json elsewhere = earlier;
  elsewhere["base_model_name_or_path"] = "org/model";
  EXPECT_EQ(respelt(elsewhere).text, elsewhere.dump());
  json dora = earlier;
  dora["use_dora"] = true;
  EXPECT_EQ(respelt(dora).text, dora.dump());
  EXPECT_NE(respelt(dora).note.find("--merged"), std::string::npos);
}

TEST(AdapterPatterns, ThatCannotBeUsedAreRefused) {
  const auto says = [](const std::string& adapters, const std::string& rule) {
    const std::string error = error_of(kMinimal, {"ballast.train=adapters", adapters});
    EXPECT_NE(error.find(rule), std::string::npos) << error;
  };
  const auto pattern = [](const std::string& key, const std::string& value) {
    return R"(ballast.adapters={"targets": "c_fc", ")" + key + R"(": )" + value + "}";
  };
  says(pattern("rank_pattern", "4"), "an object is expected");
  says(pattern("rank_pattern", R"({"c_fc": 0})"), "whole numbers above 0");
  says(pattern("rank_pattern", R"({"c_fc": 65537})"), "at most 65536");
  says(pattern("alpha_pattern", R"({"c_fc": "x"})"), "numbers above 0");
  says(pattern("rank_pattern", R"({"(c_fc": 2})"), "regular expression '(c_fc'");
  says(pattern("alpha_pattern", R"({"c_attn": 2})"), "'c_attn' matches no map with an adapter");
}

}  // namespace
}  // namespace ballast::config::adapter_targets_test
