// Low-rank adapters of linear maps.
#include <algorithm>
#include <cmath>
#include <functional>
#include <ostream>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/core/error.h"
#include "ballast/model/architecture.h"
#include "ballast/model/compute.h"
#include "ballast/model/family.h"
#include "ballast/text/json.h"

#include "src/model/compute/factories.h"
#include "tests/support/expect_error.h"
#include "tests/unit/model/fixture.h"

namespace ballast::model::adapters_test {
namespace {

using test::Bench;
using Values = std::vector<double>;

void throw_error(std::string_view key, const std::string& rule) {
  throw Error(ErrorCategory::config, std::string(key) + ": " + rule);
}

Architecture adapted(const ModelConfig& config, const AdapterConfig& adapters) {
  Architecture model = build_architecture(config);
  adapt(model, adapters, throw_error);
  return model;
}

TEST(Adapters, AreTheTrainedTensorsOfTheirBlocks) {
  const Architecture plain = build_architecture(test::small_llama());
  const Architecture model = adapted(
      test::small_llama(),
      {.rank = 3, .targets = {"self_attn.q_proj", "down_proj"}, .modules_to_save = {"lm_head"}});
  std::set<std::string> trained;
  for (const TensorSpec& tensor : model.blocks[2].tensors) {
    EXPECT_EQ(tensor.frozen, tensor.offset >= model.blocks[2].trained_elements()) << tensor.name;
    if (!tensor.frozen) trained.insert(tensor.name);
  }
  const std::string q = "model.layers.1.self_attn.q_proj.lora_";
  const std::string down = "model.layers.1.mlp.down_proj.lora_";
  EXPECT_EQ(trained, (std::set<std::string>{q + "A.weight", q + "B.weight", down + "A.weight",
                                            down + "B.weight"}));
  const std::uint64_t h = plain.config.hidden_size;
  const std::uint64_t wide = plain.config.intermediate_size;
  EXPECT_EQ(model.blocks[2].tensor(down + "A.weight").shape, (std::vector<std::uint64_t>{3, wide}));
  EXPECT_EQ(model.blocks[2].tensor(down + "B.weight").shape, (std::vector<std::uint64_t>{h, 3}));
  EXPECT_FALSE(model.blocks[model.head()].tensor("lm_head.weight").frozen);
  EXPECT_TRUE(model.blocks[model.head()].tensor("model.norm.weight").frozen);
  EXPECT_EQ(model.parameters() - plain.parameters(), 2 * 3 * (2 * h + h + wide));
  // Products of one token: A and B, and A again in the backward pass.
  const auto more = static_cast<double>(3 * (2 * h + h + wide));
  EXPECT_EQ(model.forward_flops(2, 1, 1), plain.forward_flops(2, 1, 1) + 2.0 * more);
  const auto maps = static_cast<double>(plain.blocks[2].product_elements);
  EXPECT_EQ(model.frozen_flops(2, 1, 1), 2.0 * (maps - static_cast<double>(3 * (h + wide))));
  EXPECT_EQ(model.recomputed_flops(2, 1, 1) - plain.recomputed_flops(2, 1, 1),
            2.0 * static_cast<double>(3 * 2 * h));
}

/// The product with W again for the gradient of a magnitude, and the norms in each pass.
TEST(Adapters, WithMagnitudesComputeMore) {
  const AdapterConfig wanted = {.rank = 3, .targets = {"o_proj"}};
  AdapterConfig with = wanted;
  with.dora = true;
  const Architecture lora = adapted(test::small_llama(), wanted);
  const Architecture dora = adapted(test::small_llama(), with);
  const BlockSpec& block = dora.blocks[1];
  const TensorSpec& map = block.tensor("self_attn.o_proj.weight");
  const TensorSpec& m = block.tensor("self_attn.o_proj.lora_magnitude_vector");
  EXPECT_EQ(m.shape, std::vector<std::uint64_t>{map.shape[0]});
  EXPECT_EQ(&map_of_magnitudes(block, m), &map);
  EXPECT_FALSE(m.frozen);
  EXPECT_EQ(block.norm_elements, map.size);
  const auto norms = static_cast<double>(2 * 3 * (map.size + 3 * map.shape[1]));
  const auto again = static_cast<double>(2 * (map.size + 3 * map.shape[0]));
  EXPECT_EQ(dora.forward_flops(1, 1, 7) - lora.forward_flops(1, 1, 7), norms);
  EXPECT_EQ(lora.frozen_flops(1, 1, 7) - dora.frozen_flops(1, 1, 7), 7 * again - norms);
  EXPECT_NE(lora.adapters->description(), dora.adapters->description());
}

/// In files of GPT-NeoX, queries, keys and values of each head are adjacent.
TEST(Adapters, HaveTheRowsOfTheirMapsInTheSameOrder) {
  ModelConfig config = default_config("gpt_neox");
  config.hidden_size = 24;
  config.num_layers = 1;
  config.num_heads = 3;
  config.max_sequence = 8;
  const Architecture model = adapted(config, {.rank = 2, .targets = {"query_key_value"}});
  const BlockSpec& block = model.blocks[1];
  const TensorSpec& weight = block.tensor("attention.query_key_value.weight");
  const TensorSpec& b = block.tensor("attention.query_key_value.lora_B.weight");
  for (std::uint64_t row = 0; row < 72; ++row) {
    EXPECT_EQ(run_in_files(b, 2 * row).first / 2, run_in_files(weight, 24 * row).first / 24);
  }
  EXPECT_NE(run_in_files(b, 2 * 8).first, 2 * 8);
}

/// A layer with four experts and a shared one.
ModelConfig small_experts() {
  ModelConfig experts = default_config("qwen2_moe");
  experts.hidden_size = 32;
  experts.num_layers = 1;
  experts.num_heads = 2;
  experts.max_sequence = 8;
  experts.details["num_experts"] = text::Json(4);
  experts.details["num_experts_per_tok"] = text::Json(2);
  experts.details["moe_intermediate_size"] = text::Json(16);
  experts.details["shared_expert_intermediate_size"] = text::Json(16);
  return experts;
}

TEST(Adapters, OfAllMapsAreNamed) {
  const auto targets = [](const ModelConfig& config) {
    return adapted(config, {.targets = {"all-linear"}}).adapters->targets;
  };
  EXPECT_EQ(targets(test::small_gpt2()), (std::vector<std::string>{"c_attn", "c_proj", "c_fc"}));
  const ModelConfig experts = small_experts();
  EXPECT_EQ(targets(experts), (std::vector<std::string>{"q_proj", "k_proj", "v_proj", "o_proj"}));
  test::expect_error(ErrorCategory::config,
                     {"targets: 'shared_expert_gate' is the gate of a shared expert", "q_proj"},
                     [&] { adapted(experts, {.targets = {"shared_expert_gate"}}); });
}

TEST(Adapters, RefuseWrongTargets) {
  const auto refuses = [](const AdapterConfig& adapters,
                          std::initializer_list<std::string_view> parts) {
    test::expect_error(ErrorCategory::config, parts,
                       [&] { adapted(test::small_llama(), adapters); });
  };
  refuses({.targets = {}}, {"targets: missing", "q_proj, k_proj", "\"all-linear\""});
  refuses({.targets = {"q_prj"}},
          {"targets: 'q_prj' matches no linear map", "did you mean 'q_proj'"});
  refuses({.targets = {"proj"}}, {"'proj' matches no linear map"});
  refuses({.targets = {"all-linear", "q_proj"}}, {"'all-linear' matches no linear map"});
  refuses({.targets = {"input_layernorm"}}, {"'input_layernorm' is a norm", "modules_to_save"});
  refuses({.targets = {"embed_tokens"}}, {"'embed_tokens' is the embedding"});
  refuses({.targets = {"lm_head"}}, {"'lm_head' is the output matrix"});
  refuses({.targets = {"q_proj"}, .modules_to_save = {"lm_head", "k_prj"}},
          {"modules_to_save[1]: 'k_prj' matches", "did you mean 'k_proj'"});
  refuses({.targets = {"q_proj"}, .modules_to_save = {"*.1.*"}},
          {"modules_to_save: 'model.layers.1.self_attn.q_proj.weight'", "a target too"});
  ModelConfig tied = test::small_llama();
  tied.tie_embeddings = true;
  test::expect_error(
      ErrorCategory::config, {"modules_to_save: 'model.embed_tokens.weight' is the output matrix"},
      [&] { adapted(tied, {.targets = {"q_proj"}, .modules_to_save = {"embed_tokens"}}); });
  ModelConfig tiles = test::small_llama();
  tiles.layer_tiles = 2;
  test::expect_error(ErrorCategory::config, {"targets: ", "set model.layer_tiles to 1"},
                     [&] { adapted(tiles, {.targets = {"q_proj"}}); });
}

/// Kaiming's uniform numbers with a = sqrt(5), and zeros.
TEST(Adapters, BeginWithoutEffect) {
  const Architecture model = adapted(test::small_llama(), {.targets = {"q_proj"}});
  const TensorSpec& a = model.blocks[1].tensor("self_attn.q_proj.lora_A.weight");
  const TensorSpec& b = model.blocks[1].tensor("self_attn.q_proj.lora_B.weight");
  std::vector<float> values(a.size);
  initialize(a, 7, 0, values);
  const double bound = 1.0 / std::sqrt(static_cast<double>(a.shape[1]));
  double squares = 0.0;
  for (const float value : values) {
    EXPECT_LE(std::abs(value), bound);
    squares += static_cast<double>(value) * value;
  }
  EXPECT_NEAR(squares / static_cast<double>(a.size), bound * bound / 3.0, bound * bound / 20.0);
  std::vector<float> part(9);
  initialize(a, 7, 5, part);
  EXPECT_TRUE(std::equal(part.begin(), part.end(), values.begin() + 5));
  initialize(b, 7, 0, part);
  EXPECT_EQ(part, std::vector<float>(9, 0.0F));
}

TEST(Adapters, AreScaledByTheRankOrItsRoot) {
  const std::string map = "model.layers.1.mlp.up_proj";
  EXPECT_EQ((AdapterConfig{.rank = 4, .alpha = 6.0}).scale_of(map), 1.5);
  EXPECT_EQ((AdapterConfig{.rank = 4, .alpha = 6.0, .rslora = true}).scale_of(map), 3.0);
  AdapterConfig named = {.rank = 4, .alpha = 6.0};
  ASSERT_TRUE(named.rank_pattern.add("up_proj", 12.0));
  ASSERT_TRUE(named.rank_pattern.add(R"(layers\.1\..*)", 2.0));
  ASSERT_TRUE(named.alpha_pattern.add("mlp.*", 9.0));
  EXPECT_EQ(named.rank_of(map), 12U);  // the first that matches
  EXPECT_EQ(named.scale_of(map), 0.75);
  EXPECT_EQ(named.rank_of("model.layers.1.mlp.gate_up_proj"), 2U);
  EXPECT_EQ(named.scale_of("model.layers.10.self_attn.q_proj"), 1.5);
}

constexpr std::size_t kThreads = 2;
constexpr MicroBatchShape kShape = {5, 11};
constexpr std::uint64_t kRank = 3;
constexpr double kAlpha = 2.0;

struct Case {
  const char* family;
  bool joins = false;
  std::vector<std::string> targets = {"all-linear"};
  bool dora = false;  ///< instead of dropout
};

std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << c.family << (c.joins ? "_joined" : "") << c.targets.size()
             << (c.dora ? "_dora" : "");
}

/// The layer has a short convolution, with biases.
void set_convolution(ModelConfig& config) {
  config.details["full_attn_idxs"] = text::Json::array();
  config.details["conv_bias"] = true;
  config.details["block_multiple_of"] = std::uint64_t{8};
}

/// The layer has a gated delta net or, if the map of queries is a target, gated attention.
void set_mixer(ModelConfig& config, const Case& c) {
  const bool attends = c.targets.front() == "q_proj";
  config.details["full_attention_interval"] = std::uint64_t{attends ? 1U : 4U};
  config.details["linear_num_key_heads"] = std::uint64_t{2};
  config.details["linear_num_value_heads"] = std::uint64_t{4};
  config.details["linear_key_head_dim"] = std::uint64_t{10};
  config.details["linear_value_head_dim"] = std::uint64_t{6};
  if (config.family != "qwen3_next") return;
  config.details["num_experts"] = std::uint64_t{16};
  config.details["mlp_only_layers"] = text::parse_json("[0]", "mlp_only_layers");
}

Bench make(const Case& c) {
  ModelConfig config = default_config(c.family);
  config.vocab_size = 61;
  config.hidden_size = 32;
  config.num_layers = 1;
  config.num_heads = 2;
  config.num_kv_heads = 2;
  config.head_dim = 16;
  config.intermediate_size = 80;
  config.max_sequence = kShape.length;
  if (std::string_view(c.family) == "deepseek_v3") {
    config.details["q_lora_rank"] = std::uint64_t{12};
    config.details["kv_lora_rank"] = std::uint64_t{10};
    config.details["qk_nope_head_dim"] = std::uint64_t{10};
    config.details["qk_rope_head_dim"] = std::uint64_t{6};
    config.details["v_head_dim"] = std::uint64_t{12};
  }
  if (config.details.contains("linear_num_key_heads")) set_mixer(config, c);
  if (config.family == "lfm2") set_convolution(config);
  Bench bench(config, DType::f32, kShape, kThreads);
  adapt(bench.architecture,
        {.rank = kRank,
         .alpha = kAlpha,
         .dropout = c.dora ? 0.0 : 0.3,
         .dora = c.dora,
         .targets = c.targets},
        throw_error);
  // The MLP is in several chunks.
  bench.compute = host::make_host_compute(bench.architecture, DType::f32, kShape, kThreads,
                                          {.bytes = 12 * kKiB, .joins_gate_and_up = c.joins});
  const Bytes workspace = bench.compute->sizes().workspace;
  bench.compute->set_workspace(bench.device->allocate(workspace, "another workspace"));
  return bench;
}

void move(Values& values, std::size_t first, const Values& direction, double by) {
  for (std::size_t i = 0; i < direction.size(); ++i) values[first + i] += by * direction[i];
}

double dot(const Values& a, std::size_t first, const Values& direction) {
  double sum = 0.0;
  for (std::size_t i = 0; i < direction.size(); ++i) sum += a[first + i] * direction[i];
  return sum;
}

/// The tensors of an adapted matrix.
struct Adapted {
  const TensorSpec* map;
  const TensorSpec* a;
  const TensorSpec* b;
  const TensorSpec* magnitudes;  ///< null: without DoRA
  bool input_first;

