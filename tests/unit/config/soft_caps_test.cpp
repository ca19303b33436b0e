// Soft caps of attention scores and logits in folders of Gemma 2.
#include <string>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "ballast/config/config.h"
#include "ballast/core/error.h"
#include "ballast/model/family.h"

#include "tests/support/expect_error.h"
#include "tests/support/layer_specs.h"
#include "tests/support/temp_dir.h"

namespace ballast::config::soft_caps_test {
namespace {

using nlohmann::json;

json gemma2() {
  return json::parse(R"({
      "architectures": ["Gemma2ForCausalLM"], "cache_implementation": "hybrid", "head_dim": 256,
      "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
      "hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 8192,
      "model_type": "gemma2", "num_attention_heads": 4, "num_hidden_layers": 4,
      "num_key_value_heads": 1, "query_pre_attn_scalar": 168, "rms_norm_eps": 1e-06,
      "rope_theta": 20000, "sliding_window": 512, "vocab_size": 300
  })");
}

Config parse(const json& folder) {
  const test::TempDir dir;
  dir.write("m/config.json", folder.dump());
  const json text = {{"model", {{"path", "m"}}},
                     {"data", {{"text", "t"}, {"sequence_length", 32}}},
                     {"train_batch_size", 1}};
  return config::parse(text.dump(), dir.path(), "c.json", {});
}

TEST(SoftCaps, HaveTheDefaultsOfTheClass) {
  const Config c = parse(gemma2());
  const model::Family& family = model::family("gemma2");
  EXPECT_EQ(test::attention_of(c.model, 0).cap, 50.0);
  EXPECT_EQ(family.outer(c.model).logit_cap, 30.0);
  EXPECT_TRUE(c.model.tie_embeddings);
  for (const std::uint64_t layer : {0U, 1U, 2U, 3U}) {
    EXPECT_EQ(test::attention_of(c.model, layer).window, layer % 2 == 0 ? 512U : 0U) << layer;
  }
}

TEST(SoftCaps, AreOffIfTheyAreNull) {
  json folder = gemma2();
  folder["attn_logit_softcapping"] = nullptr;
  folder["final_logit_softcapping"] = 12.5;
  const Config c = parse(folder);
  const model::Family& family = model::family("gemma2");
  EXPECT_EQ(test::attention_of(c.model, 0).cap, 0.0);
  EXPECT_EQ(family.outer(c.model).logit_cap, 12.5);
}

TEST(SoftCaps, MustBeAboveZero) {
  for (const char* const key : {"attn_logit_softcapping", "final_logit_softcapping"}) {
    json folder = gemma2();
    folder[key] = -1.0;
    test::expect_error(ErrorCategory::config, {key, "must be above 0, got -1"},
                       [&] { static_cast<void>(parse(folder)); });
  }
}

}  // namespace
}  // namespace ballast::config::soft_caps_test
