#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "ballast/config/config.h"
#include "ballast/config/hugging_face_config.h"
#include "ballast/config/stored_model.h"
#include "ballast/core/error.h"
#include "ballast/model/family.h"
#include "ballast/text/json.h"

#include "tests/support/fixtures.h"
#include "tests/support/fuzz_inputs.h"
#include "tests/support/temp_dir.h"

namespace ballast::config::folder_configs_test {
namespace {

using json = nlohmann::ordered_json;  // messages name the first key

/// A Hugging Face folder as a config reads it: its model section, or the message of a refusal.
class Folder {
 public:
  struct Read {
    json section;
    std::string message;
    std::vector<std::string> notes;
  };
  [[nodiscard]] Config parse(const json& config) const {
    std::filesystem::remove(file());  // truncating a file may wait for the disk
    dir_.write("m/config.json", config.dump());
    static const std::string text =
        R"({"model": {"path": "m"}, "data": {"documents": ["d"], "sequence_length": 48},)"
        R"( "optimizer": {"type": "SGD"}, "train_batch_size": 1})";
    return config::parse(text, dir_.path(), "c.json", {});
  }
  [[nodiscard]] Read read(const json& config) const {
    try {
      const Config parsed = parse(config);
      json section = json::parse(print(parsed)).at("model");
      // The pad token changes no loss.
      for (const char* key : {"weights", "router_bias_update_speed", "pad_token_id"}) {
        section.erase(key);
      }
      return {std::move(section), "", parsed.notes};
    } catch (const Error& error) {
      return {nullptr, error.what(), {}};
    }
  }
  [[nodiscard]] std::filesystem::path file() const { return dir_.path() / "m/config.json"; }

