#include <cmath>
#include <limits>

#include <gtest/gtest.h>

#include "states.h"

namespace ballast::cpu_adam::reference_test {
namespace {

using test::describe;
using test::hyper_at;
using test::Layout;
using test::Numbers;
using test::States;

/// The algorithms as in their papers, in double; shares no code with the library.
struct Textbook {
  double weight, first, second;
};

Textbook adam_by_the_paper(const Hyper& h, double p, double m, double v, double g) {
  const bool decoupled = h.optimizer == Optimizer::adamw;
  const auto t = static_cast<double>(h.step);
  if (!decoupled) g += h.weight_decay * p;
  m = h.beta1 * m + (1.0 - h.beta1) * g;
  v = h.beta2 * v + (1.0 - h.beta2) * g * g;
  const double m_hat = m / (1.0 - std::pow(h.beta1, t));
  const double v_hat = v / (1.0 - std::pow(h.beta2, t));
  const double decay = decoupled ? h.weight_decay * p : 0.0;
  return {p - h.learning_rate * (m_hat / (std::sqrt(v_hat) + h.epsilon) + decay), m, v};
}

Textbook adagrad_by_the_paper(const Hyper& h, double p, double v, double g) {
  g += h.weight_decay * p;
  v += g * g;
  return {p - h.learning_rate * g / (std::sqrt(v) + h.epsilon), 0.0, v};
}

Textbook lion_by_the_paper(const Hyper& h, double p, double m, double g) {
  const double u = h.beta1 * m + (1.0 - h.beta1) * g;
  const double sign = u > 0.0 ? 1.0 : u < 0.0 ? -1.0 : 0.0;
  p -= h.learning_rate * (sign + h.weight_decay * p);
  return {p, h.beta2 * m + (1.0 - h.beta2) * g, 0.0};
}

Textbook sgd_by_the_paper(const Hyper& h, double p, double m, double g) {
  g += h.weight_decay * p;
  m = h.momentum * m + g;
  return {p - h.learning_rate * (h.nesterov ? g + h.momentum * m : m), m, 0.0};
}

/// The form of torch.optim.Adamax.
Textbook adamax_by_the_paper(const Hyper& h, double p, double m, double v, double g) {
  g += h.weight_decay * p;
  m = h.beta1 * m + (1.0 - h.beta1) * g;
  v = std::fmax(h.beta2 * v, std::fabs(g) + h.epsilon);
  const double rate = h.learning_rate / (1.0 - std::pow(h.beta1, static_cast<double>(h.step)));
  return {p - rate * m / v, m, v};
}

Textbook by_the_paper(const Hyper& h, const Element& e) {
  const double g = double{e.gradient} * double{h.gradient_scale};
  switch (h.optimizer) {
    case Optimizer::adagrad:
      return adagrad_by_the_paper(h, e.weight, e.second, g);
    case Optimizer::lion:
      return lion_by_the_paper(h, e.weight, e.first, g);
    case Optimizer::sgd:
      return sgd_by_the_paper(h, e.weight, e.first, g);
    case Optimizer::adamax:
      return adamax_by_the_paper(h, e.weight, e.first, e.second, g);
    case Optimizer::adamw:
    case Optimizer::adam:
      return adam_by_the_paper(h, e.weight, e.first, e.second, g);
  }
  return {};
}

Element as_floats(const Textbook& exact, float gradient) {
  return {static_cast<float>(exact.weight), static_cast<float>(exact.first),
          static_cast<float>(exact.second), gradient};
}

Element random_element(Numbers& numbers) {
  return {numbers.any(-20, 6), numbers.any(-20, 6), std::fabs(numbers.any(-40, 12)),
          numbers.any(-20, 6)};
}

double error_of(const Hyper& hyper, const Element& before, const Element& after) {
  return reference_error(hyper, Moments::Format::f32, before, after);
}

TEST(Reference, AcceptsTheAlgorithmsOfThePapers) {
  for (const auto optimizer : test::kOptimizers) {
    Numbers numbers(1);
    for (std::int64_t i = 0; i < 20'000; ++i) {
      const Hyper hyper = hyper_at(optimizer, i % 50 + 1);
      const Element before = random_element(numbers);
      const Element after = as_floats(by_the_paper(hyper, before), before.gradient);
      ASSERT_LE(error_of(hyper, before, after), 1.0) << to_string(optimizer) << ' ' << i;
    }
  }
}

TEST(Reference, RejectsAResultThatIsAFewUlpsOff) {
  Numbers numbers(2);
  for (const auto optimizer : test::kOptimizers) {
    int rejected_weights = 0;
    for (std::int64_t i = 0; i < 1'000; ++i) {
      const Hyper hyper = hyper_at(optimizer, 10);
      Element before = random_element(numbers);
      // No cancellation, and the weight is larger than its update.
      before.weight = 1.0F + std::fabs(before.weight);
      before.first = std::fabs(before.first);
      before.second += 1.0F;
      before.gradient = std::fabs(before.gradient);
      Element after = as_floats(by_the_paper(hyper, before), before.gradient);
      const Element right = after;
      const auto off = [](float value, int ulps) {
        return std::bit_cast<float>(std::bit_cast<std::uint32_t>(value) +
                                    static_cast<std::uint32_t>(ulps));
      };
      after.weight = off(right.weight, 6);
      rejected_weights += error_of(hyper, before, after) > 1.0 ? 1 : 0;
      after = right;
      if (has_first_moment(optimizer)) {
        after.first = off(right.first, 16);
        ASSERT_GT(error_of(hyper, before, after), 1.0) << to_string(optimizer);
        after = right;
      }
      if (has_second_moment(optimizer)) {
        after.second = off(right.second, 16);
        ASSERT_GT(error_of(hyper, before, after), 1.0) << to_string(optimizer);
      }
    }
    EXPECT_GT(rejected_weights, 900) << to_string(optimizer);
  }
}

TEST(Reference, EveryTermOfTheHyperParametersCounts) {
  const Element before{0.7F, 0.02F, 0.003F, -0.4F};
  for (const auto optimizer : test::kOptimizers) {
    const Hyper hyper = hyper_at(optimizer, 3);
    const Element after = as_floats(by_the_paper(hyper, before), before.gradient);
    ASSERT_LE(error_of(hyper, before, after), 1.0);
    const bool has_betas = !row_of(optimizer).meaning_of("betas").empty();
    // Lion only uses the sign of what beta1 interpolates.
    const bool corrects_bias = has_betas && optimizer != Optimizer::lion;
    const auto expect_rejected = [&](const Hyper& other, const char* what) {
      EXPECT_GT(error_of(other, before, after), 1.0) << to_string(optimizer) << ", " << what;
    };
    Hyper other = hyper;
    other.learning_rate *= 1.001;
    expect_rejected(other, "learning rate");
    other = hyper;
    other.weight_decay *= 1.01;
    expect_rejected(other, "weight decay");
    other = hyper;
    other.gradient_scale *= 1.001F;
    expect_rejected(other, "gradient scale");
    other = hyper;
    other.beta1 *= 1.001;
    if (corrects_bias) expect_rejected(other, "beta1");
    other = hyper;
    other.beta2 *= 1.001;
    if (has_betas) {
      Element decays = before;
      decays.second = 3.0F;  // larger than the gradient, for Adamax
      const Element decayed = as_floats(by_the_paper(hyper, decays), decays.gradient);
      EXPECT_GT(error_of(other, decays, decayed), 1.0) << to_string(optimizer) << ", beta2";
    }
    other = hyper;
    other.epsilon = 1e-2;
    if (has_second_moment(optimizer)) expect_rejected(other, "epsilon");
    other = hyper;
    other.momentum *= 1.001;
    if (optimizer == Optimizer::sgd) expect_rejected(other, "momentum");
    other = hyper;
    other.nesterov = !hyper.nesterov;
    if (optimizer == Optimizer::sgd) expect_rejected(other, "nesterov");
    other = hyper;
    other.step += 1;
    if (corrects_bias) expect_rejected(other, "step");
  }
}

TEST(Reference, LionsSignIsFreeOnlyWhereRoundingDecidesIt) {
  Hyper hyper{.optimizer = Optimizer::lion, .learning_rate = 0.01, .beta1 = 0.9};
  // beta1 * m + (1 - beta1) * g is zero except for rounding.
  const Element undecided{1.0F, 0.1F, 0.0F, -0.9F};
  const Element decided{1.0F, 0.1F, 0.0F, -0.89F};
  for (const Element& before : {undecided, decided}) {
    for (const double sign : {-1.0, 1.0}) {
      Textbook exact = lion_by_the_paper(hyper, 1.0, before.first, before.gradient);
      exact.weight = 1.0 - 0.01 * sign;
      const double error = error_of(hyper, before, as_floats(exact, before.gradient));
      const bool accepted = error <= 1.0;
      EXPECT_EQ(accepted, sign > 0.0 || before.gradient == undecided.gradient);
    }
  }
  // Nothing is rounded, so the sign of zero is zero.
  const Element zero{1.0F, 0.0F, 0.0F, 0.0F};
  EXPECT_LE(error_of(hyper, zero, zero), 1.0);
  EXPECT_GT(error_of(hyper, zero, {0.99F, 0.0F, 0.0F, 0.0F}), 1.0);
}

TEST(Reference, IsNanWhereOnlyOneSideIsFinite) {
  const Element before{0.7F, 0.02F, 0.003F, -0.4F};
  for (const auto optimizer : test::kOptimizers) {
    const Hyper hyper = hyper_at(optimizer, 3);
    Element after = as_floats(by_the_paper(hyper, before), before.gradient);
    after.weight = std::numeric_limits<float>::infinity();
    EXPECT_TRUE(std::isnan(error_of(hyper, before, after)));
    after = as_floats(by_the_paper(hyper, before), before.gradient);
    (has_first_moment(optimizer) ? after.first : after.second) = NAN;
    EXPECT_TRUE(std::isnan(error_of(hyper, before, after)));
    Element poisoned = before;
    poisoned.gradient = NAN;
    const Element finite = as_floats(by_the_paper(hyper, before), NAN);
    EXPECT_TRUE(std::isnan(error_of(hyper, poisoned, finite)));
    const Element all_nan{NAN, NAN, NAN, NAN};
    EXPECT_EQ(error_of(hyper, poisoned, all_nan), 0.0);
  }
}

/// The largest error of `steps` updates of random states.
double worst_error(const Updater& updater, const Layout& layout, std::size_t size, int steps) {
  States states = States::random(layout, size, 7);
  Numbers numbers(8);
  double worst = 0.0;
  for (int step = 1; step <= steps; ++step) {
    const Hyper hyper = hyper_at(layout.optimizer, step);
    for (std::size_t i = 0; i < size; ++i) states.set_gradient(i, numbers.any(-14, 4));
    const States before = states;
    updater.step(hyper, states.shard());
    for (std::size_t i = 0; i < size; ++i) {
      const double error =
          reference_error(hyper, layout.moments, before.element(i), states.element(i));
      if (std::isnan(error)) return error;
      worst = std::fmax(worst, error);
    }
  }
  return worst;
}

TEST(Reference, EveryKernelStaysWithinTheBoundsInEveryLayout) {
  for (const Isa isa : available()) {
    const Updater updater({.threads = 1, .isa = isa});
    for (const Layout& layout : test::all_layouts()) {
      const double worst = worst_error(updater, layout, 300, 20);
      EXPECT_LE(worst, 1.0) << to_string(isa) << ": " << describe(layout);
      // A bound far above the real errors would prove little.
      EXPECT_GE(worst, 0.2) << to_string(isa) << ": " << describe(layout);
    }
  }
}

TEST(Reference, ManyElementsStayWithinTheBoundsAndComeNear) {
  const Updater updater({.threads = 1});
  for (const auto optimizer : test::kOptimizers) {
    const Layout layout{optimizer, Weights::Format::plain, DType::f32};
    const double worst = worst_error(updater, layout, 30'000, 20);
    EXPECT_LE(worst, 1.0) << describe(layout);
    EXPECT_GE(worst, 0.9) << describe(layout);
  }
}

TEST(Reference, WhatIsZeroStaysZero) {
  const Updater updater({.threads = 1});
  for (const auto optimizer : test::kOptimizers) {
    for (const auto moments : test::kMoments) {
      States states({optimizer, Weights::Format::plain, DType::f32, moments}, 300);
      for (std::size_t i = 0; i < states.size; ++i) states.set_weight(i, 1.0F);
      updater.step({.optimizer = optimizer, .learning_rate = 0.1}, states.shard());
      for (std::size_t i = 0; i < states.size; ++i) {
        const Element element = states.element(i);
        ASSERT_EQ(element.weight, 1.0F) << to_string(optimizer);
        ASSERT_EQ(element.first, 0.0F) << to_string(optimizer);
        ASSERT_EQ(element.second, 0.0F) << to_string(optimizer);
      }
    }
  }
}

/// Padding at the end of blocks is zero, whatever has happened to it: see kernel_rules.h.
TEST(Reference, PaddingStaysZero) {
  for (const Isa isa : available()) {
    const Updater updater({.threads = 1, .isa = isa});
    for (const Layout& layout : test::all_layouts()) {
      States states(layout, 300);
      test::run(updater, states, 3);
      const States zeros(layout, 300);
      EXPECT_EQ(states.main, zeros.main) << describe(layout);
      EXPECT_EQ(states.remainder_or_copy, zeros.remainder_or_copy) << describe(layout);
      for (std::size_t i = 0; i < states.size; ++i) {
        const Element element = states.element(i);
        ASSERT_EQ(element.first, 0.0F) << describe(layout) << ' ' << to_string(isa);
        ASSERT_EQ(element.second, 0.0F) << describe(layout) << ' ' << to_string(isa);
      }
    }
  }
}

/// Elements that span most of the range of float, with denormal results.
TEST(Reference, BoundsHoldForNumbersOfEveryMagnitude) {
  const Updater updater({.threads = 1});
  for (const auto optimizer : test::kOptimizers) {
    States states({optimizer, Weights::Format::plain, DType::f32}, 100'000);
    Numbers numbers(9);
    for (std::size_t i = 0; i < states.size; ++i) {
      const float v = std::fabs(numbers.any(-126, 100));
      states.set(i, numbers.any(-126, 60), numbers.any(-126, 60), v, numbers.any(-126, 60));
    }
    const States before = states;
    const Hyper hyper = hyper_at(optimizer, 4);
    updater.step(hyper, states.shard());
    for (std::size_t i = 0; i < states.size; ++i) {
      const Element from = before.element(i);
      const Element to = states.element(i);
      ASSERT_LE(error_of(hyper, from, to), 1.0)
          << to_string(optimizer) << ": p " << from.weight << ", m " << from.first << ", v "
          << from.second << ", g " << from.gradient << " became p " << to.weight << ", m "
          << to.first << ", v " << to.second;
    }
  }
}

TEST(Reference, SplitMasterIsUpdatedAsThePlainOne) {
  for (const auto optimizer : test::kOptimizers) {
    States split = States::random({optimizer, Weights::Format::split, DType::f32}, 5'000, 10);
    States plain = States::random({optimizer, Weights::Format::plain, DType::f32}, 5'000, 10);
    for (std::int64_t step = 1; step <= 20; ++step) {
      const Updater updater({.threads = 1});
      updater.step(hyper_at(optimizer, step), split.shard());
      updater.step(hyper_at(optimizer, step), plain.shard());
    }
    EXPECT_EQ(split.first, plain.first);
    EXPECT_EQ(split.second, plain.second);
    for (std::size_t i = 0; i < split.size; ++i) {
      const SplitMaster expected = split_master(plain.main.as<float>()[i]);
      ASSERT_EQ(split.main.as<Bf16>()[i], expected.weight) << "element " << i;
      ASSERT_EQ(split.remainder_or_copy.as<std::uint16_t>()[i], expected.remainder)
          << "element " << i;
    }
  }
}

}  // namespace
}  // namespace ballast::cpu_adam::reference_test
