#include <cmath>
#include <filesystem>
#include <map>
#include <random>
#include <string>
#include <utility>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "ballast/config/config.h"
#include "ballast/config/hugging_face_config.h"
#include "ballast/core/error.h"
#include "ballast/model/family.h"

#include "tests/support/damaged.h"
#include "tests/support/damaged_json.h"
#include "tests/support/fuzz_inputs.h"
#include "tests/support/layer_specs.h"
#include "tests/support/temp_dir.h"

namespace ballast::config::model_path_test {
namespace {

using nlohmann::json;

json llama() {
  return json::parse(R"({
      "architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
      "bos_token_id": 1, "eos_token_id": [2, 3], "head_dim": 16, "hidden_act": "silu",
      "hidden_size": 48, "initializer_range": 0.02, "intermediate_size": 136,
      "max_position_embeddings": 4096, "mlp_bias": false, "model_type": "llama",
      "num_attention_heads": 6, "num_hidden_layers": 3, "num_key_value_heads": 2,
      "pretraining_tp": 1, "quantization_config": null, "rms_norm_eps": 1e-06,
      "rope_scaling": null, "rope_theta": 500000.0, "tie_word_embeddings": true,
      "torch_dtype": "bfloat16", "transformers_version": "4.50.0", "use_cache": true,
      "vocab_size": 300
  })");
}

json gpt2() {
  return json::parse(R"({
      "model_type": "gpt2", "vocab_size": 300, "n_embd": 64, "n_layer": 2, "n_head": 4,
      "n_inner": null, "n_positions": 96, "layer_norm_epsilon": 1e-5, "attn_pdrop": 0.1,
      "resid_pdrop": 0.0, "n_ctx": 1024, "task_specific_params": {"a": 1},
      "activation_function": "gelu_new"
  })");
}