 private:
  test::TempDir dir_;
};

/// A change of a config.json and its result: changed keys of the section, or the key (null: any)
/// that the message names.
struct Change {
  json keys;
  json expected;
  bool refused;
};

std::vector<Change> changes_of(const json& family) {
  std::vector<Change> changes;
  const auto add_values = [&](const char* part, bool refused) {
    for (const auto& [key, values] : family.at(part).items()) {
      for (const json& value : values) {
        json expected = json::object();
        if (refused) expected = key.substr(key.starts_with('-') ? 1 : 0);
        changes.push_back({{{key, value}}, expected, refused});
      }
    }
  };
  add_values("without_effect", false);
  add_values("refused", true);
  for (const json& pair : family.at("equal")) changes.push_back({pair[0], pair[1], false});
  for (const json& pair : family.at("refused_with")) changes.push_back({pair[0], pair[1], true});
  return changes;
}

json changed(json config, const json& keys) {
  for (const auto& [key, value] : keys.items()) {
    if (key.starts_with('-')) {
      config.erase(key.substr(1));
    } else {
      config[key] = value;
    }
  }
  return config;
}

std::vector<json> families() {
  std::ifstream file(test::fixture("folder_configs.jsonl"));
  std::vector<json> lines;
  for (std::string line; std::getline(file, line);) lines.push_back(json::parse(line));
  return lines;
}

/// The keys of a section are printed in the order of the first family that has them, which means
/// nothing.
nlohmann::json without_order(const json& section) {
  return nlohmann::json::parse(section.dump());
}

TEST(FolderConfigs, AreReadAsTransformersReadsThem) {
  const std::vector<json> all = families();
  ASSERT_EQ(all.size(), 30U);
  const std::size_t inputs = test::fuzz_inputs(1500) / all.size();
  const Folder folder;
  for (const json& family : all) {
    const json& base = family.at("config");
    ASSERT_EQ(without_order(folder.read(base).section), without_order(family.at("model")))
        << family.at("family");
    const std::vector<Change> changes = changes_of(family);
    const std::size_t step = 1 + changes.size() / (inputs + 1);
    for (std::size_t i = 0; i < changes.size(); i += step) {
      const Change& change = changes[i];
      const Folder::Read found = folder.read(changed(base, change.keys));
      const std::string described = family.at("family").dump() + " " + change.keys.dump();
      if (change.refused) {
        EXPECT_TRUE(found.section.is_null()) << described;
        const bool named =
            change.expected.is_null() ||
            found.message.find(change.expected.get<std::string>()) != std::string::npos;
        EXPECT_TRUE(named) << described << ": " << found.message;
        continue;
      }
      json expected = family.at("model");
      expected.update(change.expected);
      EXPECT_EQ(without_order(found.section), without_order(expected))
          << described << ": " << found.message;
    }
  }
}

TEST(FolderConfigs, NoteKeysThatTheClassDoesNotReadInOneLine) {
  json config = families().at(2).at("config");
  config.update({{"a_key", 1},
                 {"b_key", {{"deep", true}}},
                 {"c_key", false},
                 {"d_key", nullptr},
                 {"_comment", "x"},
                 {"_model_name_or_path", "x.gguf"},
                 {"unk_token_id", 0}});
  const Folder folder;
  const std::vector<std::string> notes = folder.read(config).notes;
  ASSERT_EQ(notes.size(), 1U);
  EXPECT_EQ(notes[0], "model.path: transformers' LlamaForCausalLM does not use these keys of " +
                          folder.file().string() + ": a_key, b_key, c_key, d_key");
}

TEST(FolderConfigs, NameAllUnknownKeysThatTheClassReadsInOneMessage) {
  json config = families().at(2).at("config");
  config.update(
      {{"a_key", 1}, {"decoder", 1}, {"text_encoder", {{"deep", true}}}, {"generator", nullptr}});
  EXPECT_NE(
      Folder().read(config).message.find(
          "decoder is 1, text_encoder is {\"deep\":true}, but Ballast does not know these keys"),
      std::string::npos)
      << Folder().read(config).message;
}

TEST(FolderConfigs, CheckTheKeysOfQuantizationInTheSameWay) {
  json config = families().at(2).at("config");
  json& quantization = config["quantization_config"];
  quantization = {{"quant_method", "fp8"},
                  {"weight_block_size", {128, 128}},
                  {"expert_dtype", "fp8"},
                  {"modules_to_convert", nullptr},
                  {"by", "a tool"}};
  const Folder folder;
  const Folder::Read found = folder.read(config);
  ASSERT_EQ(found.notes.size(), 1U) << found.message;
  EXPECT_NE(found.notes[0].find(": quantization_config.modules_to_convert, quantization_config.by"),
            std::string::npos)
      << found.notes[0];
  quantization["expert_dtype"] = "fp4";
  EXPECT_NE(folder.read(config).message.find(
                "quantization_config.expert_dtype is \"fp4\", but Ballast does not know this key"),
            std::string::npos);
}

/// config.json files of published models have keys of the code that they were trained with.
TEST(FolderConfigs, OfQwen3CoderHasKeysOfAnotherFamily) {
  for (const json& line : families()) {
    if (line.at("family") != "qwen3_moe") continue;
    json config = line.at("config");
    config.update(
        {{"shared_expert_intermediate_size", 0}, {"use_qk_norm", true}, {"qkv_bias", false}});
    const Folder::Read found = Folder().read(config);
    EXPECT_EQ(without_order(found.section), without_order(line.at("model"))) << found.message;
    ASSERT_EQ(found.notes.size(), 1U);
    EXPECT_NE(found.notes[0].find(": shared_expert_intermediate_size, use_qk_norm, qkv_bias"),
              std::string::npos)
        << found.notes[0];
  }
}

/// Returns the message about a config.json that has only this key, with a value that no class has.
std::string message_about(const model::Family& family, std::string_view key,
                          std::vector<std::string>& notes) {
  text::Json config = text::Json::object();
  config[key] = text::Json::object({{"x", 1}});
  try {
    check_unknown_keys(config, family, "config.json", notes);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(FolderConfigs, KnowEveryKeyThatTheClassReads) {
  // Read by rope_keys.cpp, and those with which transformers makes another model.
  constexpr std::string_view kElsewhere =
      "rope_parameters rope_theta partial_rotary_factor original_max_position_embeddings "
      "rope_local_base_freq rotary_emb_base rotary_pct rotary_dim";
  constexpr std::string_view kRefused =
      "decoder generator per_layer_config text_config text_encoder transformers_weights";
  constexpr std::string_view kRefusedOfFamily =
      "mistral.layer_types ministral3.layer_types gpt_neox.head_dim olmoe.sliding_window";
  for (const std::string& name : model::family_names()) {
    const model::Family& family = model::family(name);
    const auto read = model::read_attributes(family.checkpoint_type());
    ASSERT_TRUE(read.has_value()) << name;
    const auto keys = text::words_of(*read);
    EXPECT_GT(keys.size(), 15U) << name;
    for (const std::string_view key : keys) {
      if (text::has_word(kElsewhere, key)) continue;
      std::vector<std::string> notes;
      const std::string message = message_about(family, key, notes);
      const bool unknown = message.find("Ballast does not know") != std::string::npos;
      const bool refused = text::has_word(kRefused, key) ||
                           text::has_word(kRefusedOfFamily, fmt::format("{}.{}", name, key));
      EXPECT_EQ(unknown, refused) << name << " " << key << " " << message;
      for (const std::string& note : notes) {
        EXPECT_EQ(note.find("does not use"), std::string::npos) << name << " " << note;
      }
    }
    std::vector<std::string> notes;
    EXPECT_EQ(message_about(family, "unheard_of", notes), "") << name;
    EXPECT_EQ(notes.size(), 1U) << name;
  }
}

TEST(FolderConfigs, NoteParametersThatRopeScalingHides) {
  json config = families().at(2).at("config");
  config["rope_parameters"] = {{"rope_type", "default"}, {"rope_theta", 7.0}};
  const Folder folder;
  EXPECT_EQ(folder.read(config).section.at("rope_theta"), 7.0);
  config["rope_scaling"] = {{"rope_type", "linear"}, {"factor", 2.0}};
  const Folder::Read found = folder.read(config);
  EXPECT_EQ(found.section.at("rope_theta"), 500.0);
  EXPECT_EQ(found.section.at("rope_scaling").at("factor"), 2.0);
  ASSERT_EQ(found.notes.size(), 1U);
  EXPECT_NE(found.notes[0].find("LlamaForCausalLM takes rope_scaling, which is given too"),
            std::string::npos)
      << found.notes[0];
}

/// config.json of a small model of the family, with changes.
json config_of(const std::string& family, const json& keys) {
  for (const json& line : families()) {
    if (line.at("family") == family) return changed(line.at("config"), keys);
  }
  throw std::invalid_argument(family);
}

TEST(FolderConfigs, TakeTheWindowOf0ThatTransformersWritesForNone) {
  const Folder folder;
  const json off = {{"use_sliding_window", false}, {"sliding_window", 0}};
  EXPECT_EQ(folder.read(config_of("qwen2_moe", off)).message, "");
  EXPECT_NE(folder.read(config_of("qwen2_moe", {{"sliding_window", 0}}))
                .message.find("must be a number of tokens, got 0"),
            std::string::npos);
}

TEST(MadeConfigs, MeanTheSameWhereTheClassReadsOtherKeys) {
  const json factors = {1, 2, 3, 4};
  const json longrope = {
      {"rope_type", "longrope"}, {"short_factor", factors}, {"long_factor", factors}};
  const json dynamic = {{"rope_type", "dynamic"}, {"factor", 2.0}};
  for (const json& from :
       {config_of("mistral", {{"sliding_window", nullptr}}),  // the class's default is 4096
        config_of("phi3", {{"rope_scaling", longrope}}),
        config_of("llama", {{"rope_scaling", dynamic}}), config_of("gpt_neox", json::object()),
        config_of("gpt_oss", {{"rope_scaling", {{"rope_type", "default"}}}}),
        config_of("smollm3", json::object())}) {
    const Folder folder;
    const Config c = folder.parse(from);
    const std::string made = make_checkpoint_config(c).pretty();
    Config again = folder.parse(json::parse(made));
    again.notes = c.notes;
    EXPECT_EQ(print(again), print(c)) << made;
  }
}

TEST(MadeConfigs, AgreeWithASectionThatHasAllInRopeScaling) {
  const json parameters = {
      {"partial_rotary_factor", 0.5}, {"rope_theta", 20000.0}, {"rope_type", "default"}};
  const Folder folder;
  Config c = folder.parse(config_of(
      "gpt_neox", {{"-rotary_pct", 0}, {"-rotary_emb_base", 0}, {"rope_parameters", parameters}}));
  c.model.details["partial_rotary_factor"] = 0.25;  // as earlier versions read such a file
  c.model.details["rope_scaling"] =
      text::Json::object({{"rope_type", "default"}, {"partial_rotary_factor", 0.5}});
  compare_with_checkpoint(folder.file(), c);
  c.model.details["rope_scaling"] = {};
  EXPECT_THROW(compare_with_checkpoint(folder.file(), c), Error);
}

}  // namespace
}  // namespace ballast::config::folder_configs_test
