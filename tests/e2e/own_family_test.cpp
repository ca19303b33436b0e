// A model family that only this test knows, with everything that a program needs to add one.
#include <gtest/gtest.h>

#include "src/model/description/layer_spec.h"
#include "tests/support/temp_dir.h"
#include "tests/support/tiny_config.h"
#include "tests/support/tiny_training.h"

namespace ballast::model::own_family_test {
namespace {

/// RMSNorm, learned positions, GELU, and heads whose width is independent of hidden_size. Attention
/// and MLP read the result of one norm: out = in + attention(norm(in)) + mlp(norm(in)).
struct Parallel final : Family {
  std::string_view name() const override { return "parallel"; }
  std::vector<DetailKey> details() const override { return {{"mlp_ratio", 3.0}}; }
  void complete(ModelConfig& c, const Refuse& /*refuse*/) const override {
    c.intermediate_size = static_cast<std::uint64_t>(c.number("mlp_ratio")) * c.hidden_size;
  }
  OuterSpec outer(const ModelConfig& /*config*/) const override {
    return {.tokens = "tokens", .positions = "positions", .norm = NormSpec{"norm"}};
  }
  LayerSpec layer(const ModelConfig& c, std::uint64_t index) const override {
    AttentionSpec attention = {.heads = {c.num_heads, c.num_kv_heads, c.head_dim},
                               .maps = HeadMaps{.maps = {{"qkv"}}},
                               .out = {"mix"}};
    MlpSpec mlp = {.in = {{"up", true}},
                   .out = {"down"},
                   .width = c.intermediate_size,
                   .gated = false,
                   .activation = Activation::gelu_tanh};
    return {.prefix = fmt::format("{}.", index),
            .sublayers = {{.before = NormSpec{"norm"}, .body = std::move(attention)},
                          {.body = std::move(mlp), .reads = Reads::same_norm}}};
  }
};

const bool kRegistered = [] {
  add_family(std::make_unique<const Parallel>());
  return true;
}();

const std::string kModel = R"("family": "parallel", "vocab_size": 131, "hidden_size": 64,
                              "num_layers": 2, "num_heads": 3, "num_kv_heads": 1, "head_dim": 24)";

test::Outcome train(bool bf16, const std::vector<std::string>& overrides) {
  const test::TempDir directory;
  return test::train(test::tiny_config(kModel, bf16, directory.path(), overrides), 20,
                     test::chained_ids);
}

TEST(OwnFamily, LearnsTheSameInEveryPlacement) {
  ASSERT_TRUE(kRegistered);
  for (const bool bf16 : {true, false}) {
    const test::Outcome expected = train(bf16, {"ballast.serial=true", "ballast.recompute=true"});
    EXPECT_LT(expected.losses.back(), 0.8 * expected.losses.front());
    test::expect_same(train(bf16, {"ballast.recompute=false"}), expected, "kept");
    test::expect_same(
        train(bf16, {"zero_optimization.offload_optimizer.device=nvme",
                     "zero_optimization.offload_param.device=cpu", "ballast.activations=host"}),
        expected, "swapped");
  }
}

TEST(OwnFamily, HasItsOwnKeysAndRules) {
  const auto parse = [](const std::string& override) {
    return test::tiny_config(kModel, true, "/tmp", {override}).model;
  };
  EXPECT_EQ(parse("model.mlp_ratio=2").intermediate_size, 128U);
  EXPECT_THROW(parse("model.mlp_ratio=0"), Error);
  EXPECT_THROW(parse("model.family=parallell"), Error);
}

TEST(OwnFamily, CountsTheFlopsOfItsOwnTensors) {
  const Architecture model = build_architecture(test::tiny_config(kModel, true, "/tmp").model);
  const double weights = 64.0 * (5 * 24 + 3 * 24 + 2 * 192);
  EXPECT_EQ(model.forward_flops(1, 2, 10), 2.0 * 20 * weights + 2.0 * 20 * 10 * 72);
  EXPECT_EQ(model.recomputed_flops(1, 2, 10), model.forward_flops(1, 2, 10) - 2.0 * 20 * 64 * 192);
}

}  // namespace
}  // namespace ballast::model::own_family_test