/// A folder with `config` as its config.json, and configs that name it.
struct Folder {
  explicit Folder(const json& config) { dir.write("m/config.json", config.dump()); }
  [[nodiscard]] Config parse(const json& model, std::vector<std::string> overrides = {}) const {
    const json text = {{"model", model},
                       {"data", {{"text", "t"}, {"sequence_length", 32}}},
                       {"optimizer", {{"type", "SGD"}}},
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
  EXPECT_EQ(c.model.max_sequence, 32U);  // length of the data's sequences, since positions are
                                         // rotary
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

TEST(ModelPath, LeavesTilesToTheConfig) {
  const Folder folder(llama());
  const auto tiles = [&](const json& model) {
    const Config c = folder.parse(model);
    return std::pair(c.model.vocabulary_tiles, c.model.layer_tiles);
  };
  EXPECT_EQ(tiles({{"path", "m"}}), std::pair(1UL, 1UL));
  EXPECT_EQ(tiles({{"path", "m"}, {"vocabulary_tiles", 2}}), std::pair(2UL, 1UL));
  EXPECT_EQ(tiles({{"path", "m"}, {"layer_tiles", 3}}), std::pair(1UL, 3UL));
  EXPECT_EQ(tiles({{"path", "m"}, {"vocabulary_tiles", "auto"}, {"layer_tiles", 4}}),
            std::pair(1UL, 4UL));
  EXPECT_EQ(folder.error({{"path", "m"}, {"layer_tiles", 99}}).find("model.layer_tiles: "), 8U);
}

TEST(ModelPath, ReadsBothFormsOfRopeTheta) {
  json v5 = llama();
  v5.erase("rope_theta");
  v5["rope_parameters"] = {{"rope_theta", 7000.0}, {"rope_type", "default"}};
  EXPECT_EQ(Folder(v5).parse().model.number("rope_theta"), 7000.0);
  v5["rope_theta"] = 8000;  // transformers uses the other one
  EXPECT_EQ(Folder(v5).parse().model.number("rope_theta"), 7000.0);
  v5["rope_parameters"]["factor"] = 8;
  EXPECT_NE(Folder(v5).error().find("model.rope_scaling (from "), std::string::npos);
  v5["rope_parameters"] = {{"rope_theta", "7000"}, {"rope_type", "default"}};
  EXPECT_NE(Folder(v5).error().find("model.rope_theta (from "), std::string::npos);
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
                      {{"type", "longrope"}, {"short_factor", factors}, {"long_factor", factors}}},
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
                               {"use_sliding_window", true},
                               {"sliding_window", 16},
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

/// config.json of the hub, written by transformers 4.
json gemma3() {
  return json::parse(R"({
      "architectures": ["Gemma3ForCausalLM"], "attention_bias": false,
      "attn_logit_softcapping": null, "cache_implementation": "hybrid",
      "final_logit_softcapping": null, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
      "hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 32768,
      "model_type": "gemma3_text", "num_attention_heads": 4, "num_hidden_layers": 4,
      "num_key_value_heads": 1, "query_pre_attn_scalar": 168, "rms_norm_eps": 1e-06,
      "rope_local_base_freq": 20000, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
      "rope_theta": 2000000, "sliding_window": 512, "sliding_window_pattern": 3, "vocab_size": 300
  })");
}

json gpt_neox() {
  return json::parse(R"({
      "architectures": ["GPTNeoXForCausalLM"], "attention_probs_dropout_prob": 0,
      "hidden_act": "gelu", "hidden_dropout_prob": 0, "hidden_size": 64, "intermediate_size": 96,
      "layer_norm_eps": 1e-05, "max_position_embeddings": 2048, "model_type": "gpt_neox",
      "num_attention_heads": 4, "num_hidden_layers": 2, "rotary_emb_base": 20000,
      "rotary_pct": 0.5, "tie_word_embeddings": false, "use_parallel_residual": true,
      "vocab_size": 300
  })");
}

/// The error with changed keys.
std::string error_with(json config, const json& changes) {
  config.update(changes);
  return Folder(config).error();
}

TEST(ModelPath, ReadsGemma3) {
  const Config c = Folder(gemma3()).parse();
  EXPECT_EQ(c.model.family, "gemma3");
  EXPECT_TRUE(c.model.tie_embeddings);
  EXPECT_EQ(c.model.number("rope_local_base_freq"), 20000.0);
  EXPECT_EQ(c.model.number("query_pre_attn_scalar"), 168.0);
  EXPECT_NEAR(test::attention_of(c.model, 0).scale, 1.0 / std::sqrt(168.0), 1e-12);
  for (const std::uint64_t layer : {0U, 1U, 2U, 3U}) {
    EXPECT_EQ(test::attention_of(c.model, layer).window, layer == 2 ? 0U : 512U) << layer;
  }
  // This config as transformers 5 writes it.
  json v5 = gemma3();
  for (const char* key : {"rope_theta", "rope_local_base_freq", "rope_scaling"}) v5.erase(key);
  v5["_sliding_window_pattern"] = 2;  // written, but not read
  v5["use_bidirectional_attention"] = false;
  v5["rope_parameters"] = {
      {"full_attention", {{"rope_type", "linear"}, {"factor", 8.0}, {"rope_theta", 2000000.0}}},
      {"sliding_attention", {{"rope_type", "default"}, {"rope_theta", 20000.0}}}};
  const Config same = Folder(v5).parse();
  for (const auto& [key, value] : c.model.details) {
    EXPECT_EQ(json::parse(same.model.detail(key).compact()), json::parse(value.compact())) << key;
  }
  v5["rope_parameters"]["sliding_attention"]["factor"] = 2.0;
  EXPECT_NE(Folder(v5).error().find("rope_parameters.sliding_attention.factor is 2.0, but Ballast"),
            std::string::npos);
  v5["layer_types"] = json::array(
      {"full_attention", "sliding_attention", "sliding_attention", "sliding_attention"});
  v5["rope_parameters"]["sliding_attention"].erase("factor");
  EXPECT_EQ(test::attention_of(Folder(v5).parse().model, 0).window, 0U);
}

json section_of(const Config& config) {
  json section = json::parse(print(config)).at("model");
  section.erase("weights");
  return section;
}

/// The model section read from the config.json that Ballast writes for `config`.
json written_and_read(const Config& config) {
  return section_of(Folder(json::parse(make_checkpoint_config(config).compact())).parse());
}

TEST(ModelPath, ReadsOlmo3) {
  json config = json::parse(R"({
      "attention_bias": false, "hidden_act": "silu", "hidden_size": 64, "intermediate_size": 96,
      "max_position_embeddings": 65536, "model_type": "olmo3", "num_attention_heads": 4,
      "num_hidden_layers": 5, "num_key_value_heads": 4, "rms_norm_eps": 1e-06,
      "rope_scaling": {"attention_factor": 1.2, "factor": 8.0,
                       "original_max_position_embeddings": 8192, "rope_type": "yarn"},
      "rope_theta": 600000, "sliding_window": 4096, "tie_word_embeddings": false, "vocab_size": 300
  })");
  const Config c = Folder(config).parse();
  EXPECT_EQ(c.model.number("rope_theta"), 600000.0);
  EXPECT_EQ(c.model.number("rope_local_base_freq"), 500000.0);  // not rope_theta
  for (const std::uint64_t layer : {0U, 1U, 2U, 3U, 4U}) {
    const std::uint64_t window = layer == 3 ? 0U : 4096U;
    EXPECT_EQ(test::attention_of(c.model, layer).window, window) << layer;
  }
  EXPECT_EQ(written_and_read(c), section_of(c));

