// Layers in forms that no built-in family has. Their gradients are derivatives, and what is kept or
// cut into chunks of rows changes no bit.

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "ballast/model/family.h"

#include "src/model/description/layer_spec.h"
#include "tests/unit/model/fixture.h"

namespace ballast::model::layer_forms_test {
namespace {

using test::dot;
using test::normals;

constexpr std::uint64_t kHidden = 24;

AttentionSpec attention(const std::string& prefix) {
  return {.heads = {4, 2, 8},
          .maps = HeadMaps{.maps = {{prefix + "q"}, {prefix + "k", true}, {prefix + "v"}}},
          .out = {prefix + "out", true}};
}
MlpSpec mlp() {
  return {.in = {{"gate"}, {"up", true}}, .out = {"down"}, .width = 40};
}
SublayerSpec with_factor(SublayerSpec sublayer, double factor) {
  sublayer.factor = factor;
  return sublayer;
}
NormSpec norm(const char* name) {
  return {.name = name};
}

/// Sublayers by the name of the form.
const std::map<std::string, std::vector<SublayerSpec>>& forms() {
  static const std::map<std::string, std::vector<SublayerSpec>> all = {
      {"mixer_alone", {{.before = norm("n"), .body = attention("")}}},
      {"mlp_alone", {{.before = norm("n"), .body = mlp()}}},
      {"one_norm",
       {{.before = norm("n"), .body = attention("")}, {.body = mlp(), .reads = Reads::same_norm}}},
      {"two_mixers_of_one_norm",
       {{.before = norm("n"), .body = attention("a.")},
        {.body = attention("b."), .reads = Reads::same_norm},
        {.before = norm("m"), .body = mlp()}}},
      {"mlp_first",
       {{.before = norm("n"), .body = mlp()}, {.before = norm("m"), .body = attention("")}}},
      {"layer_input",
       {{.before = norm("n"), .body = attention("")},
        {.before = norm("m"), .body = mlp(), .reads = Reads::layer_input}}},
      {"factors",
       {with_factor({.before = norm("n"), .body = attention("")}, 0.3),
        with_factor({.before = norm("m"), .body = mlp()}, 1.7)}},
      {"norms_around",
       {{.before = norm("n"), .body = attention(""), .after = norm("o")},
        {.before = norm("m"), .body = mlp(), .after = norm("p")}}}};
  return all;
}

class FormFamily final : public Family {
 public:
  explicit FormFamily(std::string name) : name_(std::move(name)) {}
  std::string_view name() const override { return name_; }
  void complete(ModelConfig& c, const Refuse& /*refuse*/) const override {
    c.intermediate_size = 40;
  }
  OuterSpec outer(const ModelConfig& /*config*/) const override {
    return {.tokens = "tokens", .norm = NormSpec{"norm"}};
  }
  LayerSpec layer(const ModelConfig& /*config*/, std::uint64_t index) const override {
    return {.prefix = fmt::format("{}.", index), .sublayers = forms().at(name_)};
  }

 private:
  std::string name_;
};

const bool kRegistered = [] {
  for (const auto& [name, sublayers] : forms()) add_family(std::make_unique<FormFamily>(name));
  return true;
}();

ModelConfig config_of(const std::string& form) {
  ModelConfig c;
  c.family = form;
  c.vocab_size = 61;
  c.hidden_size = kHidden;
  c.num_layers = 1;
  c.num_heads = 4;
  c.num_kv_heads = 2;
  c.head_dim = 8;
  c.max_sequence = 64;
  return c;
}

/// One layer of a form, with fp32 weights and inputs.
class FormRun {
 public:
  explicit FormRun(const std::string& form)
      : b_(config_of(form), DType::f32, {.sequences = 2, .length = 13}),
        block_(b_.architecture.first_layer()) {
    weights = b_.weights(block_);
    x = b_.activation_values(3);
    dy = b_.activation_values(4);
  }

  std::vector<double> forward(bool keeps = false) {
    kept_ = keeps ? b_.device->allocate(b_.compute->sizes().intermediates[block_], "kept")
                  : DeviceBytes();
    const DeviceBytes out = b_.activation();
    b_.kernels().layer_forward(*b_.stream, block_, b_.upload(weights), {}, b_.upload(x), out,
                               kept_);
    return b_.download(out);
  }
  double loss() { return dot(forward(), dy); }
  /// Returns the gradient of x; `of_weights`: that of the weights.
  std::vector<double> backward(std::vector<double>& of_weights) {
    const DeviceBytes gradient_of_x = b_.upload(dy);
    const DeviceView<float> sums = b_.gradient(std::vector<float>(weights.size()));
    b_.kernels().layer_backward(*b_.stream, block_, b_.upload(weights), {}, b_.upload(x),
                                gradient_of_x, sums, Accumulation::first, kept_);
    of_weights = b_.values(sums);
    return b_.download(gradient_of_x);
  }
  /// Calls change(element) for the elements of all tensors.
  template <class Change>
  void for_weights(const Change& change) const {
    for (const TensorSpec& tensor : b_.architecture.blocks[block_].tensors) {
      for (Elems i = 0; i < tensor.size; ++i) change(tensor.offset + i);
    }
  }

  std::vector<double> weights;
  std::vector<double> x;
  std::vector<double> dy;

 private:
  test::Bench b_;
  std::size_t block_;
  DeviceBytes kept_;
};

class LayerForms : public testing::TestWithParam<std::string> {};

TEST_P(LayerForms, GradientsAreDerivatives) {
  ASSERT_TRUE(kRegistered);
  FormRun run(GetParam());
  std::vector<double> dweights;
  const std::vector<double> dx = run.backward(dweights);
  const std::vector<double> along_x = normals(run.x.size(), 5);
  const std::vector<double> along = normals(run.weights.size(), 6, 0.2);
  double expected = dot(dx, along_x);
  run.for_weights([&](Elems at) { expected += dweights[at] * along[at]; });
  const auto at = [&](double step) {
    FormRun moved(GetParam());
    for (std::size_t i = 0; i < moved.x.size(); ++i) moved.x[i] += step * along_x[i];
    moved.for_weights([&](Elems i) { moved.weights[i] += step * along[i]; });
    return moved.loss();
  };
  constexpr double kStep = 2e-3;
  const double found =
      (8.0 * (at(kStep) - at(-kStep)) - (at(2 * kStep) - at(-2 * kStep))) / (12.0 * kStep);
  EXPECT_NEAR(expected, found, 1e-3 * std::abs(found) + 0.05);
  EXPECT_GT(std::abs(found), 1.0) << "the direction says nothing";
}

TEST_P(LayerForms, KeptArraysGiveTheSameBits) {
  FormRun run(GetParam());
  const std::vector<double> out = run.forward();
  std::vector<double> dweights;
  const std::vector<double> dx = run.backward(dweights);
  EXPECT_EQ(run.forward(true), out);
  std::vector<double> kept_dweights;
  EXPECT_EQ(run.backward(kept_dweights), dx);
  EXPECT_EQ(kept_dweights, dweights);
}

std::vector<std::string> names() {
  std::vector<std::string> all;
  for (const auto& [name, sublayers] : forms()) all.push_back(name);
  return all;
}
INSTANTIATE_TEST_SUITE_P(All, LayerForms, testing::ValuesIn(names()),
                         [](const auto& form) { return form.param; });

}  // namespace
}  // namespace ballast::model::layer_forms_test
