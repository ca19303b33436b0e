#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "ballast/config/config.h"
#include "ballast/config/hugging_face_config.h"
#include "ballast/config/stored_model.h"
#include "ballast/core/error.h"
#include "ballast/model/family.h"

#include "tests/support/expect_error.h"
#include "tests/support/layer_specs.h"
#include "tests/support/temp_dir.h"

namespace ballast::config::text_part_test {
namespace {

using nlohmann::json;

/// The text model of a released folder of Gemma 3, which relies on defaults of its class.
json gemma3() {
  return json::parse(R"({
      "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999,
      "eos_token_id": [1, 106], "image_token_index": 262144, "mm_tokens_per_image": 256,
      "model_type": "gemma3", "torch_dtype": "bfloat16",
      "text_config": {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
                      "num_hidden_layers": 34, "sliding_window": 1024,
                      "rope_scaling": {"factor": 8.0, "rope_type": "linear"}},
      "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"}
  })");
}

json mistral3() {
  return json::parse(R"({
      "model_type": "mistral3", "image_token_index": 10, "spatial_merge_size": 2,
      "text_config": {"head_dim": 16, "hidden_act": "silu", "hidden_size": 64,
                      "intermediate_size": 96, "max_position_embeddings": 128,
                      "model_type": "mistral", "num_attention_heads": 4, "num_hidden_layers": 2,
                      "num_key_value_heads": 2, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0,
                      "sliding_window": null, "vocab_size": 300},
      "tie_word_embeddings": false, "vision_config": {"model_type": "pixtral"}
  })");
}

/// A folder of Qwen2.5-VL with the text model's keys outside text_config.
json flat_qwen() {
  return json::parse(R"({
      "model_type": "qwen2_5_vl", "vision_start_token_id": 151652, "image_token_id": 151655,
      "hidden_act": "silu", "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
      "num_hidden_layers": 2, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
      "rope_theta": 1000000.0, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
      "sliding_window": 32768, "use_sliding_window": false, "max_window_layers": 70,
      "tie_word_embeddings": true, "vocab_size": 300, "vision_config": {"hidden_size": 1280}
  })");
}

struct Folder {
  explicit Folder(const json& config) { dir.write("m/config.json", config.dump()); }
  [[nodiscard]] Config parse() const {
    const json text = {{"model", {{"path", "m"}}},
                       {"data", {{"text", "t"}, {"sequence_length", 32}}},
                       {"optimizer", {{"type", "SGD"}}},
                       {"train_batch_size", 1}};
    return config::parse(text.dump(), dir.path(), "c.json", {});
  }
  /// The effective model section.
  [[nodiscard]] json model() const {
    json model = json::parse(print(parse()))["model"];
    model.erase("weights");
    return model;
  }
  /// Expects an error with these parts.
  void expect_refused(std::initializer_list<std::string_view> parts) const {
    test::expect_error(ErrorCategory::config, parts, [&] { static_cast<void>(parse()); });
  }
  test::TempDir dir;
};

TEST(TextPart, IsReadWithTheDefaultsOfItsClass) {
  const Config c = Folder(gemma3()).parse();
  EXPECT_EQ(c.model.family, "gemma3");
  EXPECT_EQ(c.model.hidden_size, 2560U);
  EXPECT_EQ(c.model.vocab_size, 262208U);
  EXPECT_EQ(c.model.num_heads, 8U);
  EXPECT_EQ(c.model.num_kv_heads, 4U);
  EXPECT_TRUE(c.model.tie_embeddings);
  EXPECT_TRUE(c.notes.empty());
  const Config mistral = Folder(mistral3()).parse();
  EXPECT_EQ(mistral.model.family, "mistral");
  EXPECT_EQ(mistral.model.num_kv_heads, 2U);
  EXPECT_FALSE(mistral.model.tie_embeddings);
}