  config["rope_parameters"]["sliding_attention"] = {{"rope_type", "default"},
                                                    {"rope_theta", 700.0}};
  config["rope_local_base_freq"] = 9.0;  // not a key of this class
  const Config other = Folder(config).parse();
  EXPECT_EQ(other.model.number("rope_local_base_freq"), 700.0);
  EXPECT_EQ(written_and_read(other), section_of(other));
}

TEST(ModelPath, ReadsMinistral3) {
  json config = json::parse(R"({
      "head_dim": 16, "hidden_act": "silu", "hidden_size": 64, "intermediate_size": 96,
      "max_position_embeddings": 262144, "model_type": "ministral3", "num_attention_heads": 4,
      "num_hidden_layers": 2, "num_key_value_heads": 2, "rms_norm_eps": 1e-05,
      "rope_parameters": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0,
                          "llama_4_scaling_beta": 0.1, "max_position_embeddings": 262144,
                          "mscale": 1.0, "mscale_all_dim": 1.0,
                          "original_max_position_embeddings": 16384, "rope_theta": 1000000.0,
                          "rope_type": "yarn", "type": "yarn"},
      "sliding_window": null, "tie_word_embeddings": true, "vocab_size": 300
  })");
  const Config c = Folder(config).parse();
  EXPECT_EQ(c.model.detail("rope_scaling").find("llama_4_scaling_beta")->number(), 0.1);
  EXPECT_EQ(written_and_read(c), section_of(c));
  config["rope_parameters"]["llama_4_scaling_beta"] = -1.0;
  EXPECT_NE(Folder(config).error().find("'llama_4_scaling_beta' must be a number of at least 0"),
            std::string::npos);
  EXPECT_NE(error_with(llama(), {{"rope_parameters", config["rope_parameters"]}})
                .find("unknown key 'llama_4_scaling_beta'"),
            std::string::npos);
}

TEST(ModelPath, RefusesOtherGemmas) {
  const auto refused = [](const json& changes, const std::string& part) {
    const std::string message = error_with(gemma3(), changes);
    EXPECT_NE(message.find(part), std::string::npos) << message;
  };
  refused({{"attn_logit_softcapping", 50.0}},
          "attn_logit_softcapping is 50.0, but Ballast supports only null");
  refused({{"final_logit_softcapping", 30.0}}, "final_logit_softcapping is 30.0");
  refused({{"use_bidirectional_attention", true}}, "use_bidirectional_attention is true");
  refused({{"hidden_activation", "gelu"}}, "hidden_activation is \"gelu\"");
  refused({{"sliding_window_pattern", 0}}, "model.sliding_window_pattern (from ");
  refused({{"query_pre_attn_scalar", 0}}, "model.query_pre_attn_scalar (from ");
  refused({{"rope_local_base_freq", 0}}, "model.rope_local_base_freq (from ");
  refused({{"model_type", "gemma3"}},
          "model_type is \"gemma3\", but Ballast supports only gpt2");  // no text_config
  refused({{"model_type", "gemma"}}, "model_type is \"gemma\", but Ballast supports only gpt2");
}

