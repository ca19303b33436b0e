#include <cmath>

#include <gtest/gtest.h>

#include "states.h"

namespace ballast::cpu_adam {
namespace {

using test::hyper_at;
using test::States;
using test::ulp;

struct Exact {
  double weight, update, first, second;
};

/// The update in double, from the coefficients as floats and from the moments that the kernel
/// wrote.
Exact exact_update(const AdamW& hyper, double p, double m, double v, double g, double new_first,
                   double new_second) {
  const auto rounded = [](double x) { return static_cast<double>(static_cast<float>(x)); };
  const auto step = static_cast<double>(hyper.step);
  g = rounded(g * static_cast<double>(hyper.gradient_scale));
  Exact result{};
  result.first = m + rounded(1.0 - hyper.beta1) * (g - m);
  result.second = v * rounded(hyper.beta2) + rounded(1.0 - hyper.beta2) * g * g;
  const double denominator =
      std::sqrt(new_second) / rounded(std::sqrt(1.0 - std::pow(hyper.beta2, step))) +
      rounded(hyper.epsilon);
  result.update =
      rounded(hyper.learning_rate / (1.0 - std::pow(hyper.beta1, step))) * new_first / denominator;
  result.weight = p * rounded(1.0 - hyper.learning_rate * hyper.weight_decay) - result.update;
  return result;
}

// Bounds, in ulps (u = half of one is the error of one rounding): the first moment has the
// difference (at most twice the larger operand, times the small coefficient) and the sum: 1; the
// second moment two products and the sum: 2; the update two products or quotients, the root and the
// sum, 4 halves with the last quotient: 3; the weight adds its product and its sum: 1.
TEST(Reference, ScalarKernelStaysWithinTheBoundsOfItsRoundings) {
  const Updater updater(1, Isa::scalar);
  States states(20'000, 7);
  for (std::int64_t step = 1; step <= 20; ++step) {
    const AdamW hyper = hyper_at(step);
    const States before = states;
    updater.step(hyper, states.plain());
    for (std::size_t i = 0; i < states.size; ++i) {
      const double m = before.first[i];
      const double g = before.gradient[i];
      const Exact exact = exact_update(hyper, before.master[i], m, before.second[i], g,
                                       states.first[i], states.second[i]);
      ASSERT_NEAR(states.first[i], exact.first, ulp(std::fmax(std::fabs(m), std::fabs(g))));
      ASSERT_NEAR(states.second[i], exact.second, 2 * ulp(exact.second));
      const double larger = std::fmax(std::fabs(double{before.master[i]}), std::fabs(exact.weight));
      ASSERT_NEAR(states.master[i], exact.weight, ulp(larger) + 3 * ulp(exact.update));
    }
  }
}

TEST(Reference, SplitMasterIsUpdatedAsThePlainOne) {
  const Updater updater(1, Isa::scalar);
  States split(5'000, 8);
  for (std::size_t i = 0; i < split.gradient.size(); ++i) {
    split.gradient[i] = to_float(split.gradient16[i]);
  }
  States plain = split;
  for (std::int64_t step = 1; step <= 20; ++step) {
    updater.step(hyper_at(step), split.split());
    updater.step(hyper_at(step), plain.plain());
    for (std::size_t i = 0; i < split.size; ++i) {
      const SplitMaster expected = split_master(plain.master[i]);
      ASSERT_EQ(split.weight[i], expected.weight) << "step " << step << ", element " << i;
      ASSERT_EQ(split.remainder[i], expected.remainder) << "step " << step << ", element " << i;
    }
    EXPECT_EQ(split.first, plain.first);
    EXPECT_EQ(split.second, plain.second);
  }
}

TEST(Reference, EveryWeightJoinsAndSplitsAsInCore) {
  const Updater updater;
  AdamW hyper;
  hyper.learning_rate = 0.0;
  States states(0, 0);
  for (std::uint32_t weight = 0; weight < 0x10000U; ++weight) {
    for (const std::uint32_t low : {0x0000U, 0x0001U, 0x7fffU, 0x8000U, 0xffffU}) {
      states.add(0.0F, 0.0F, 0.0F, 1.0F);
      states.weight.back() = Bf16{static_cast<std::uint16_t>(weight)};
      states.remainder.back() = static_cast<std::uint16_t>(low);
    }
  }
  states.size = states.weight.size();
  const States before = states;
  updater.step(hyper, states.split());
  for (std::size_t i = 0; i < before.weight.size(); ++i) {
    const float master = join_master({before.weight[i], before.remainder[i]});
    const SplitMaster expected = split_master(master - 0.0F);
    if (std::isnan(master)) {
      ASSERT_TRUE(test::is_nan(states.weight[i])) << "pattern " << before.weight[i].bits;
      continue;
    }
    ASSERT_EQ(states.weight[i], expected.weight) << "pattern " << before.weight[i].bits;
    ASSERT_EQ(states.remainder[i], expected.remainder) << "pattern " << before.weight[i].bits;
  }
}

}  // namespace
}  // namespace ballast::cpu_adam