  /// Where element (i, j) of W is.
  [[nodiscard]] std::size_t at(std::uint64_t i, std::uint64_t j) const {
    return map->offset + (input_first ? j * b->shape[0] + i : i * a->shape[1] + j);
  }
  /// Row i of W + s B A.
  [[nodiscard]] Values row(const Values& weights, std::uint64_t i) const {
    Values sums(a->shape[1]);
    for (std::uint64_t j = 0; j < sums.size(); ++j) {
      sums[j] = weights[at(i, j)];
      for (std::uint64_t k = 0; k < kRank; ++k) {
        sums[j] += kAlpha / kRank * weights[b->offset + i * kRank + k] *
                   weights[a->offset + k * sums.size() + j];
      }
    }
    return sums;
  }
  /// Changes the magnitudes so that the scales equal those with the norms of other weights.
  void keep_gains(Values& weights, const Values& other) const {
    for (std::uint64_t i = 0; magnitudes != nullptr && i < b->shape[0]; ++i) {
      const Values here = row(weights, i);
      const Values there = row(other, i);
      weights[magnitudes->offset + i] *= std::sqrt(dot(here, 0, here) / dot(there, 0, there));
    }
  }
};

class AdapterPasses : public testing::TestWithParam<Case> {
 protected:
  static constexpr Dropout kDropout = {true, 17};

