#include "ballast/model/architecture.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <numbers>
#include <set>

#include <gtest/gtest.h>

#include "ballast/core/error.h"
#include "ballast/core/random.h"
#include "ballast/model/compute.h"
#include "ballast/model/family.h"

#include "src/model/host/kernel_tables.h"
#include "tests/unit/model/fixture.h"

namespace ballast::model::architecture_test {
namespace {

ModelConfig gpt2_124m() {
  ModelConfig c;
  c.vocab_size = 50257;
  c.hidden_size = 768;
  c.num_layers = 12;
  c.num_heads = 12;
  c.intermediate_size = 3072;
  c.max_sequence = 1024;
  return c;
}

TEST(Architecture, CountsTheParametersOfKnownModels) {
  EXPECT_EQ(build_architecture(gpt2_124m()).parameters(), 124439808U);
  ModelConfig tiny;  // TinyLlama-1.1B
  tiny.family = "llama";
  tiny.vocab_size = 32000;
  tiny.hidden_size = 2048;
  tiny.num_layers = 22;
  tiny.num_heads = 32;
  tiny.num_kv_heads = 4;
  tiny.intermediate_size = 5632;
  tiny.tie_embeddings = false;
  EXPECT_EQ(build_architecture(tiny).parameters(), 1100048384U);
}

TEST(Architecture, LaysTensorsOnCacheLinesAndBlocksOnPages) {
  for (const ModelConfig& config : {test::small_gpt2(), test::small_llama()}) {
    const Architecture model = build_architecture(config);
    ASSERT_EQ(model.blocks.size(), config.num_layers + 2);
    std::set<std::string> names;
    for (const BlockSpec& block : model.blocks) {
      EXPECT_EQ(block.elements % 2048, 0U);
      Elems end = 0;
      Elems parameters = 0;
      for (const TensorSpec& tensor : block.tensors) {
        EXPECT_EQ(tensor.offset % 32, 0U);
        EXPECT_GE(tensor.offset, end);
        end = tensor.offset + tensor.size;
        parameters += tensor.size;
        EXPECT_TRUE(names.insert(tensor.name).second) << tensor.name;
      }
      EXPECT_LE(end, block.elements);
      EXPECT_EQ(parameters, block.parameters);
    }
  }
}

TEST(Architecture, NamesTensorsAsHuggingFaceDoes) {
  const Architecture gpt2 = build_architecture(test::small_gpt2());
  EXPECT_EQ(gpt2.blocks[0].tensors[0].name, "transformer.wte.weight");
  EXPECT_EQ(gpt2.blocks[0].tensors[0].offset, 0U);
  const auto& projection = gpt2.blocks[2].tensor("transformer.h.1.attn.c_attn.weight");
  EXPECT_EQ(projection.shape, (std::vector<std::uint64_t>{36, 108}));
  EXPECT_DOUBLE_EQ(gpt2.blocks[1].tensor("transformer.h.0.mlp.c_proj.weight").stddev, 0.02 / 2.0);
  EXPECT_EQ(gpt2.blocks[3].tensors.size(), 2U);

  const Architecture llama = build_architecture(test::small_llama());
  EXPECT_EQ(llama.blocks[0].tensors[0].name, "model.embed_tokens.weight");
  const auto& key = llama.blocks[1].tensor("model.layers.0.self_attn.k_proj.weight");
  EXPECT_EQ(key.shape, (std::vector<std::uint64_t>{12, 36}));
  EXPECT_EQ(llama.blocks[3].tensor("lm_head.weight").shape[0], 61U);
  EXPECT_THROW((void)llama.blocks[0].tensor("lm_head.weight"), Error);
}

/// The message of the refusal; empty when there was none.
std::string refusal(const ModelConfig& config) {
  try {
    build_architecture(config);
  } catch (const Error& error) {
    EXPECT_EQ(error.category(), ErrorCategory::config);
    return error.what();
  }
  return {};
}

TEST(Architecture, RefusesNumbersThatDoNotFitTogether) {
  const auto with = [](ModelConfig config, auto change) {
    change(config);
    return refusal(config);
  };
  const auto has = [](const std::string& text, const char* part) {
    return text.find(part) != std::string::npos;
  };
  EXPECT_TRUE(has(with(test::small_gpt2(), [](auto& c) { c.num_heads = c.num_kv_heads = 5; }),
                  "model.num_heads: 5 does not divide hidden_size 36"));
  EXPECT_TRUE(has(with(test::small_llama(), [](auto& c) { c.num_kv_heads = 4; }), "num_kv_heads"));
  EXPECT_TRUE(has(with(test::small_llama(), [](auto& c) { c.num_heads = c.num_kv_heads = 12; }),
                  "model.head_dim: 3 is odd"));
  EXPECT_TRUE(
      has(with(test::small_gpt2(), [](auto& c) { c.vocab_size = 0; }), "vocab_size: missing"));
  EXPECT_TRUE(has(with(test::small_gpt2(), [](auto& c) { c.max_sequence = 0; }), "max_sequence"));
  EXPECT_TRUE(has(with(test::small_gpt2(), [](auto& c) { c.num_kv_heads = 1; }),
                  "gpt2 needs the value of num_heads (3), got 1"));
  EXPECT_TRUE(has(with(test::small_gpt2(), [](auto& c) { c.norm_epsilon = 0; }), "norm_epsilon"));
  EXPECT_EQ(refusal(test::small_gpt2()), "");
  EXPECT_EQ(refusal(test::small_llama()), "");
}

TEST(Architecture, CountsMatrixFlops) {
  const Architecture model = build_architecture(gpt2_124m());
  EXPECT_EQ(model.forward_flops(0, 4, 512), 0.0);
  const double tokens = 2048.0;
  EXPECT_EQ(model.forward_flops(13, 4, 512), 2.0 * tokens * 768 * 50257);
  EXPECT_EQ(model.forward_flops(1, 4, 512),
            2.0 * tokens * 12 * 768 * 768 + 2.0 * tokens * 512 * 768);
}

TEST(Architecture, CountsRecomputedFlops) {
  const Architecture gpt2 = build_architecture(gpt2_124m());
  EXPECT_EQ(gpt2.recomputed_flops(0, 4, 512), 0.0);
  EXPECT_EQ(gpt2.recomputed_flops(1, 4, 512), 2.0 * 2048 * 8 * 768 * 768 + 2.0 * 2048 * 512 * 768);
  EXPECT_EQ(gpt2.recomputed_flops(13, 4, 512), 0.0);
  const Architecture llama = build_architecture(test::small_llama());
  const double down = static_cast<double>(llama.blocks[1].tensors.back().size);
  EXPECT_EQ(llama.recomputed_flops(1, 1, 8), llama.forward_flops(1, 1, 8) - 2.0 * 8 * down);
}

TEST(Flops, OfAWindowCountTheKeysThatAreSeen) {
  ModelConfig config = test::small_llama();
  const double all = build_architecture(config).forward_flops(1, 1, 64);
  config.family = "mistral";
  for (const std::uint64_t window : {1U, 8U, 63U, 64U, 100U}) {
    config.details["sliding_window"] = window;
    const Architecture model = build_architecture(config);
    const double seen = std::min<double>(64.0, static_cast<double>(window));
    // In the causal half without a window, pairs on the diagonal count half.
    const double pairs = 64.0 * seen - seen * seen / 2.0;
    const double width = static_cast<double>(model.blocks[1].attention_width);
    EXPECT_DOUBLE_EQ(model.forward_flops(1, 1, 64), all - 4.0 * (64.0 * 64.0 / 2.0 - pairs) * width)
        << window;
  }
}

TEST(Families, AreFoundByNameWithASuggestion) {
  EXPECT_EQ(family("llama").name(), "llama");
  EXPECT_EQ(family_names().front(), "gpt2");
  EXPECT_EQ(default_config("llama").number("rope_theta"), 10000.0);
  try {
    static_cast<void>(family("lama"));
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("llama"), std::string::npos);
  }
}

std::vector<float> initial(const TensorSpec& tensor, std::uint64_t seed) {
  std::vector<float> values(tensor.size);
  initialize(tensor, seed, 0, values);
  return values;
}

TensorSpec normal_tensor(const std::string& name, Elems size) {
  TensorSpec tensor;
  tensor.name = name;
  tensor.shape = {size};
  tensor.size = size;
  tensor.columns_in_all = 1;
  tensor.init = Init::normal;
  tensor.stddev = 0.5;
  return tensor;
}

TEST(Initialize, DrawsFromTheDistributionAndDependsOnSeedAndName) {
  const auto values = initial(normal_tensor("a", 100003), 7);
  EXPECT_EQ(values, initial(normal_tensor("a", 100003), 7));
  double sum = 0.0;
  double square = 0.0;
  for (const float x : values) {
    sum += x;
    square += static_cast<double>(x) * x;
  }
  const auto count = static_cast<double>(values.size());
  EXPECT_NEAR(sum / count, 0.0, 0.01);
  EXPECT_NEAR(std::sqrt(square / count), 0.5, 0.01);
  EXPECT_NE(values, initial(normal_tensor("a", 100003), 8));
  EXPECT_NE(values, initial(normal_tensor("b", 100003), 7));
}

TEST(Initialize, DrawsRatesWhoseLogarithmsAreStored) {
  TensorSpec tensor = normal_tensor("layers.0.linear_attn.A_log", 10007);
  tensor.init = Init::log_uniform;
  tensor.stddev = 16.0;
  double sum = 0.0;
  double most = 0.0;
  for (const float x : initial(tensor, 7)) {
    sum += std::exp(x);
    most = std::max<double>(most, std::exp(x));
  }
  EXPECT_NEAR(sum / 10007.0, 8.0, 0.2);
  EXPECT_NEAR(most, 16.0, 0.02);
}

TEST(Initialize, AnElementDoesNotDependOnThePieceItIsDrawnIn) {
  const TensorSpec tensor = normal_tensor("a", 1003);
  const auto whole = initial(tensor, 7);
  for (const Elems first : {0, 1, 2, 3, 4, 5, 997}) {
    std::vector<float> piece(std::min<Elems>(6, tensor.size - first));
    initialize(tensor, 7, first, piece);
    for (std::size_t i = 0; i < piece.size(); ++i) EXPECT_EQ(piece[i], whole[first + i]);
  }
}

/// The values as the formula gives them with the C library.
std::vector<float> by_formula(const TensorSpec& tensor, std::uint64_t seed) {
  std::vector<float> values;
  for (Elems group = 0; 4 * group < tensor.size; ++group) {
    const auto words = philox(seed, group, fnv1a(tensor.name));
    for (std::size_t k = 0; k < 4; ++k) {
      const double u1 = (static_cast<double>(words[k / 2 * 2]) + 0.5) * 0x1p-32;
      const double angle =
          2.0 * std::numbers::pi * ((static_cast<double>(words[k / 2 * 2 + 1]) + 0.5) * 0x1p-32);
      const double radius = std::sqrt(-2.0 * std::log(u1));
      const double normal = radius * (k % 2 == 0 ? std::cos(angle) : std::sin(angle));
      values.push_back(static_cast<float>(tensor.stddev * normal));
    }
  }
  values.resize(tensor.size);
  return values;
}

std::vector<std::uint32_t> bits_of(const std::vector<float>& values) {
  std::vector<std::uint32_t> bits;
  for (const float value : values) bits.push_back(std::bit_cast<std::uint32_t>(value));
  return bits;
}

TEST(Initialize, HasTheBitsOfTheFormula) {
  TensorSpec tensor = normal_tensor("a.weight", 1'000'003);
  for (const double stddev : {0.02, 1.0, 1e-43, 0.0}) {
    tensor.stddev = stddev;
    EXPECT_EQ(bits_of(initial(tensor, 7)), bits_of(by_formula(tensor, 7))) << stddev;
  }
}

TEST(Initialize, KernelsEqualTheFormulaExceptForDoubtfulGroups) {
  constexpr std::size_t kCalls = 4000;
  constexpr std::size_t kSize = 4 * host::kNormalGroups;
  const TensorSpec tensor = normal_tensor("b", kCalls * kSize);
  const auto expected = bits_of(by_formula(tensor, 11));
  for (const host::KernelTable* table : host::kernel_tables()) {
    std::vector<float> values(tensor.size);
    std::array<std::size_t, host::kNormalGroups> doubtful{};
    std::size_t doubts = 0;
    for (std::size_t call = 0; call < kCalls; ++call) {
      float* const out = values.data() + call * kSize;
      const std::size_t found = table->normals(11, fnv1a(tensor.name), call * host::kNormalGroups,
                                               tensor.stddev, out, doubtful.data());
      for (std::size_t i = 0; i < found; ++i) {
        const std::size_t at = call * kSize + 4 * doubtful.at(i);
        for (std::size_t k = at; k < at + 4; ++k) values[k] = std::bit_cast<float>(expected[k]);
      }
      doubts += found;
    }
    EXPECT_EQ(bits_of(values), expected) << to_string(table->isa);
    // There is about one in 8,000.
    EXPECT_GT(doubts, 0U);
    EXPECT_LT(doubts, kCalls * host::kNormalGroups / 1000);
  }
}

TEST(StoredRows, OfGptNeoxAreQueriesKeysAndValuesByHead) {
  ModelConfig c = default_config("gpt_neox");
  c.hidden_size = 6;
  c.num_heads = 3;
  c.details["partial_rotary_factor"] = 1.0;
  c.num_layers = 1;
  const Architecture model = build_architecture(c);
  const TensorSpec& weight = model.blocks[1].tensor("attention.query_key_value.weight");
  const TensorSpec& bias = model.blocks[1].tensor("attention.query_key_value.bias");
  // The first head's values are the third part in memory, and follow its keys in files.
  EXPECT_EQ(run_in_files(weight, 2 * 3 * 2 * 6 + 5).first, 2U * 2 * 6 + 5);
  EXPECT_EQ(run_in_files(weight, 2 * 3 * 2 * 6 + 5).count, 7U);
  for (const TensorSpec* const tensor : {&weight, &bias}) {
    std::vector<bool> seen(tensor->size);
    for (Elems at = 0; at < tensor->size; ++at) {
      const TensorRun there = run_in_files(*tensor, at);
      EXPECT_FALSE(seen[there.first]);
      seen[there.first] = true;
      EXPECT_EQ(run_in_memory(*tensor, there.first).first, at);
      EXPECT_EQ(run_in_memory(*tensor, there.first).count, there.count);
    }
  }
  const TensorSpec& other = model.blocks[1].tensor("attention.dense.weight");
  EXPECT_EQ(run_in_files(other, 5).first, 5U);
  EXPECT_EQ(run_in_files(other, 5).count, other.size - 5);
}

TEST(StoredRows, OfGptOssAreColumnsOfStackedMatrices) {
  ModelConfig c = default_config("gpt_oss");
  c.hidden_size = 6;
  c.num_heads = 3;
  c.num_layers = 1;
  c.intermediate_size = 5;
  c.details["num_local_experts"] = std::uint64_t{4};
  const Architecture model = build_architecture(c);
  const BlockSpec& expert = model.blocks[model.first_layer() + 2 + 3];
  ASSERT_EQ(expert.name, "layer 0 expert 3");
  const TensorSpec& gate_up = expert.tensor("mlp.experts.gate_up_proj");
  const TensorSpec& down_bias = expert.tensor("mlp.experts.down_proj_bias");
  EXPECT_EQ(gate_up.whole_shape(), (std::vector<std::uint64_t>{4, 6, 10}));
  EXPECT_EQ(expert.tensor("mlp.experts.gate_up_proj_bias").whole_shape(),
            (std::vector<std::uint64_t>{4, 10}));
  EXPECT_EQ(expert.tensor("mlp.experts.down_proj").whole_shape(),
            (std::vector<std::uint64_t>{4, 5, 6}));
  EXPECT_EQ(down_bias.whole_shape(), (std::vector<std::uint64_t>{4, 6}));
  // Rows 1 of gate and of up, which are columns 2 and 3 of the file's matrix; their inputs 4.
  EXPECT_EQ(run_in_files(gate_up, 1 * 6 + 4).first, 3U * 60 + 4 * 10 + 2);
  EXPECT_EQ(run_in_files(gate_up, (5 + 1) * 6 + 4).first, 3U * 60 + 4 * 10 + 3);
  EXPECT_EQ(run_in_files(down_bias, 2).first, 3U * 6 + 2);
  for (const TensorSpec& tensor : expert.tensors) {
    EXPECT_EQ(tensor.first_element(), 3 * tensor.size) << tensor.name;
    std::vector<bool> seen(tensor.size);
    for (Elems at = 0; at < tensor.size; ++at) {
      const TensorRun there = run_in_files(tensor, at);
      EXPECT_FALSE(seen[there.first - tensor.first_element()]);
      seen[there.first - tensor.first_element()] = true;
      EXPECT_EQ(run_in_memory(tensor, there.first - tensor.first_element()).first, at);
    }
  }
  // Every token is multiplied by three matrices, the last of which is not computed again.
  EXPECT_EQ(expert.product_elements, 3U * 5 * 6);
  EXPECT_EQ(expert.last_product_elements, 5U * 6);
  EXPECT_EQ(expert.parameters, 3U * 5 * 6 + 2 * 5 + 6);
}

TEST(Initialize, NormsThatAddOneAreZeros) {
  ModelConfig c = default_config("gemma3");
  c.hidden_size = 32;
  c.num_heads = 2;
  c.num_layers = 1;
  c.intermediate_size = 64;
  const Architecture model = build_architecture(c);
  for (const char* const name :
       {"input_layernorm", "self_attn.q_norm", "post_feedforward_layernorm"}) {
    EXPECT_EQ(model.blocks[1].tensor(name + std::string(".weight")).init, Init::zeros) << name;
  }
  EXPECT_EQ(model.blocks[2].tensor("model.norm.weight").init, Init::zeros);
}

TEST(Initialize, NormsAreOnesAndBiasesZeros) {
  TensorSpec tensor = normal_tensor("a", 10);
  tensor.init = Init::ones;
  EXPECT_EQ(initial(tensor, 7), std::vector<float>(10, 1.0F));
  tensor.init = Init::zeros;
  EXPECT_EQ(initial(tensor, 7), std::vector<float>(10, 0.0F));
}

}  // namespace
}  // namespace ballast::model::architecture_test