/// The text model of a folder of Gemma 4 in the form of the hub.
json gemma4() {
  return json::parse(R"({
      "architectures": ["Gemma4ForConditionalGeneration"], "audio_config": null,
      "model_type": "gemma4", "tie_word_embeddings": true, "vision_config": {"depth": 1},
      "text_config": {
          "attention_k_eq_v": true, "enable_moe_block": false, "final_logit_softcapping": 30.0,
          "global_head_dim": 32, "head_dim": 16, "hidden_activation": "gelu_pytorch_tanh",
          "hidden_size": 64, "hidden_size_per_layer_input": 0, "intermediate_size": 96,
          "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
          "model_type": "gemma4_text", "moe_intermediate_size": null, "num_attention_heads": 8,
          "num_experts": null, "num_global_key_value_heads": 2, "num_hidden_layers": 3,
          "num_key_value_heads": 4, "num_kv_shared_layers": 0, "sliding_window": 12,
          "rope_parameters": {
              "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0,
                                 "rope_type": "proportional"},
              "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"}},
          "use_bidirectional_attention": "vision", "vocab_size": 300,
          "vocab_size_per_layer_input": 300}
  })");
}

TEST(TextPart, OfGemma4HasHeadsByTypeOfLayer) {
  const Config c = Folder(gemma4()).parse();
  const model::Family& family = model::family("gemma4");
  EXPECT_EQ(test::attention_of(c.model, 0).heads, (model::HeadExtents{8, 4, 16}));
  EXPECT_EQ(test::attention_of(c.model, 1).heads, (model::HeadExtents{8, 2, 32}));
  // transformers makes the last layer a full one.
  EXPECT_EQ(test::attention_of(c.model, 2).heads, (model::HeadExtents{8, 2, 32}));
  EXPECT_EQ(test::attention_of(c.model, 0).window, 12U);
  EXPECT_EQ(test::attention_of(c.model, 2).window, 0U);
  EXPECT_NE(test::block_of(c.model, 0).find("self_attn.v_proj.weight"), nullptr);
  EXPECT_EQ(test::block_of(c.model, 1).find("self_attn.v_proj.weight"), nullptr);
  EXPECT_EQ(family.outer(c.model).logit_cap, 30.0);
  // The form of transformers 5.24, which has no keys for all layers without a window.
  json saved = gemma4();
  json& text = saved["text_config"];
  text.erase("global_head_dim");
  text.erase("num_global_key_value_heads");
  const json own = {{"head_dim", 32}, {"num_key_value_heads", 2}};
  text["per_layer_config"] = {{"1", own}, {"2", own}};
  EXPECT_EQ(Folder(saved).model(), Folder(gemma4()).model());
  // Numbers of equal length, as for models of ten layers and more.
  text["per_layer_config"] = {{"01", own}, {"02", own}};
  EXPECT_EQ(Folder(saved).model(), Folder(gemma4()).model());
  text["per_layer_config"] = {{"1", own}, {"002", own}};
  EXPECT_EQ(Folder(saved).model(), Folder(gemma4()).model());
  text["per_layer_config"] = {{"1", own}, {"2", own}};
  text["per_layer_config"]["2"]["head_dim"] = 48;
  Folder(saved).expect_refused({"per_layer_config is ", "unlike layer 1"});
  text["per_layer_config"] = {{"0", own}, {"1", own}, {"2", own}};
  Folder(saved).expect_refused({"per_layer_config is ", "unlike layer 0"});
  saved["model_type"] = "gemma4_unified";
  text["model_type"] = "gemma4_unified_text";
  text["per_layer_config"] = {{"1", own}, {"2", own}};
  text.erase("hidden_size_per_layer_input");
  EXPECT_EQ(Folder(saved).parse().model.family, "gemma4");
}