  AdapterPasses()
      : bench(make(GetParam())),
        weights(bench.weights(1)),
        x(bench.activation_values(9)),
        dy(bench.activation_values(10)) {}

  Values forward(const Values& with, const Values& in, Dropout dropout) {
    const DeviceBytes out = bench.activation();
    bench.kernels().layer_forward(*bench.stream, 1, bench.upload(with), {}, bench.upload(in), out,
                                  {}, dropout);
    return bench.download(out);
  }
  /// Gradients of the trained weights, then of the input.
  std::pair<Values, Values> backward(bool keep) {
    const Elems trained = bench.architecture.blocks[1].trained_elements();
    const auto gradient = bench.gradient(std::vector<float>(trained, 0.0F));
    const DeviceBytes kept =
        keep ? bench.device->allocate(bench.compute->sizes().intermediates[1], "intermediates")
             : DeviceBytes();
    const DeviceBytes flow = bench.upload(dy);
    const DeviceBytes in = bench.upload(x);
    const DeviceBytes block = bench.upload(weights);
    if (keep) {
      bench.kernels().layer_forward(*bench.stream, 1, block, {}, in, bench.activation(), kept,
                                    kDropout);
    }
    bench.kernels().layer_backward(*bench.stream, 1, block, {}, in, flow, gradient,
                                   Accumulation::first, kept, kDropout);
    bench.stream->synchronize();
    return {bench.values(gradient), bench.download(flow)};
  }
  /// (L(to) - L(from)) / 2 with L = dy . y.
  double difference(const Values& from, const Values& to, const Values& x_from,
                    const Values& x_to) {
    const Values low = forward(from, x_from, kDropout);
    const Values high = forward(to, x_to, kDropout);
    double sum = 0.0;
    for (std::size_t i = 0; i < dy.size(); ++i) sum += dy[i] * (high[i] - low[i]);
    return sum / 2.0;
  }

