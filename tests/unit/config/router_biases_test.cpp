#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tests/support/temp_dir.h"
#include "tests/unit/config/samples.h"

// model.router_bias_update_speed.

namespace ballast::config::router_biases_test {
namespace {

using test::error_of;
using test::kMinimal;
using test::parse_text;

const std::string kMiniMax =
    R"(model={"family": "minimax_m2", "vocab_size": 256, "hidden_size": 64, "num_layers": 1,
              "num_heads": 4, "intermediate_size": 32, "num_local_experts": 8})";
const std::string kSpeed = "model.router_bias_update_speed=0.001";

TEST(RouterBiases, MoveInTrainingOfAllOrSomeTensors) {
  EXPECT_EQ(parse_text(kMinimal, {kMiniMax}).router_bias_update_speed, 0.0);
  const Config c = parse_text(kMinimal, {kMiniMax, kSpeed});
  EXPECT_EQ(c.router_bias_update_speed, 0.001);
  EXPECT_EQ(parse_text(print(c)).router_bias_update_speed, 0.001);
  const std::string some = R"(ballast.train=["*.q_proj.weight"])";
  EXPECT_EQ(parse_text(kMinimal, {kMiniMax, kSpeed, some}).router_bias_update_speed, 0.001);
}

TEST(RouterBiases, OfOtherRunsAreRefused) {
  const auto expect = [](const std::vector<std::string>& overrides, const std::string& rule) {
    const std::string error = error_of(kMinimal, overrides);
    EXPECT_NE(error.find("model.router_bias_update_speed (--set"), std::string::npos) << error;
    EXPECT_NE(error.find(rule), std::string::npos) << error;
  };
  expect({kMiniMax, kSpeed, "ballast.train=adapters"},
         "training adapters leaves the model as it is, including the correction biases of its "
         "routers; remove this key");
  expect({kSpeed},
         "this gpt2 model has no router with correction biases, which sigmoid routers have; remove "
         "this key");
  expect({kMiniMax, "model.router_bias_update_speed=-0.1"}, "must be at least 0, got -0.1");
}

/// Keys of training alone may be given with a folder, and override those of its config.json.
TEST(RouterLosses, MayBeSetForModelsOfFolders) {
  const test::TempDir folder;
  folder.write("config.json",
               R"({"model_type": "mixtral", "vocab_size": 256, "hidden_size": 64,
                   "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4,
                   "intermediate_size": 32, "num_local_experts": 4, "output_router_logits": false,
                   "router_aux_loss_coef": 0.02})");
  const std::string model = "model={\"path\": \"" + folder.path().string() + "\"}";
  const auto detail = [&](const std::vector<std::string>& more, const char* key) {
    std::vector<std::string> all = {model};
    all.insert(all.end(), more.begin(), more.end());
    return parse_text(kMinimal, all).model.detail(key).compact();
  };
  EXPECT_EQ(detail({}, "router_z_loss_coef"), "0.0");
  EXPECT_EQ(detail({"router_z_loss_coef=0.001"}, "router_z_loss_coef"), "0.001");
  EXPECT_EQ(detail({}, "router_aux_loss_coef"), "0.02");
  EXPECT_EQ(detail({"router_aux_loss_coef=0.5"}, "router_aux_loss_coef"), "0.5");
  EXPECT_EQ(detail({"router_aux_loss_coef=null"}, "router_aux_loss_coef"), "0.02");
  EXPECT_EQ(detail({"output_router_logits=true"}, "output_router_logits"), "true");
  EXPECT_NE(error_of(kMinimal, {model, "model.num_local_experts=8"})
                .find("is given too and sets the whole model"),
            std::string::npos);
}

/// No config.json has the key.
TEST(RouterBiases, MayMoveInModelsOfFolders) {
  const test::TempDir folder;
  folder.write("config.json",
               R"({"model_type": "minimax_m2", "vocab_size": 256, "hidden_size": 64,
                       "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4,
                       "head_dim": 16, "intermediate_size": 32, "num_local_experts": 8,
                       "num_experts_per_tok": 2, "max_position_embeddings": 64,
                       "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
                       "tie_word_embeddings": false})");
  const std::string model = "model={\"path\": \"" + folder.path().string() + "\"}";
  EXPECT_EQ(parse_text(kMinimal, {model, kSpeed}).router_bias_update_speed, 0.001);
}

}  // namespace
}  // namespace ballast::config::router_biases_test
