#include <optional>
#include <string>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "ballast/config/config.h"
#include "ballast/config/key_effects.h"
#include "ballast/model/block_layout.h"

#include "tests/support/temp_dir.h"

namespace ballast::config::pad_token_test {
namespace {

using nlohmann::json;

json llama() {
  return {{"model_type", "llama"},    {"vocab_size", 300},        {"hidden_size", 48},
          {"num_hidden_layers", 3},   {"num_attention_heads", 6}, {"num_key_value_heads", 2},
          {"intermediate_size", 136}, {"rms_norm_eps", 1e-6},     {"rope_theta", 500000.0}};
}

json gpt2() {
  return {{"model_type", "gpt2"}, {"vocab_size", 300}, {"n_embd", 64},
          {"n_layer", 2},         {"n_head", 4},       {"n_positions", 96}};
}

/// A folder with `config` as its config.json, and configs that name it.
struct Folder {
  explicit Folder(const json& config) { dir.write("m/config.json", config.dump()); }
  [[nodiscard]] Config parse(const json& model = {{"path", "m"}}) const {
    const json text = {
        {"model", model},
        {"data", {{"text", "t"}, {"sequence_length", 32}}},
        // Without it, the first note is about the optimizer.
        {"optimizer", {{"type", "AdamW"}, {"params", {{"lr", 1e-3}, {"weight_decay", 0.01}}}}},
        {"train_batch_size", 1}};
    return config::parse(text.dump(), dir.path(), "c.json", {});
  }
  test::TempDir dir;
};

TEST(PadToken, IsThatOfTheFolder) {
  const auto token = [](json config, const json& model = {{"path", "m"}}) {
    return model::pad_token(Folder(config).parse(model).model);
  };
  json config = llama();
  EXPECT_EQ(token(config), std::nullopt);
  config["pad_token_id"] = 7;
  EXPECT_EQ(token(config), 7);
  EXPECT_EQ(token(config, {{"path", "m"}, {"pad_token_id", nullptr}}), std::nullopt);
  EXPECT_EQ(token(config, {{"path", "m"}, {"pad_token_id", 9}}), 9);
  config["pad_token_id"] = -1;  // the last token, as nn.Embedding counts
  EXPECT_EQ(token(config), 299);
  config["pad_token_id"] = 300;
  EXPECT_EQ(token(config), std::nullopt);
  EXPECT_NE(Folder(config).parse().notes.at(0).find("has no token with the pad_token_id 300"),
            std::string::npos);
  config = llama();
  config["model_type"] = "olmo2";
  EXPECT_EQ(token(config), 1);  // the class's default
  config = gpt2();
  config["pad_token_id"] = 7;  // without effect in the class
  EXPECT_EQ(token(config), std::nullopt);
}

TEST(PadToken, IsASettingOnlyIfThereIsOne) {
  const char* const key = "model.pad_token_id";
  json config = llama();
  EXPECT_FALSE(settings_of(Folder(config).parse()).contains(key));
  config["pad_token_id"] = 7;
  const Settings with = settings_of(Folder(config).parse());
  EXPECT_EQ(with.at(key), "7");
  const Settings without =
      settings_of(Folder(config).parse({{"path", "m"}, {"pad_token_id", nullptr}}));
  EXPECT_EQ(find_changes(with, without).size(), 1U);
  EXPECT_TRUE(find_changes(without, with).empty());
}

}  // namespace
}  // namespace ballast::config::pad_token_test
