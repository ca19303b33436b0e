#include <filesystem>
#include <random>
#include <string>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "ballast/config/checkpoint_config.h"
#include "ballast/config/config.h"
#include "ballast/core/error.h"

#include "tests/support/damaged.h"
#include "tests/support/damaged_json.h"
#include "tests/support/fuzz_inputs.h"
#include "tests/support/temp_dir.h"

namespace ballast::config {
namespace {

using nlohmann::json;

json llama() {
  return {{"architectures", {"LlamaForCausalLM"}},
          {"attention_bias", false},
          {"attention_dropout", 0.0},
          {"bos_token_id", 1},
          {"eos_token_id", {2, 3}},
          {"head_dim", 16},
          {"hidden_act", "silu"},
          {"hidden_size", 48},
          {"initializer_range", 0.02},
          {"intermediate_size", 136},
          {"max_position_embeddings", 4096},
          {"mlp_bias", false},
          {"model_type", "llama"},
          {"num_attention_heads", 6},
          {"num_hidden_layers", 3},
          {"num_key_value_heads", 2},
          {"pretraining_tp", 1},
          {"quantization_config", nullptr},
          {"rms_norm_eps", 1e-06},
          {"rope_scaling", nullptr},
          {"rope_theta", 500000.0},
          {"tie_word_embeddings", true},
          {"torch_dtype", "bfloat16"},
          {"transformers_version", "4.50.0"},
          {"use_cache", true},
          {"vocab_size", 300}};
}

json gpt2() {
  return {{"model_type", "gpt2"},
          {"vocab_size", 300},
          {"n_embd", 64},
          {"n_layer", 2},
          {"n_head", 4},
          {"n_inner", nullptr},
          {"n_positions", 96},
          {"layer_norm_epsilon", 1e-5},
          {"attn_pdrop", 0.1},
          {"resid_pdrop", 0.0},
          {"n_ctx", 1024},
          {"task_specific_params", {{"a", 1}}},
          {"activation_function", "gelu_new"}};
}

/// A folder with `config` as its config.json, and configs that name it.
struct Folder {
  explicit Folder(const json& config) { dir.write("m/config.json", config.dump()); }
  [[nodiscard]] Config parse(const json& model, std::vector<std::string> overrides = {}) const {
    const json text = {{"model", model},
                       {"data", {{"text", "t"}, {"sequence_length", 32}}},
                       {"train_batch_size", 1}};
    return config::parse(text.dump(), dir.path(), "c.json", overrides);
  }
  [[nodiscard]] Config parse() const { return parse({{"path", "m"}}); }
  [[nodiscard]] std::string error(const json& model) const {
    try {
      static_cast<void>(parse(model));
    } catch (const Error& error) {
      EXPECT_EQ(error.category(), ErrorCategory::config);
      return error.what();
    }
    return "";
  }
  [[nodiscard]] std::string error() const { return error({{"path", "m"}}); }
  [[nodiscard]] std::string file() const { return (dir.path() / "m/config.json").string(); }
  test::TempDir dir;
};

TEST(ModelPath, GivesTheModelOfItsFolder) {
  const Folder folder(llama());
  const Config c = folder.parse();
  EXPECT_EQ(c.model.family, "llama");
  EXPECT_EQ(c.model.vocab_size, 300U);
  EXPECT_EQ(c.model.hidden_size, 48U);
  EXPECT_EQ(c.model.num_layers, 3U);
  EXPECT_EQ(c.model.num_heads, 6U);
  EXPECT_EQ(c.model.num_kv_heads, 2U);
  EXPECT_EQ(c.model.head_dim, 16U);
  EXPECT_EQ(c.model.intermediate_size, 136U);
  EXPECT_EQ(c.model.max_sequence, 32U);  // that of the data; positions are rotary
  EXPECT_EQ(c.model.norm_epsilon, 1e-6);
  EXPECT_EQ(c.model.number("rope_theta"), 500000.0);
  EXPECT_TRUE(c.model.tie_embeddings);
  EXPECT_EQ(c.initial_weights, folder.dir.path() / "m");
  EXPECT_TRUE(c.notes.empty());

  const Config g = Folder(gpt2()).parse();
  EXPECT_EQ(g.model.family, "gpt2");
  EXPECT_EQ(g.model.intermediate_size, 256U);
  EXPECT_EQ(g.model.max_sequence, 96U);
  EXPECT_TRUE(g.model.tie_embeddings);
  ASSERT_EQ(g.notes.size(), 1U);
  EXPECT_NE(g.notes[0].find("attn_pdrop is 0.1"), std::string::npos) << g.notes[0];
}

TEST(ModelPath, IsFrozenAsKeysAndWeights) {
  const Folder folder(llama());
  const std::string printed = print(folder.parse());
  EXPECT_EQ(json::parse(printed)["model"]["weights"], (folder.dir.path() / "m").string());
  EXPECT_EQ(json::parse(printed)["model"].count("path"), 0U);
  EXPECT_EQ(print(parse(printed, "/", "again", {})), printed);
  EXPECT_EQ(print(folder.parse({{"path", folder.dir.path() / "m"}})), printed);
  EXPECT_EQ(print(folder.parse({{"path", nullptr}, {"hidden_size", nullptr}}, {"model.path=m"})),
            printed);
}

TEST(ModelPath, ReadsBothFormsOfRopeTheta) {
  json v5 = llama();
  v5.erase("rope_theta");
  v5["rope_parameters"] = {{"rope_theta", 7000.0}, {"rope_type", "default"}};
  EXPECT_EQ(Folder(v5).parse().model.number("rope_theta"), 7000.0);
  v5["rope_theta"] = 7000;
  EXPECT_EQ(Folder(v5).parse().model.number("rope_theta"), 7000.0);
  v5["rope_theta"] = 8000;
  EXPECT_NE(Folder(v5).error().find("rope_parameters.rope_theta is 7000.0, but another key says "
                                    "8000"),
            std::string::npos);
  v5["rope_theta"] = 7000;
  v5["rope_parameters"]["factor"] = 8;
  EXPECT_NE(Folder(v5).error().find("model.rope_scaling (from "), std::string::npos);
  v5["rope_theta"] = 7000;
  v5["rope_parameters"] = {{"rope_theta", "7000"}, {"rope_type", "default"}};
  EXPECT_NE(Folder(v5).error().find("rope_parameters.rope_theta is \"7000\""), std::string::npos);
}

TEST(ModelPath, ReadsAllFormsOfRopeScaling) {
  const auto scaling = [](const json& changes) {
    json config = llama();
    config.update(changes);
    return Folder(config).parse().model.detail("rope_scaling").compact();
  };
  EXPECT_EQ(scaling(json::object()), "null");
  EXPECT_EQ(scaling({{"rope_scaling", {{"type", "linear"}, {"factor", 2}}}}),
            R"({"rope_type":"linear","factor":2})");
  EXPECT_EQ(scaling({{"rope_parameters",
                      {{"rope_theta", 500000.0}, {"rope_type", "linear"}, {"factor", 2}}}}),
            R"({"rope_type":"linear","factor":2})");
  EXPECT_EQ(scaling({{"rope_scaling", {{"rope_type", "dynamic"}, {"factor", 2}}}}),
            R"({"rope_type":"dynamic","factor":2,"original_max_position_embeddings":4096})");
  const json factors = {1, 1, 1, 1, 1, 1, 1, 1};
  EXPECT_EQ(scaling({{"rope_scaling",
                      {{"type", "su"}, {"short_factor", factors}, {"long_factor", factors}}},
                     {"original_max_position_embeddings", 1024}}),
            R"({"rope_type":"longrope","long_factor":[1,1,1,1,1,1,1,1],)"
            R"("short_factor":[1,1,1,1,1,1,1,1],"original_max_position_embeddings":1024,)"
            R"("factor":4.0})");
}

TEST(ModelPath, ReadsTheOtherFamilies) {
  const auto parsed = [](const std::string& type, const json& changes) {
    json config = llama();
    config["model_type"] = type;
    for (const char* key : {"attention_bias", "mlp_bias", "pretraining_tp"}) config.erase(key);
    config.update(changes);
    const Config c = Folder(config).parse();
    const std::string made = make_checkpoint_config(c).pretty();
    const Folder again(json::parse(made));
    compare_with_checkpoint(again.file(), c);
    return c;
  };
  EXPECT_TRUE(parsed("mistral", {{"sliding_window", 4096}}).notes.empty());
  EXPECT_TRUE(
      parsed("qwen2",
             {{"use_sliding_window", false}, {"sliding_window", 4}, {"max_window_layers", 21}})
          .notes.empty());
  const auto types = [](const json& list) {
    json config = llama();
    config["model_type"] = "qwen2";
    for (const char* key : {"attention_bias", "mlp_bias"}) config.erase(key);
    config["layer_types"] = list;
    return Folder(config).error();
  };
  EXPECT_NE(types(json::array({"full_attention"})).find("must be a list of num_layers (3) words"),
            std::string::npos);
  EXPECT_NE(types({"full_attention", "linear_attention", "full_attention"}).find("layer_types"),
            std::string::npos);
  EXPECT_EQ(parsed("qwen3", {{"attention_bias", true}}).model.family, "qwen3");
  EXPECT_EQ(parsed("smollm3", {{"no_rope_layers", {1, 0, 1}},
                               {"no_rope_layer_interval", 2},
                               {"layer_types", json::array({"full_attention", "sliding_attention",
                                                            "full_attention"})}})
                .model.detail("no_rope_layers")
                .compact(),
            "[1,0,1]");
  EXPECT_EQ(parsed("phi3", {{"partial_rotary_factor", 0.5}}).model.number("partial_rotary_factor"),
            0.5);
  EXPECT_EQ(parsed("olmo2", json::object()).model.family, "olmo2");
  const auto window = [](int tokens) {
    json config = llama();
    config["model_type"] = "mistral";
    for (const char* key : {"attention_bias", "mlp_bias"}) config.erase(key);
    config["sliding_window"] = tokens;
    return Folder(config).error();
  };
  EXPECT_EQ(window(32), "");
  EXPECT_NE(window(0).find("must be a number of tokens, got 0"), std::string::npos);
}

TEST(ModelPath, ExcludesTheOtherKeysOfTheModel) {
  const Folder folder(llama());
  const std::string place = (folder.dir.path() / "m").string();
  for (const std::string key : {"family", "hidden_size", "weights", "init_stddev", "hiden_size"}) {
    EXPECT_EQ(folder.error({{"path", "m"}, {key, 1}}),
              "c.json: model." + key + ": model.path (" + place +
                  ") is given too and sets the whole model; remove one");
  }
}

TEST(ModelPath, NamesTheFileAndTheKeyThatIsRefused) {
  const auto refused = [](const json& base, const std::string& key, const json& value,
                          const std::string& reason) {
    json changed = base;
    changed[key] = value;
    const Folder folder(changed);
    const std::string message = folder.error();
    EXPECT_EQ(message.find("c.json: model.path: " + folder.file() + ": " + reason), 0U)
        << message << "\nbut not: " << reason;
  };
  refused(llama(), "model_type", "bloom",
          "model_type is \"bloom\", but Ballast supports only gpt2, llama");
  refused(llama(), "model_type", nullptr, "has no model_type");
  refused(llama(), "sliding_window", 4096, "sliding_window is 4096, but Ballast does not know");
  refused(llama(), "quantization_config", {{"bits", 4}},
          "quantization_config is {\"bits\":4}, but");
  refused(llama(), "auto_map", {{"AutoModel", "x"}}, "auto_map is ");
  refused(llama(), "is_encoder_decoder", true, "is_encoder_decoder is true, but Ballast supports");
  refused(llama(), "rms_norm_eps", nullptr, "has no rms_norm_eps; add it");
  refused(llama(), "hidden_size", nullptr, "has no hidden_size; add it");
  refused(gpt2(), "n_embd", nullptr, "has no n_embd; add it");
  refused(gpt2(), "scale_attn_weights", false, "scale_attn_weights is false, but Ballast supports");
}

TEST(ModelPath, NamesTheFileOfAValueThatBreaksARule) {
  json changed = llama();
  changed["hidden_size"] = "48";
  const Folder folder(changed);
  EXPECT_EQ(folder.error(), "c.json: model.hidden_size (from " + folder.file() +
                                "): expected a whole number, got the string \"48\"");
  changed["hidden_size"] = 48;
  changed["num_key_value_heads"] = 4;
  EXPECT_NE(Folder(changed).error().find("c.json: model.num_kv_heads (from "), std::string::npos);
}

TEST(ModelPath, NeedsAFolderWithAConfig) {
  const Folder folder(llama());
  EXPECT_NE(folder.error({{"path", "none"}}).find("none/config.json: cannot open the model"),
            std::string::npos);
  EXPECT_EQ(folder.error({{"path", 5}}), "c.json: model.path: expected a string, got 5");
  folder.dir.write("m/config.json", "{");
  EXPECT_NE(folder.error().find("m/config.json:1:2: not valid JSON"), std::string::npos);
  folder.dir.write("m/config.json", "[]");
  EXPECT_NE(folder.error().find("has no model_type"), std::string::npos);
}

TEST(ModelPath, WithADamagedConfigIsRefusedOrRead) {
  using ballast::test::damaged;
  using ballast::test::damaged_json;
  std::mt19937_64 random(11);
  const std::size_t inputs = ballast::test::fuzz_inputs(3000);
  std::size_t accepted = 0;
  for (const json& from : {llama(), gpt2()}) {
    const Folder folder(from);
    const std::string whole = from.dump();
    for (std::size_t i = 0; i < inputs; i += 2) {
      std::filesystem::remove(folder.file());  // truncating a file may wait for the disk
      const std::string text =
          random() % 2 == 0 ? damaged(whole, random) : damaged_json(whole, random);
      folder.dir.write("m/config.json", text);
      const std::string message = folder.error();
      accepted += message.empty() ? 1 : 0;
      EXPECT_EQ(message.find_first_of("\n\r\x1b"), std::string::npos) << message;
      EXPECT_TRUE(message.empty() || message.starts_with("c.json: model.")) << message;
      if (HasFailure()) FAIL() << text.substr(0, 1000);
    }
  }
  EXPECT_LT(accepted, inputs / 2);
  EXPECT_GT(accepted, inputs / 60);  // other sizes, or other values of keys without effect
}

TEST(CheckpointConfig, DescribesTheModelAsReadBack) {
  for (const json& from : {llama(), gpt2()}) {
    const Folder folder(from);
    Config c = folder.parse();
    const std::string made = make_checkpoint_config(c).pretty();
    folder.dir.write("m/config.json", made);
    compare_with_checkpoint(folder.file(), c);
    Config again = folder.parse();
    again.notes = c.notes;
    EXPECT_EQ(print(again), print(c)) << made;
    const json found = json::parse(made);
    for (const char* key : {"vocab_size", "model_type", "tie_word_embeddings", "rope_theta",
                            "n_positions", "activation_function", "hidden_act", "head_dim"}) {
      if (!from.contains(key)) continue;
      EXPECT_EQ(found[key], from[key]) << key;
    }
    EXPECT_EQ(found["torch_dtype"], "bfloat16");
    EXPECT_EQ(found["architectures"][0],
              from["model_type"] == "gpt2" ? "GPT2LMHeadModel" : "LlamaForCausalLM");
  }
}

}  // namespace
}  // namespace ballast::config