TEST(TextPart, OfGemma4HasLayersThatShareKeysAndHaveInputs) {
  json small = gemma4();
  json& text = small["text_config"];
  text["num_kv_shared_layers"] = 1;
  text["use_double_wide_mlp"] = true;
  text["hidden_size_per_layer_input"] = 16;
  const Config c = Folder(small).parse();
  const model::Family& family = model::family("gemma4");
  EXPECT_EQ(model::keys_of(model::layers_of(c.model), 1), 1U);
  EXPECT_EQ(model::keys_of(model::layers_of(c.model), 2),
            1U);  // transformers makes the last layer a full one
  EXPECT_EQ(model::last_reader_of_keys(model::layers_of(c.model), 1), 2U);
  EXPECT_EQ(model::last_reader_of_keys(model::layers_of(c.model), 0), 0U);
  // The last earlier layer of a type counts.
  text["num_hidden_layers"] = 5;
  text["layer_types"] = {"full_attention", "sliding_attention", "sliding_attention",
                         "sliding_attention", "full_attention"};
  text["num_kv_shared_layers"] = 2;
  const model::ModelConfig deep = Folder(small).parse().model;
  EXPECT_EQ(model::keys_of(model::layers_of(deep), 3), 2U);
  EXPECT_EQ(model::keys_of(model::layers_of(deep), 4), 0U);
  EXPECT_EQ(model::last_reader_of_keys(model::layers_of(deep), 1), 1U);
  const model::BlockSpec first = test::block_of(c.model, 0);
  const model::BlockSpec last = test::block_of(c.model, 2);
  EXPECT_EQ(last.find("self_attn.k_proj.weight"), nullptr);
  EXPECT_EQ(last.find("self_attn.k_norm.weight"), nullptr);
  EXPECT_EQ(last.tensor("mlp.up_proj.weight").shape, (std::vector<std::uint64_t>{192, 64}));
  EXPECT_EQ(first.tensor("mlp.up_proj.weight").shape, (std::vector<std::uint64_t>{96, 64}));
  EXPECT_EQ(first.tensor("model.per_layer_model_projection.weight").shape,
            (std::vector<std::uint64_t>{48, 64}));
  EXPECT_EQ(last.find("model.per_layer_model_projection.weight"), nullptr);
  const model::BlockSpec columns = model::blocks_of(family.layer(c.model, 2), c.model, 2).back();
  EXPECT_EQ(columns.content, model::BlockContent::layer_embedding);
  const model::TensorSpec& table = columns.tensor("model.embed_tokens_per_layer.weight");
  EXPECT_EQ(table.shape, (std::vector<std::uint64_t>{300, 16}));
  EXPECT_EQ(table.whole_shape(), (std::vector<std::uint64_t>{300, 48}));
  EXPECT_EQ(model::run_in_files(table, 17).first, 48U + 32 + 1);
}

TEST(TextPart, OfGemma4IsRefusedIfBallastLacksAPart) {
  const json experts = {{"enable_moe_block", true},
                        {"num_experts", 6},
                        {"top_k_experts", 2},
                        {"moe_intermediate_size", 24}};
  const auto refused = [&](const std::string& key, const json& value, const char* part) {
    json other = gemma4();
    other["text_config"].update(experts);
    other["text_config"][key] = value;
    Folder(other).expect_refused({key, part});
  };
  json complete = gemma4();
  complete["text_config"].update(experts);
  const Config c = Folder(complete).parse();
  const model::BlockSpec layer = test::block_of(c.model, 0);
  EXPECT_EQ(layer.tensor("experts.gate_up_proj").shape, (std::vector<std::uint64_t>{6, 48, 64}));
  refused("num_kv_shared_layers", 3, "must be a whole number below num_layers (3), got 3");
  refused("num_kv_shared_layers", 2, "none of the first 1 layers has the type of layer 1");
  refused("hidden_size_per_layer_input", 1.5, "must be a whole number of at most 65536, got 1.5");
  refused("num_experts", nullptr, "must be a number of at least 1");
  refused("top_k_experts", 7, "7 is above num_experts (6)");
  refused("global_head_dim", 31, "must be an even number of at most 65536, got 31");
  refused("num_global_key_value_heads", 3, "must divide num_heads (8), got 3");
  json other = gemma4();
  other["text_config"].erase("hidden_size_per_layer_input");
  EXPECT_EQ(Folder(other).parse().model.number("hidden_size_per_layer_input"), 256.0);
  other = gemma4();
  other["text_config"].update(
      {{"hidden_size_per_layer_input", 8}, {"vocab_size_per_layer_input", 0}});
  Folder(other).expect_refused({"vocab_size_per_layer_input", "must be a number of tokens, got 0"});
}

