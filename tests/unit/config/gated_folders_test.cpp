// config.json of models with short convolutions and with gates of attention, and what the model
// section refuses.
#include <cstdint>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "ballast/config/config.h"
#include "ballast/config/hugging_face_config.h"
#include "ballast/core/error.h"
#include "ballast/model/architecture.h"

#include "src/model/description/layer_spec.h"
#include "tests/support/temp_dir.h"
#include "tests/unit/config/samples.h"

namespace ballast::config::gated_folders_test {
namespace {

using nlohmann::json;
using test::read;
using test::section_of;
using Shape = std::vector<std::uint64_t>;

void expect_refused(const json& file, const std::string& rule, std::uint64_t parts = 1) {
  const std::string message = test::refusal(file, parts);
  EXPECT_NE(message.find(rule), std::string::npos) << message;
}

/// Keys of a published folder of LFM2, with smaller sizes.
json lfm2() {
  return json::parse(R"({
      "architectures": ["Lfm2ForCausalLM"], "block_auto_adjust_ff_dim": true, "block_dim": 64,
      "block_ff_dim": 384, "block_ffn_dim_multiplier": 1.0, "block_mlp_init_scale": 1.0,
      "block_multiple_of": 48, "block_norm_eps": 1e-05, "block_out_init_scale": 1.0,
      "block_use_swiglu": true, "block_use_xavier_init": true, "bos_token_id": 1,
      "conv_L_cache": 3, "conv_bias": false, "conv_dim": 64, "conv_dim_out": 64,
      "conv_use_xavier_init": true, "eos_token_id": 7, "full_attn_idxs": [1, 3],
      "hidden_size": 64, "initializer_range": 0.02, "intermediate_size": 100,
      "max_position_embeddings": 128000, "model_type": "lfm2", "norm_eps": 1e-05,
      "num_attention_heads": 4, "num_heads": 4, "num_hidden_layers": 4, "num_key_value_heads": 2,
      "pad_token_id": 0, "rope_theta": 1000000.0, "theta": 1000000.0, "torch_dtype": "bfloat16",
      "transformers_version": "4.55.0", "use_cache": true, "use_pos_enc": true, "vocab_size": 300
  })");
}

TEST(Lfm2Folders, AreReadAndWritten) {
  const Config c = read(lfm2());
  EXPECT_EQ(c.model.family, "lfm2");
  EXPECT_TRUE(c.model.tie_embeddings);
  EXPECT_EQ(c.model.norm_epsilon, 1e-5);
  EXPECT_EQ(c.model.intermediate_size, 384U) << "block_ff_dim wins";
  const model::Architecture model = model::build_architecture(c.model);
  const model::BlockSpec& convolution = model.blocks[1];
  EXPECT_EQ(convolution.tensor("conv.in_proj.weight").shape, (Shape{3 * 64, 64}));
  EXPECT_EQ(convolution.tensor("conv.conv.weight").shape, (Shape{64, 1, 3}));
  EXPECT_EQ(convolution.tensor("feed_forward.w1.weight").shape, (Shape{288, 64}))
      << "two thirds of 384 up to a multiple of 48";
  EXPECT_EQ(model.blocks[2].tensor("self_attn.q_layernorm.weight").shape, (Shape{16}));
  EXPECT_NE(model.blocks[4].find("self_attn.out_proj.weight"), nullptr);
  const json written = json::parse(make_checkpoint_config(c).compact());
  EXPECT_EQ(section_of(read(written)), section_of(c));
}

TEST(Lfm2Folders, HaveTypesOfLayersAndBiases) {
  json file = lfm2();
  file.update({{"layer_types", {"full_attention", "conv", "conv", "conv"}},
               {"conv_bias", true},
               {"block_auto_adjust_ff_dim", false},
               {"tie_embedding", false}});
  const Config c = read(file);
  EXPECT_FALSE(c.model.tie_embeddings);
  const model::Architecture model = model::build_architecture(c.model);
  EXPECT_NE(model.blocks[1].find("self_attn.q_proj.weight"), nullptr);
  EXPECT_EQ(model.blocks[2].tensor("conv.conv.bias").shape, (Shape{64}));
  EXPECT_EQ(model.blocks[2].tensor("conv.in_proj.bias").shape, (Shape{3 * 64}));
  EXPECT_EQ(model.blocks[2].tensor("feed_forward.w2.weight").shape, (Shape{64, 384}));
}

TEST(Lfm2Folders, ThatCannotBeComputedAreRefused) {
  const auto expect = [](const std::string& key, const json& value, const std::string& rule) {
    json file = lfm2();
    file[key] = value;
    expect_refused(file, rule);
  };
  expect("conv_L_cache", 9, "must be at most 8, got 9");
  expect("full_attn_idxs", {1, 4}, "counted from 0, below num_layers (4)");
  expect("layer_types", {"conv", "conv", "conv", "sliding_attention"},
         "must be a list of num_layers (4) words, \"conv\" or \"full_attention\"");
  expect("block_ffn_dim_multiplier", 0.0, "must make an MLP of 1 to 16777216 values");
  expect_refused(lfm2(), "convolutions of this lfm2 model need whole sequences on one rank", 2);
}

/// Keys of a folder of Muse Glimmer, with smaller sizes.
json muse_glimmer() {
  return json::parse(R"({
      "architectures": ["MuseGlimmerForConditionalGeneration"], "image_token_id": 250,
      "model_type": "muse_glimmer", "out_hidden_size": 64, "projector_hidden_act": "gelu",
      "projector_hidden_size": 32, "video_token_id": 251, "vision_config": {"patch_size": 4},
      "text_config": {
          "attention_bias": false, "attention_dropout": 0.0, "final_logit_softcapping": 20.0,
          "head_dim": 16, "hidden_activation": "silu", "hidden_size": 64, "intermediate_size": 96,
          "layer_rope_theta": [500000.0, 0], "layer_types": ["sliding_attention", "full_attention"],
          "max_position_embeddings": 128, "model_type": "muse_glimmer_text",
          "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2,
          "output_multiplier": 0.5, "post_norm_eps": 1e-08, "qk_scale_factor": 3.5,
          "rms_norm_eps": 1e-05, "sliding_window": 9, "tie_word_embeddings": false,
          "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}, "vocab_size": 300}
  })");
}

TEST(MuseFolders, AreReadAndWritten) {
  const Config c = read(muse_glimmer());
  EXPECT_EQ(c.model.family, "muse_glimmer");
  const model::Architecture model = model::build_architecture(c.model);
  EXPECT_EQ(model.outer.logit_factor, 0.5);
  EXPECT_EQ(model.outer.logit_cap, 20.0);
  EXPECT_TRUE(model.layer(0).input_norm.has_value());
  EXPECT_FALSE(model.layer(1).input_norm.has_value());
  const auto& first = *model.layer(0).find<model::AttentionSpec>();
  const auto& last = *model.layer(1).find<model::AttentionSpec>();
  EXPECT_TRUE(first.rotary.has_value());
  EXPECT_FALSE(last.rotary.has_value());
  EXPECT_EQ(first.window, 9U);
  EXPECT_EQ(last.window, 0U);
  EXPECT_EQ(model.layer(0).head_maps()->query_norm->offset, 3.5F);
  EXPECT_EQ(model.layer(0).sublayers[0].after->epsilon, 1e-8);
  EXPECT_EQ(model.blocks[1].tensor("self_attn.gate_proj.weight").shape, (Shape{64, 64}));
  EXPECT_EQ(model.blocks[1].find("self_attn.q_norm.weight"), nullptr);
  const json text = json::parse(make_checkpoint_config(c).compact());
  EXPECT_EQ(text["model_type"], "muse_glimmer_text");
  EXPECT_EQ(section_of(read(text)), section_of(c));
}

TEST(MuseFolders, ThatCannotBeComputedAreRefused) {
  const auto expect = [](const std::string& key, const json& value, const std::string& rule) {
    json file = muse_glimmer();
    file["text_config"][key] = value;
    expect_refused(file, rule);
  };
  expect("layer_rope_theta", {0},
         "must be a list of num_layers (2) numbers: 0 for a layer without");
  expect("qk_scale_factor", 0, "must be above 0, got 0");
  expect("hidden_activation", "gelu", "hidden_activation is \"gelu\", but Ballast supports only");
}

}  // namespace
}  // namespace ballast::config::gated_folders_test