  [[nodiscard]] std::vector<Adapted> adapted_maps() const {
    const BlockSpec& block = bench.architecture.blocks[1];
    std::vector<Adapted> found;
    for (const TensorSpec& a : block.tensors) {
      if (!a.name.ends_with(".lora_A.weight")) continue;
      const std::string module = a.name.substr(0, a.name.rfind(".lora_A"));
      found.push_back({&block.tensor(module + ".weight"), &a,
                       &block.tensor(module + ".lora_B.weight"),
                       block.find(module + ".lora_magnitude_vector"),
                       bench.architecture.adapters->input_first});
    }
    return found;
  }

  Bench bench;
  Values weights;
  Values x;
  Values dy;
};

/// The mask is the same in both passes, and every adapter gets its gradients. Norms are constants
/// in them.
TEST_P(AdapterPasses, GradientsEqualFiniteDifferences) {
  constexpr double kStep = 3e-3;
  constexpr double kRounding = 5e-4;  // that of fp32 results over the step
  const auto [gradient, dx] = backward(false);
  std::size_t adapters = 0;
  for (const TensorSpec& tensor : bench.architecture.blocks[1].tensors) {
    if (tensor.frozen) continue;
    ++adapters;
    // Along the gradient, where the difference is large relative to the rounding.
    Values direction(gradient.begin() + static_cast<std::ptrdiff_t>(tensor.offset),
                     gradient.begin() + static_cast<std::ptrdiff_t>(tensor.offset + tensor.size));
    const double norm = std::sqrt(dot(direction, 0, direction));
    ASSERT_GT(norm, 0.0) << tensor.name;
    for (double& value : direction) value /= norm;
    Values low = weights;
    Values high = weights;
    move(low, tensor.offset, direction, -kStep);
    move(high, tensor.offset, direction, kStep);
    for (const Adapted& adapted : adapted_maps()) {
      adapted.keep_gains(low, weights);
      adapted.keep_gains(high, weights);
    }
    EXPECT_NEAR(difference(low, high, x, x) / kStep, norm, std::max(0.01 * norm, kRounding))
        << tensor.name;
  }
  EXPECT_GE(adapters, (GetParam().dora ? 3 : 2) * GetParam().targets.size());
  const double norm = std::sqrt(dot(dx, 0, dx));
  Values direction = dx;
  for (double& value : direction) value /= norm;
  Values low = x;
  Values high = x;
  move(low, 0, direction, -kStep);
  move(high, 0, direction, kStep);
  EXPECT_NEAR(difference(weights, weights, low, high) / kStep, norm, 0.01 * norm);
}

TEST_P(AdapterPasses, HaveTheSameBitsWhetherIntermediatesAreKeptOrNot) {
  EXPECT_EQ(backward(true), backward(false));
}

/// Compares with a pass without adapters over matrices into which they are merged.
TEST_P(AdapterPasses, EqualTheMergedMaps) {
  Values merged = weights;
  for (const Adapted& adapted : adapted_maps()) {
    for (std::uint64_t i = 0; i < adapted.b->shape[0]; ++i) {
      const Values row = adapted.row(weights, i);
      const double norm = std::sqrt(dot(row, 0, row));
      const TensorSpec* const m = adapted.magnitudes;
      const double gain = m == nullptr ? 1.0 : weights[m->offset + i] / norm;
      for (std::uint64_t j = 0; j < row.size(); ++j) merged[adapted.at(i, j)] = gain * row[j];
      if (m != nullptr) merged[m->offset + i] = std::abs(gain) * norm;
    }
    for (std::uint64_t k = 0; k < adapted.b->size; ++k) merged[adapted.b->offset + k] = 0.0;
  }
  EXPECT_LT(test::relative_error(forward(weights, x, {}), forward(merged, x, {})), 2e-6);
}

class AdapterDropout : public AdapterPasses {};

TEST_P(AdapterDropout, DropOtherElementsInEachMicroBatchAndNoneInAnEvaluation) {
  const Values one = forward(weights, x, kDropout);
  EXPECT_EQ(forward(weights, x, kDropout), one);
  EXPECT_NE(forward(weights, x, {true, 18}), one);
  const Values all = forward(weights, x, {});
  EXPECT_NE(all, one);
  // The mean does not change.
  Values mean(all.size(), 0.0);
  constexpr std::uint64_t kDraws = 30;
  for (std::uint64_t key = 0; key < kDraws; ++key) {
    const Values drawn = forward(weights, x, {true, key});
    for (std::size_t i = 0; i < mean.size(); ++i) mean[i] += drawn[i] / kDraws;
  }
  EXPECT_LT(test::relative_error(mean, all), 0.5 * test::relative_error(one, all));
}

const std::vector<Case> kCases = {{"llama"},
                                  {"llama", true},
                                  {"llama", true, {"k_proj", "up_proj"}},
                                  {"gpt2"},
                                  {"gpt_neox"},
                                  {"olmo2"},
                                  {"phi3"},
                                  {"deepseek_v3"},
                                  {"qwen3_5"},
                                  {"qwen3_5", false, {"q_proj", "k_proj"}},
                                  {"qwen3_next"},
                                  {"lfm2"},
                                  {"lfm2", true, {"in_proj", "w1"}},
                                  {"muse_glimmer"},
                                  {"muse_glimmer", false, {"gate_proj", "k_proj"}}};
INSTANTIATE_TEST_SUITE_P(Families, AdapterPasses, testing::ValuesIn(kCases),
                         testing::PrintToStringParamName());
INSTANTIATE_TEST_SUITE_P(Families, AdapterDropout, testing::ValuesIn(kCases),
                         testing::PrintToStringParamName());

/// Biases, some parts of a fused matrix with adapters and some without, and gate and up as one
/// part.
INSTANTIATE_TEST_SUITE_P(Dora, AdapterPasses,
                         testing::Values(Case{"llama", true, {"k_proj", "up_proj"}, true},
                                         Case{"gpt2", false, {"all-linear"}, true},
                                         Case{"olmo2", false, {"all-linear"}, true},
                                         Case{"deepseek_v3", false, {"all-linear"}, true},
                                         Case{"phi3", false, {"all-linear"}, true},
                                         Case{"qwen3_5", false, {"all-linear"}, true},
                                         Case{"lfm2", false, {"all-linear"}, true}),
                         testing::PrintToStringParamName());

}  // namespace
}  // namespace ballast::model::adapters_test