TEST(TextPart, MayBeOutsideTextConfig) {
  const Config c = Folder(flat_qwen()).parse();
  EXPECT_EQ(c.model.family, "qwen2");
  EXPECT_TRUE(c.model.tie_embeddings);
  EXPECT_EQ(c.model.number("rope_theta"), 1e6);
  EXPECT_EQ(c.model.norm_epsilon, 1e-6);
  json without = flat_qwen();
  for (const char* key : {"rms_norm_eps", "rope_theta", "num_key_value_heads"}) without.erase(key);
  without["num_attention_heads"] = 8;
  const Config standard = Folder(without).parse();
  EXPECT_EQ(standard.model.norm_epsilon, 1e-5);  // Qwen2's class has 1e-6
  EXPECT_EQ(standard.model.number("rope_theta"), 1e6);
  EXPECT_EQ(standard.model.num_kv_heads, 8U);
  // Transformers 5 writes it in this form.
  json nested = flat_qwen();
  json text = flat_qwen();
  for (const char* key : {"vision_config", "image_token_id", "vision_start_token_id",
                          "tie_word_embeddings", "rope_scaling", "rope_theta"}) {
    text.erase(key);
  }
  text["model_type"] = "qwen2_5_vl_text";
  text["rope_parameters"] = {
      {"rope_type", "default"}, {"rope_theta", 1e6}, {"mrope_section", {2, 3, 3}}};
  const json whole = {{"model_type", "qwen2_5_vl"},
                      {"text_config", text},
                      {"tie_word_embeddings", true},
                      {"vision_config", {{"depth", 1}}}};
  EXPECT_EQ(Folder(whole).model(), Folder(flat_qwen()).model());
}

TEST(TextPart, IsComparedWithTheModelSection) {
  const Folder folder(mistral3());
  Config c = folder.parse();
  compare_with_checkpoint(folder.dir.path() / "m/config.json", c);
  c.model.num_kv_heads = 4;
  test::expect_error(ErrorCategory::config,
                     {"config.json, text_config: num_key_value_heads is 2, but"},
                     [&] { compare_with_checkpoint(folder.dir.path() / "m/config.json", c); });
}

TEST(TextPart, IsRefusedInOneLineIfItIsNotKnown) {
  json other = mistral3();
  other["text_config"]["model_type"] = "falcon_h1";
  Folder(other).expect_refused(
      {"config.json, text_config: model_type is \"falcon_h1\", but Ballast supports only"});
  other["text_config"].erase("model_type");
  Folder(other).expect_refused({"text_config: has no model_type"});
  other = mistral3();
  other["model_type"] = "mllama";
  Folder(other).expect_refused({"model_type is \"mllama\", a model of several parts", "gemma3, ",
                                "a folder of the text model alone"});
  other = mistral3();
  other["text_config"]["per_layer_config"] = {{"1", 2}};
  Folder(other).expect_refused(
      {"text_config: per_layer_config is {\"1\":2}, but Ballast does not"});
  other = mistral3();
  other["text_config"].erase("hidden_size");
  Folder(other).expect_refused({"text_config: has no hidden_size"});
  other = mistral3();
  other["quantization_config"] = {{"quant_method", "gptq"}};
  Folder(other).expect_refused({"quant_method is \"gptq\""});
}

/// An index alone shows whether the folder has an output matrix.
TEST(TextPart, IsTiedUnlessTheFolderHasAnOutputMatrix) {
  json config = mistral3();
  config.erase("tie_word_embeddings");
  for (const std::string output : {"language_model.lm_head.weight", "vision_tower.weight"}) {
    const Folder folder(config);
    const json index = {{"weight_map", {{output, "model-1.safetensors"}}}};
    folder.dir.write("m/model.safetensors.index.json", index.dump());
    EXPECT_EQ(folder.parse().model.tie_embeddings, !output.ends_with("lm_head.weight"));
  }
}

TEST(NameInTextModel, DropsThePrefixesOfWrappers) {
  EXPECT_EQ(name_in_text_model("model.language_model.norm.weight"), "model.norm.weight");
  EXPECT_EQ(name_in_text_model("language_model.model.norm.weight"), "model.norm.weight");
  EXPECT_EQ(name_in_text_model("language_model.lm_head.weight"), "lm_head.weight");
  EXPECT_EQ(name_in_text_model("model.text_model.norm.weight"), "model.norm.weight");
  for (const std::string name :
       {"model.norm.weight", "lm_head.weight", "language_model.norm.weight",
        "text_model.encoder.weight", "visual.language_model.weight", ""}) {
    EXPECT_EQ(name_in_text_model(name), name);
  }
}

}  // namespace
}  // namespace ballast::config::text_part_test
