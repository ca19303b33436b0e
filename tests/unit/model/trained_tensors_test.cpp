#include <algorithm>
#include <set>
#include <span>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/core/dtype.h"
#include "ballast/core/error.h"
#include "ballast/model/architecture.h"
#include "ballast/model/family.h"

#include "src/model/compute/layer_arguments.h"
#include "tests/support/expect_error.h"
#include "tests/unit/model/fixture.h"

namespace ballast::model::frozen_test {
namespace {

Architecture frozen(const ModelConfig& config, const std::vector<std::string>& patterns) {
  Architecture model = build_architecture(config);
  freeze(model, patterns, [](std::size_t pattern, const std::string& rule) {
    throw Error(ErrorCategory::config, std::to_string(pattern) + ": " + rule);
  });
  return model;
}

std::set<std::string> names(const Architecture& model, bool frozen) {
  std::set<std::string> found;
  for (const BlockSpec& block : model.blocks) {
    for (const TensorSpec& tensor : block.tensors) {
      if (tensor.frozen == frozen) found.insert(tensor.name);
    }
  }
  return found;
}

TEST(Freeze, TrainsTheTensorsThatMatch) {
  const Architecture model =
      frozen(test::small_llama(), {"model.layers.1.self_attn.[qv]_proj.*", "model.norm.weight"});
  EXPECT_EQ(names(model, false),
            (std::set<std::string>{"model.layers.1.self_attn.q_proj.weight",
                                   "model.layers.1.self_attn.v_proj.weight", "model.norm.weight"}));
  Elems trained = 0;
  for (const BlockSpec& block : model.blocks) {
    for (const TensorSpec& tensor : block.tensors) trained += tensor.frozen ? 0 : tensor.size;
  }
  EXPECT_EQ(model.trained_parameters(), trained);
  EXPECT_TRUE(names(frozen(test::small_llama(), {"*"}), true).empty());
  EXPECT_TRUE(names(frozen(test::small_llama(), {}), true).empty());
}

ModelConfig small_glm() {
  ModelConfig c = default_config("glm4_moe");
  c.hidden_size = 8;
  c.num_heads = 2;
  c.num_layers = 2;
  c.intermediate_size = 8;
  c.details["n_routed_experts"] = std::uint64_t{5};
  c.details["num_experts_per_tok"] = std::uint64_t{2};
  c.details["moe_intermediate_size"] = std::uint64_t{4};
  return c;
}

TEST(Buffers, AreNeverTrained) {
  const std::string correction = "model.layers.1.mlp.gate.e_score_correction_bias";
  for (const std::vector<std::string>& patterns :
       {std::vector<std::string>{}, {"*"}, {"*gate*", "model.norm.weight"}}) {
    const Architecture model = frozen(small_glm(), patterns);
    EXPECT_TRUE(names(model, true).contains(correction));
    EXPECT_EQ(names(model, true).size() == 1, patterns.size() < 2);
    EXPECT_TRUE(names(model, false).contains("model.layers.1.mlp.gate.weight"));
  }
  test::expect_error(ErrorCategory::config,
                     {"1: '*e_score_correction_bias' matches only", correction,
                      "which has no gradient", "model.router_bias_update_speed"},
                     [] {
                       frozen(small_glm(), {"*", "*e_score_correction_bias"});
                     });
}

TEST(Freeze, TrainsTheMapsOfLatentAttentionAndRoutersByName) {
  ModelConfig c = default_config("deepseek_v3");
  c.hidden_size = 8;
  c.num_layers = 2;
  c.num_heads = c.num_kv_heads = 2;
  c.intermediate_size = 8;
  for (const char* key : {"q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
                          "v_head_dim", "num_experts_per_tok", "moe_intermediate_size"}) {
    c.details[key] = std::uint64_t{2};
  }
  c.details["n_routed_experts"] = std::uint64_t{4};
  c.details["n_group"] = c.details["topk_group"] = c.details["first_k_dense_replace"] =
      std::uint64_t{1};
  const std::string layer = "model.layers.1.";
  const std::string attention = layer + "self_attn.";
  EXPECT_EQ(
      names(frozen(c, {"*.1.mlp.gate.weight", "*.1.self_attn.*_a_*", "*.1.*.kv_b_proj.*"}), false),
      (std::set<std::string>{layer + "mlp.gate.weight", attention + "q_a_proj.weight",
                             attention + "q_a_layernorm.weight",
                             attention + "kv_a_proj_with_mqa.weight",
                             attention + "kv_a_layernorm.weight", attention + "kv_b_proj.weight"}));
}

TEST(Buffers, HoldExactFp32Values) {
  const Architecture model = build_architecture(small_glm());
  const auto router = std::find_if(model.blocks.begin(), model.blocks.end(), [](const auto& block) {
    return block.content == BlockContent::router;
  });
  const TensorSpec& tensor = router->tensor("mlp.gate.e_score_correction_bias");
  EXPECT_EQ(tensor.whole_shape(), std::vector<std::uint64_t>{5});
  EXPECT_EQ(tensor.size, 15U);
  EXPECT_EQ(router->parameters, 8U + 5 * 8 + 5);
  EXPECT_EQ(router->frozen_elements, 2048U);
  const std::vector<float> values = {7.123456F, -3.1415927F, 1e-20F, 0.0F, 0x1.fffffep9F};
  std::vector<float> stored(tensor.size);
  for (Elems i = 0; i < tensor.size; ++i) stored[i] = values[run_in_files(tensor, i).first];
  // In parts of 4 elements, as large tensors are read.
  for (Elems first = 0; first < tensor.size; first += 4) {
    const Elems count = std::min<Elems>(4, tensor.size - first);
    split_into_addends(tensor, first, std::span(stored).subspan(first, count));
  }
  for (const float value : stored) EXPECT_EQ(to_float(to_bf16(value)), value);
  EXPECT_NE(stored[0], values[0]);
  EXPECT_EQ(sum_of_addends(tensor, stored), values);
}

/// Names without weight decay.
std::set<std::string> exempt(const ModelConfig& config, const std::vector<std::string>& patterns) {
  Architecture model = build_architecture(config);
  exempt_from_decay(model, patterns, [](std::size_t pattern, const std::string& rule) {
    throw Error(ErrorCategory::config, std::to_string(pattern) + ": " + rule);
  });
  std::set<std::string> found;
  for (const BlockSpec& block : model.blocks) {
    for (const TensorSpec& tensor : block.tensors) {
      if (tensor.undecayed) found.insert(tensor.name);
    }
  }
  return found;
}

TEST(WeightDecay, LeavesOutBiasesAndNormsAsTransformersDoes) {
  for (const ModelConfig& config : {test::small_gpt2(), test::small_llama()}) {
    std::set<std::string> vectors;
    for (const BlockSpec& block : build_architecture(config).blocks) {
      for (const TensorSpec& tensor : block.tensors) {
        if (tensor.shape.size() == 1) vectors.insert(tensor.name);
      }
    }
    EXPECT_GT(vectors.size(), 4U);
    EXPECT_EQ(exempt(config, {"transformers"}), vectors);
    EXPECT_TRUE(exempt(config, {}).empty());
  }
  const std::set<std::string> norms = exempt(test::small_llama(), {"*norm*"});
  EXPECT_EQ(exempt(test::small_llama(), {"transformers"}), norms);
  std::set<std::string> more = norms;
  more.insert("lm_head.weight");
  EXPECT_EQ(exempt(test::small_llama(), {"transformers", "lm_head.weight"}), more);
  try {
    exempt(test::small_llama(), {"*norm*", "lm_haed.weight"});
    FAIL();
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(),
                 "1: 'lm_haed.weight' matches no tensor of the model (did you mean "
                 "'lm_head.weight'?)");
  }
}

TEST(Freeze, PutsTrainedTensorsFirstInWholePages) {
  for (const ModelConfig& config : {test::small_gpt2(), test::small_llama()}) {
    for (const std::string pattern : {"*mlp*", "*norm*", "*ln_*", "*.0.*", "*bias", "*embed*"}) {
      const std::set<std::string> all = names(build_architecture(config), false);
      const auto hits = [&](const std::string& part) {
        return std::any_of(all.begin(), all.end(), [&](const std::string& name) {
          return name.find(part) != std::string::npos;
        });
      };
      const std::string part = pattern.substr(1, pattern.size() - (pattern.back() == '*' ? 2 : 1));
      if (!hits(part)) continue;
      const Architecture model = frozen(config, {pattern});
      for (const BlockSpec& block : model.blocks) {
        EXPECT_EQ(block.elements % 2048, 0U);
        EXPECT_EQ(block.frozen_elements % 2048, 0U);
        Elems end = 0;
        for (const TensorSpec& tensor : block.tensors) {
          EXPECT_EQ(tensor.offset % 32, 0U) << tensor.name;
          EXPECT_GE(tensor.offset, end) << tensor.name;
          end = tensor.offset + tensor.size;
          EXPECT_EQ(tensor.frozen, tensor.offset >= block.trained_elements()) << tensor.name;
          EXPECT_LE(end, tensor.frozen ? block.elements : block.trained_elements()) << tensor.name;
        }
      }
    }
  }
}

TEST(Freeze, EndsTheBackwardPassAtTheLowestTrainedLayer) {
  ModelConfig config = test::small_llama();
  const auto first = [&](const std::string& pattern) {
    const Architecture model = frozen(config, {pattern});
    return model.blocks[model.first_differentiated()].name;
  };
  EXPECT_EQ(first("*"), "embedding");
  EXPECT_EQ(first("model.layers.1.mlp.*"), "layer 1");
  EXPECT_EQ(first("model.norm.weight"), "head");
  config.layer_tiles = 2;
  config.vocabulary_tiles = 3;
  config.tie_embeddings = false;
  // The second half of a layer may compute its input again, from that of the first.
  EXPECT_EQ(first("model.layers.1.mlp.*"), "layer 1 attention");
  EXPECT_EQ(first("model.embed_tokens.weight"), "embedding 0");
  EXPECT_EQ(first("lm_head.weight"), "head");
}

TEST(Freeze, CountsOmittedGradientProducts) {
  const Architecture all = build_architecture(test::small_llama());
  const Architecture none = frozen(test::small_llama(), {"model.layers.0.*"});
  EXPECT_EQ(none.frozen_flops(1, 2, 8), 0.0);
  Elems matrices = 0;
  for (const TensorSpec& tensor : all.blocks[2].tensors) {
    matrices += tensor.shape.size() == 2 ? tensor.size : 0;
  }
  EXPECT_EQ(none.frozen_flops(2, 2, 8), 2.0 * 16.0 * static_cast<double>(matrices));
  const std::size_t head = none.head();
  EXPECT_EQ(none.frozen_flops(head, 2, 8), all.forward_flops(head, 2, 8));
  ModelConfig tied = test::small_llama();
  tied.tie_embeddings = true;
  EXPECT_EQ(frozen(tied, {"model.embed_tokens.weight"}).frozen_flops(head, 2, 8), 0.0);
  EXPECT_EQ(frozen(tied, {"model.norm.weight"}).frozen_flops(head, 2, 8),
            build_architecture(tied).forward_flops(head, 2, 8));
}

/// Queries end where the gradients end, and frozen keys follow without a gap.
TEST(Freeze, JoinsOnlyMapsThatAreAllTrainedOrAllFrozen) {
  ModelConfig config = test::small_llama();
  config.hidden_size = 2048;  // a norm of a whole page
  config.head_dim = 0;
  config.num_heads = config.num_kv_heads = 4;
  const auto maps = [&](const std::vector<std::string>& patterns) {
    const BlockSpec block = frozen(config, patterns).blocks[1];
    std::vector<LinearAt> of;
    for (const char* name : {"q", "k", "v"}) {
      of.push_back(find_linear(block, std::string("self_attn.") + name + "_proj"));
    }
    return joined(of).size();
  };
  EXPECT_EQ(maps({"*"}), 1U);
  EXPECT_EQ(maps({"model.norm.weight"}), 1U);
  EXPECT_EQ(maps({"*.input_layernorm.weight", "*.q_proj.weight"}), 2U);
}

std::string error_of(const std::vector<std::string>& patterns,
                     const ModelConfig& config = test::small_llama()) {
  try {
    frozen(config, patterns);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(Freeze, NamesAPatternWithoutATensorAndTheNearestOne) {
  EXPECT_EQ(
      error_of({"*", "model.layer.1.*"}),
      "1: 'model.layer.1.*' matches no tensor of the model (did you mean 'model.layers.1.*'?)");
  EXPECT_EQ(error_of({"*.qproj.weight"}),
            "0: '*.qproj.weight' matches no tensor of the model (did you mean '*.q_proj.weight'?)");
  EXPECT_EQ(error_of({"lm_head"}),
            "0: 'lm_head' matches no tensor of the model (did you mean 'lm_head.*'?)");
  EXPECT_EQ(error_of({"xyz"}), "0: 'xyz' matches no tensor of the model");
  EXPECT_EQ(error_of({"*experts.down_proj"}),
            "0: '*experts.down_proj' matches no tensor of the model");
  EXPECT_TRUE(
      error_of({"*.experts.gate_up_proj"}, small_glm())
          .starts_with("0: '*.experts.gate_up_proj' matches no tensor of the model; experts "
                       "that a folder stacks have their own names"));
}

}  // namespace
}  // namespace ballast::model::frozen_test
