// config.json of models with latent attention.
#include <string>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "ballast/config/config.h"
#include "ballast/config/hugging_face_config.h"
#include "ballast/core/error.h"
#include "ballast/model/architecture.h"

#include "tests/support/expect_error.h"
#include "tests/support/temp_dir.h"
#include "tests/unit/config/samples.h"

namespace ballast::config::latent_folders_test {
namespace {

using nlohmann::json;
using test::read;
using test::section_of;

/// The section read from the config.json that Ballast writes.
json written_and_read(const Config& config) {
  return section_of(read(json::parse(make_checkpoint_config(config).compact())));
}

json deepseek() {
  return json::parse(R"({
      "attention_bias": false, "aux_loss_alpha": 0.001, "ep_size": 1, "first_k_dense_replace": 1,
      "hidden_act": "silu", "hidden_size": 50, "intermediate_size": 96, "kv_lora_rank": 24,
      "max_position_embeddings": 163840, "model_type": "deepseek_v3", "moe_intermediate_size": 16,
      "moe_layer_freq": 1, "n_group": 4, "n_routed_experts": 16, "n_shared_experts": 1,
      "norm_topk_prob": true, "num_attention_heads": 4, "num_experts_per_tok": 3,
      "num_hidden_layers": 2, "num_key_value_heads": 4, "num_nextn_predict_layers": 1,
      "q_lora_rank": 20, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "rms_norm_eps": 1e-06,
      "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0,
                       "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096,
                       "type": "yarn"},
      "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
      "tie_word_embeddings": false, "topk_group": 2, "topk_method": "noaux_tc", "v_head_dim": 16,
      "vocab_size": 300
  })");
}

TEST(LatentFolders, OfDeepSeekAreReadAndWritten) {
  const Config c = read(deepseek());
  EXPECT_EQ(c.model.head_dim, 24U);
  EXPECT_EQ(c.model.detail("rope_scaling").find("mscale_all_dim")->number(), 1.0);
  EXPECT_EQ(written_and_read(c), section_of(c));
  const model::Architecture model = model::build_architecture(c.model);
  EXPECT_EQ(model.blocks.size(), 1 + 1 + (2 + 1 + 16) + 1U);

  json without = deepseek();
  without["q_lora_rank"] = nullptr;
  const Config plain = read(without);
  EXPECT_TRUE(plain.model.detail("q_lora_rank").is_null());
  EXPECT_EQ(written_and_read(plain), section_of(plain));
  without.erase("q_lora_rank");  // the class has a default
  EXPECT_EQ(read(without).model.number("q_lora_rank"), 1536.0);
}

TEST(LatentFolders, OfGlmFlashAreReadAndWritten) {
  json config = deepseek();
  for (const char* key : {"first_k_dense_replace", "rope_scaling", "aux_loss_alpha"}) {
    config.erase(key);
  }
  config.update({{"model_type", "glm4_moe_lite"}, {"n_group", 1}, {"topk_group", 1}});
  const Config c = read(config);
  EXPECT_TRUE(c.model.detail("mlp_layer_types").is_null());
  EXPECT_EQ(model::build_architecture(c.model).blocks.size(), 1 + 1 + (2 + 1 + 16) + 1U);
  EXPECT_EQ(written_and_read(c), section_of(c));
  config["mlp_layer_types"] = {"sparse", "dense"};
  const Config other = read(config);
  EXPECT_EQ(model::build_architecture(other.model).blocks[1].name, "layer 0 attention");
  EXPECT_EQ(written_and_read(other), section_of(other));
}

TEST(LatentFolders, OfSparseAttentionAreReadAndWritten) {
  for (const char* family : {"deepseek_v32", "glm_moe_dsa"}) {
    json config = deepseek();
    config.update({{"model_type", family},
                   {"index_topk", 32},
                   {"index_head_dim", 8},
                   {"index_n_heads", 2},
                   {"rope_interleave", true}});
    const Config c = read(config);
    EXPECT_EQ(c.model.number("index_topk"), 32.0);
    EXPECT_EQ(model::build_architecture(c.model).blocks.size(), 1 + 1 + (2 + 1 + 16) + 1U);
    EXPECT_EQ(written_and_read(c), section_of(c));
    config["mlp_layer_types"] = {"sparse", "dense"};
    EXPECT_EQ(model::build_architecture(read(config).model).blocks[1].name, "layer 0 attention");
    config["index_topk"] = 31;  // the sequences have 32 tokens
    test::expect_error(ErrorCategory::config,
                       {"data.sequence_length: 32 is above model.index_topk 31"},
                       [&] { read(config); });
  }
}

TEST(LatentFolders, OfMistralSmallAreReadAndWritten) {
  json config = deepseek();
  config.update({{"model_type", "mistral4"},
                 {"n_group", 1},
                 {"topk_group", 1},
                 {"rope_scaling",
                  {{"type", "yarn"},
                   {"factor", 128.0},
                   {"original_max_position_embeddings", 8192},
                   {"max_position_embeddings", 1048576},
                   {"mscale", 1.0},
                   {"mscale_all_dim", 1.0},
                   {"llama_4_scaling_beta", 0.1},
                   {"partial_rotary_factor", 1.0 / 3}}}});
  const Config c = read(config);
  EXPECT_EQ(c.model.detail("rope_scaling").find("partial_rotary_factor"), nullptr);
  EXPECT_EQ(written_and_read(c), section_of(c));
}

/// Kimi K2 has its own model_type.
TEST(LatentFolders, OfKimiAreThoseOfDeepSeek) {
  json config = deepseek();
  config["model_type"] = "kimi_k2";
  EXPECT_EQ(section_of(read(config)), section_of(read(deepseek())));
  EXPECT_EQ(read(config).model.family, "deepseek_v3");
}

TEST(LatentFolders, WithOtherRoutersAreRefused) {
  json config = deepseek();
  config["scoring_func"] = "softmax";
  try {
    read(config);
    FAIL() << "read";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("scoring_func is \"softmax\", but Ballast supports"),
              std::string::npos)
        << error.what();
  }
}

}  // namespace
}  // namespace ballast::config::latent_folders_test
