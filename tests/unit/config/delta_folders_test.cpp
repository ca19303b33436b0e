// config.json of models with gated delta nets, and what the model section refuses.
#include <cstdint>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "ballast/config/config.h"
#include "ballast/config/hugging_face_config.h"
#include "ballast/core/error.h"
#include "ballast/model/architecture.h"

#include "tests/support/temp_dir.h"
#include "tests/unit/config/samples.h"

namespace ballast::config::delta_folders_test {
namespace {

using nlohmann::json;
using test::read;
using test::refusal;
using test::section_of;

/// Keys of a published folder, with smaller sizes.
json qwen3_5() {
  return json::parse(R"({
      "architectures": ["Qwen3_5ForConditionalGeneration"], "image_token_id": 248056,
      "model_type": "qwen3_5", "tie_word_embeddings": false,
      "text_config": {
          "attention_bias": false, "attention_dropout": 0.0, "attn_output_gate": true,
          "dtype": "bfloat16", "eos_token_id": 248044, "full_attention_interval": 2,
          "head_dim": 32, "hidden_act": "silu", "hidden_size": 40, "initializer_range": 0.02,
          "intermediate_size": 96, "layer_types": ["linear_attention", "full_attention"],
          "linear_conv_kernel_dim": 4, "linear_key_head_dim": 10, "linear_num_key_heads": 3,
          "linear_num_value_heads": 6, "linear_value_head_dim": 14, "mamba_ssm_dtype": "float32",
          "max_position_embeddings": 262144, "mlp_only_layers": [], "model_type": "qwen3_5_text",
          "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": false,
          "num_attention_heads": 3, "num_hidden_layers": 2, "num_key_value_heads": 1,
          "rms_norm_eps": 1e-06, "use_cache": true, "vocab_size": 300,
          "rope_parameters": {"mrope_interleaved": true, "mrope_section": [11, 11, 10],
                              "rope_type": "default", "rope_theta": 10000000,
                              "partial_rotary_factor": 0.25}},
      "video_token_id": 248057, "vision_config": {"depth": 2, "model_type": "qwen3_5"},
      "vision_end_token_id": 248054, "vision_start_token_id": 248053
  })");
}

TEST(DeltaFolders, AreReadAndWritten) {
  const Config c = read(qwen3_5());
  EXPECT_EQ(c.model.family, "qwen3_5");
  EXPECT_EQ(c.model.number("partial_rotary_factor"), 0.25);
  EXPECT_EQ(c.model.number("rope_theta"), 1e7);
  const model::Architecture model = model::build_architecture(c.model);
  const model::BlockSpec& delta = model.blocks[1];
  EXPECT_EQ(delta.tensor("linear_attn.in_proj_qkv.weight").shape,
            (std::vector<std::uint64_t>{2 * 30 + 84, 40}));
  EXPECT_EQ(delta.tensor("linear_attn.conv1d.weight").whole_shape(),
            (std::vector<std::uint64_t>{144, 1, 4}));
  // Gates follow the queries of their head in files, and all queries in memory.
  const model::TensorSpec& queries = model.blocks[2].tensor("self_attn.q_proj.weight");
  EXPECT_EQ(queries.shape, (std::vector<std::uint64_t>{2 * 96, 40}));
  EXPECT_EQ(model::run_in_files(queries, 96 * 40).first, 32 * 40U);
  const json text = json::parse(make_checkpoint_config(c).compact());
  EXPECT_EQ(text["model_type"], "qwen3_5_text");
  EXPECT_EQ(section_of(read(text)), section_of(c));
}

TEST(DeltaFolders, WithExpertsAreReadAndWritten) {
  json file = qwen3_5();
  json& text = file["text_config"];
  file["model_type"] = "qwen3_5_moe";
  text.erase("intermediate_size");
  text.update({{"model_type", "qwen3_5_moe_text"},
               {"num_experts", 4},
               {"num_experts_per_tok", 2},
               {"moe_intermediate_size", 24},
               {"shared_expert_intermediate_size", 40},
               {"router_aux_loss_coef", 0.001},
               {"output_router_logits", false}});
  const Config c = read(file);
  EXPECT_EQ(c.model.family, "qwen3_5_moe");
  EXPECT_EQ(model::build_architecture(c.model).blocks.size(), 1 + 2 * (2 + 1 + 4) + 1U);
  const json written = json::parse(make_checkpoint_config(c).compact());
  EXPECT_FALSE(written.contains("intermediate_size"));
  EXPECT_EQ(section_of(read(written)), section_of(c));

  text.update({{"model_type", "qwen3_next"}, {"intermediate_size", 96}, {"mlp_only_layers", {0}}});
  const Config next = read(text);
  const model::Architecture model = model::build_architecture(next.model);
  EXPECT_EQ(model.blocks[1].tensor("linear_attn.in_proj_qkvz.weight").shape.front(), 60 + 2 * 84U);
  EXPECT_EQ(model.blocks.size(), 1 + 1 + (2 + 1 + 4) + 1U);
}

TEST(DeltaFolders, ThatCannotBeComputedAreRefused) {
  const auto expect = [](const std::string& key, const json& value, const std::string& rule) {
    json file = qwen3_5();
    file["text_config"][key] = value;
    EXPECT_NE(refusal(file).find(rule), std::string::npos) << refusal(file);
  };
  expect("attn_output_gate", false, "attn_output_gate is false");
  expect("linear_num_value_heads", 7, "7 is not a multiple of linear_num_key_heads 3");
  expect("linear_conv_kernel_dim", 9, "must be at most 8, got 9");
  expect("layer_types", {"linear_attention", "sliding_attention"},
         "must be a list of num_layers (2) words, \"linear_attention\"");
  json file = qwen3_5();
  file["text_config"].update({{"num_attention_heads", 4}, {"num_key_value_heads", 2}});
  const std::string message = refusal(file, 2);
  EXPECT_NE(message.find("gated delta nets of this qwen3_5 model need whole sequences on one rank"),
            std::string::npos)
      << message;
}

}  // namespace
}  // namespace ballast::config::delta_folders_test