TEST(ModelPath, ReadsGptNeox) {
  const Config c = Folder(gpt_neox()).parse();
  EXPECT_EQ(c.model.family, "gpt_neox");
  EXPECT_FALSE(c.model.tie_embeddings);
  EXPECT_EQ(c.model.number("rope_theta"), 20000.0);
  EXPECT_EQ(c.model.number("partial_rotary_factor"), 0.5);
  json v5 = gpt_neox();
  v5.erase("rotary_pct");
  v5.erase("rotary_emb_base");
  v5["rope_parameters"] = {
      {"partial_rotary_factor", 0.3}, {"rope_theta", 20000.0}, {"rope_type", "default"}};
  EXPECT_EQ(Folder(v5).error(), "");
  v5["rope_parameters"]["partial_rotary_factor"] = 0.2;  // 3 values
  EXPECT_NE(Folder(v5).error().find("0.2 of head_dim 16 is 3 values"), std::string::npos);
  EXPECT_NE(error_with(gpt_neox(), {{"hidden_act", "relu"}}).find("model.hidden_act (from "),
            std::string::npos);
  EXPECT_NE(error_with(gpt_neox(), {{"hidden_act", "relu"}})
                .find("'relu' is not supported; gpt_neox supports gelu, gelu_new"),
            std::string::npos);
  EXPECT_EQ(error_with(gpt_neox(), {{"hidden_act", "gelu_fast"}, {"use_parallel_residual", false}}),
            "");
  EXPECT_NE(error_with(gpt_neox(), {{"rope_theta", 1}}).find("rope_theta is 1, but "),
            std::string::npos);
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
  refused(llama(), "decoder", 1, "decoder is 1, but Ballast does not know");
  refused(llama(), "quantization_config", {{"bits", 4}},
          "quantization_config.quant_method is null, but Ballast supports only mxfp4");
  refused(llama(), "quantization_config", {{"bits", 4}, {"quant_method", "gptq"}},
          "quantization_config.quant_method is \"gptq\", but");
  refused(
      llama(), "quantization_config",
      {{"quant_method", "bitsandbytes"}, {"load_in_4bit", true}, {"bnb_4bit_quant_type", "fp4"}},
      "quantization_config.bnb_4bit_quant_type is \"fp4\", but Ballast supports only nf4");
  refused(llama(), "is_encoder_decoder", true, "is_encoder_decoder is true, but Ballast supports");
  refused(llama(), "rms_norm_eps", nullptr, "rms_norm_eps is null, but transformers' LlamaForC");
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
  EXPECT_NE(folder.error({{"path", "none"}}).find("model.path: there is no folder "),
            std::string::npos);
  EXPECT_EQ(folder.error({{"path", 5}}), "c.json: model.path: expected a string, got 5");
  folder.dir.write("m/config.json", "{");
  EXPECT_NE(folder.error().find("m/config.json:1:2: not valid JSON"), std::string::npos);
  folder.dir.write("m/config.json", "[]");
  EXPECT_NE(folder.error().find("has no model_type"), std::string::npos);
}

TEST(ModelPath, WithADamagedConfigIsRefusedOrRead) {
  using test::damaged;
  using test::damaged_json;
  std::mt19937_64 random(11);
  const std::size_t inputs = test::fuzz_inputs(3000);
  std::size_t accepted = 0;
  for (const json& from : {llama(), gpt2(), gemma3(), gpt_neox()}) {
    const Folder folder(from);
    const std::string whole = from.dump();
    for (std::size_t i = 0; i < inputs; i += 4) {
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
  const std::map<std::string, std::string> classes = {{"llama", "LlamaForCausalLM"},
                                                      {"gpt2", "GPT2LMHeadModel"},
                                                      {"gemma3_text", "Gemma3ForCausalLM"},
                                                      {"gpt_neox", "GPTNeoXForCausalLM"}};
  for (const json& from : {llama(), gpt2(), gemma3(), gpt_neox()}) {
    const Folder folder(from);
    Config c = folder.parse();
    const std::string made = make_checkpoint_config(c).pretty();
    folder.dir.write("m/config.json", made);
    compare_with_checkpoint(folder.file(), c);
    Config again = folder.parse();
    again.notes = c.notes;
    EXPECT_EQ(print(again), print(c)) << made;
    const json found = json::parse(made);
    for (const char* key :
         {"vocab_size", "model_type", "tie_word_embeddings", "rope_theta", "n_positions",
          "activation_function", "hidden_act", "head_dim", "rotary_pct", "rotary_emb_base",
          "hidden_activation", "rope_local_base_freq", "query_pre_attn_scalar",
          "sliding_window_pattern", "use_parallel_residual"}) {
      if (!from.contains(key)) continue;
      EXPECT_EQ(found[key], from[key]) << key;
    }
    EXPECT_EQ(found["torch_dtype"], "bfloat16");
    if (found.contains("query_pre_attn_scalar")) {
      EXPECT_TRUE(found["query_pre_attn_scalar"].is_number_integer());
    }
    EXPECT_EQ(found["architectures"][0], classes.at(from["model_type"]));
  }
}

}  // namespace
}  // namespace ballast::config::model_path_test
