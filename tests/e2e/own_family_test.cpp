// A model family that only this test knows, with everything that a program needs to add one.
#include <gtest/gtest.h>

#include "src/model/compute/layer_makers.h"
#include "src/model/ops/device_ops.h"
#include "tests/support/temp_dir.h"
#include "tests/support/tiny_config.h"
#include "tests/support/tiny_training.h"

namespace ballast::model::own_family_test {
namespace {

/// out = in + attention(norm(in)) + mlp(norm(in)).
template <class Ops>
struct ParallelLayer final : Layer<Ops> {
  using T = typename Ops::Value;
  using Base = Layer<Ops>;
  using Base::ops_, Base::rows_, Base::wide_, Base::width_;
  const BlockSpec& b;  // every layer has the same tensors at the same offsets
  NormAt norm = find_norm(b, "norm");
  LinearAt qkv = find_linear(b, "qkv"), mix = find_linear(b, "mix");
  LinearAt up = find_linear(b, "up"), down = find_linear(b, "down");
  LayerMemory<T>& m = Base::memory_;
  ParallelLayer(const Architecture& model, const AttentionShape& shape, Ops& ops)
      : Base(model, shape, ops, {}), b(model.blocks[1]) {}
  void compute(const BlockWeights<T>& block, const T* in) override {
    ops_.norms->norm(block[norm], in, m.norm1, rows_);
    ops_.products->linear(block[qkv], m.norm1, m.qkv, qkv.out, rows_);
    Base::attend();
    ops_.products->linear_onto(block[mix], m.attention, in, m.middle, rows_);
    ops_.products->linear(block[up], m.norm1, m.hidden, wide_, rows_);
    ops_.elementwise->activate(Activation::gelu_tanh, m.hidden, m.activated, rows_ * wide_);
  }
  void project(const BlockWeights<T>& block, const T* /*in*/, T* out) override {
    ops_.products->linear_onto(block[down], m.activated, m.middle, out, rows_);
  }
  void differentiate(const BlockWeights<T>& block, const T* in, T* dy) override {
    ops_.products->linear_weight(block[down], m.activated, dy, width_, rows_);
    ops_.products->linear_input(block[down], dy, width_, m.activated, rows_);
    ops_.elementwise->activate_backward(Activation::gelu_tanh, m.hidden, m.activated,
                                        block[up].bias_gradient, rows_, wide_);
    ops_.products->linear_weight(block[up], m.norm1, m.activated, wide_, rows_);
    ops_.products->linear_input(block[up], m.activated, wide_, m.middle, rows_);
    ops_.products->linear_weight(block[mix], m.attention, dy, width_, rows_);
    ops_.products->linear_input(block[mix], dy, width_, m.gradient, rows_);
    Base::attend_backward();
    ops_.products->linear_weight(block[qkv], m.norm1, m.dqkv, qkv.out, rows_);
    ops_.products->linear_input(block[qkv], m.dqkv, qkv.out, m.middle, rows_, true);
    ops_.norms->norm_backward(block[norm], in, m.middle, dy, dy, rows_);
  }
};

/// RMSNorm, learned positions, GELU, and heads whose width is independent of hidden_size.
struct Parallel final : Family {
  template <class Ops>
  using LayerOf = ParallelLayer<Ops>;
  std::string_view name() const override { return "parallel"; }
  std::vector<DetailKey> details() const override { return {{"mlp_ratio", 3.0}}; }
  void complete(ModelConfig& c, const Refuse& /*refuse*/) const override {
    c.intermediate_size = static_cast<std::uint64_t>(c.number("mlp_ratio")) * c.hidden_size;
  }
  OuterTensors outer() const override { return {"tokens", "positions", "norm", false}; }
  BlockSpec layer(const ModelConfig& c, std::uint64_t index) const override {
    const auto h = c.hidden_size;
    const auto a = c.num_heads * c.head_dim;
    return BlockBuilder(BlockKind::layer, "layer", fmt::format("{}.", index))
        .add("norm.weight", {h}, Init::ones)
        .add("qkv.weight", {a + 2 * c.num_kv_heads * c.head_dim, h}, Init::normal, c.init_stddev)
        .attend(a)
        .add("mix.weight", {h, a}, Init::normal, c.init_stddev)
        .add("up.weight", {c.intermediate_size, h}, Init::normal, c.init_stddev)
        .add("up.bias", {c.intermediate_size}, Init::zeros)
        .add_last_product("down.weight", {h, c.intermediate_size}, c.init_stddev)
        .finish();
  }
};

const bool kRegistered = [] {
  register_family<Parallel, DeviceOps<float>, DeviceOps<Bf16>>();
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
