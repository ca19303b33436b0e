#include <limits>
#include <tuple>

#include <gtest/gtest.h>

#include "states.h"

namespace ballast::cpu_adam::moments_test {
namespace {

using test::Numbers;
using test::States;

constexpr std::size_t kBlock = Codes::kBlock;

/// SGD that stores gradient + momentum * first moment in the first moment.
Hyper sgd(double momentum, std::int64_t step = 1) {
  return {.optimizer = Optimizer::sgd, .learning_rate = 0.0, .momentum = momentum, .step = step};
}
/// Adagrad that adds the gradient's square to the second moment.
Hyper adagrad(std::int64_t step = 1) {
  return {.optimizer = Optimizer::adagrad, .learning_rate = 0.0, .step = step};
}

States first_moments(Moments::Format format, std::size_t size) {
  return States({Optimizer::sgd, Weights::Format::plain, DType::f32, format}, size);
}
States second_moments(std::size_t size) {
  return States(
      {Optimizer::adagrad, Weights::Format::plain, DType::f32, Moments::Format::blockwise8}, size);
}

Updater single(Isa isa = active()) {
  return Updater({.threads = 1, .isa = isa});
}

/// The first moments after gradients `values` in step `step`, starting from zero.
std::vector<float> rounded(Moments::Format format, const std::vector<float>& values,
                           std::int64_t step, Elems first_element = 0) {
  States states = first_moments(format, values.size());
  states.first_element = first_element;
  for (std::size_t i = 0; i < values.size(); ++i) states.set_gradient(i, values[i]);
  single().step(sgd(0.0, step), states.shard());
  std::vector<float> result(values.size());
  for (std::size_t i = 0; i < values.size(); ++i) result[i] = states.element(i).first;
  return result;
}

/// Floats truncated to `bits` significant bits, and the next such floats away from zero.
std::pair<float, float> neighbours(float value, int bits) {
  const std::uint32_t cut = (1U << (24 - bits)) - 1;
  const std::uint32_t down = std::bit_cast<std::uint32_t>(value) & ~cut;
  const bool exact = down == std::bit_cast<std::uint32_t>(value);
  return {std::bit_cast<float>(down), std::bit_cast<float>(exact ? down : down + cut + 1)};
}

class StochasticRounding : public testing::TestWithParam<std::tuple<Moments::Format, int>> {
 protected:
  static Moments::Format format() { return std::get<0>(GetParam()); }
  /// Significant bits that are kept.
  static int bits() { return std::get<1>(GetParam()); }
};

TEST_P(StochasticRounding, GivesOneOfTheTwoNeighboursAndBothOccur) {
  Numbers numbers(1);
  std::vector<float> values(40 * kBlock);
  for (float& value : values) value = numbers.any(-3, 3);
  int down = 0;
  int up = 0;
  for (std::int64_t step = 1; step <= 4; ++step) {
    const std::vector<float> stored = rounded(format(), values, step);
    for (std::size_t i = 0; i < values.size(); ++i) {
      const auto [lower, upper] = neighbours(values[i], bits());
      ASSERT_TRUE(stored[i] == lower || stored[i] == upper) << values[i] << " became " << stored[i];
      down += stored[i] == lower ? 1 : 0;
      up += stored[i] == upper ? 1 : 0;
    }
  }
  EXPECT_NEAR(static_cast<double>(up) / (up + down), 0.5, 0.02);
}

TEST_P(StochasticRounding, LeavesWhatNeedsNoRounding) {
  Numbers numbers(2);
  std::vector<float> values(4 * kBlock);
  for (float& value : values) value = neighbours(numbers.any(-4, 4), bits()).first;
  EXPECT_EQ(rounded(format(), values, 1), values);
}

TEST_P(StochasticRounding, HasNoBias) {
  const double step = std::ldexp(1.0, 1 - bits());  // between neighbours in [1, 2)
  for (const double fraction : {0.003, 0.1, 0.25, 0.5, 0.9, 0.997}) {
    const auto value = static_cast<float>(1.0 + (3.0 + fraction) * step);
    const std::vector<float> values(16'384, value);
    double sum = 0.0;
    double count = 0.0;
    for (std::int64_t t = 1; t <= 16; ++t) {
      for (const float stored : rounded(format(), values, t)) sum += double{stored} - double{value};
      count += static_cast<double>(values.size());
    }
    const double sigma = step * std::sqrt(fraction * (1.0 - fraction) / count);
    EXPECT_NEAR(sum / count, 0.0, 4.0 * sigma) << "fraction " << fraction;
  }
}

TEST_P(StochasticRounding, IsTheSameAgainAndOtherInOtherStepsAndElements) {
  const std::vector<float> values(16 * kBlock, static_cast<float>(1.0 + std::ldexp(2.5, -bits())));
  const std::vector<float> expected = rounded(format(), values, 3);
  EXPECT_EQ(rounded(format(), values, 3), expected);
  EXPECT_NE(rounded(format(), values, 4), expected);
  EXPECT_NE(rounded(format(), values, 3 + (std::int64_t{1} << 32)), expected);
  EXPECT_NE(rounded(format(), values, 3, kBlock), expected);
  EXPECT_NE(rounded(format(), values, 3, Elems{1} << 32), expected);
  const std::vector<float> later = rounded(format(), values, 3, 2 * kBlock);
  EXPECT_TRUE(std::equal(later.begin(), later.end() - 2 * kBlock, expected.begin() + 2 * kBlock));
}

/// The mean product of two series of signs, in units of its standard deviation for independent
/// series.
double correlation(const std::vector<double>& a, const std::vector<double>& b, std::size_t lag) {
  double sum = 0.0;
  for (std::size_t i = 0; i + lag < a.size(); ++i) sum += a[i] * b[i + lag];
  return sum / std::sqrt(static_cast<double>(a.size() - lag));
}

TEST_P(StochasticRounding, OfNeighbouringElementsAndStepsIsIndependent) {
  const auto value = static_cast<float>(1.0 + 1.5 * std::ldexp(1.0, 1 - bits()));
  const std::vector<float> values(std::size_t{1} << 18, value);
  const auto signs_of = [&](std::int64_t step, Elems first_element = 0) {
    std::vector<double> signs;
    for (const float stored : rounded(format(), values, step, first_element)) {
      signs.push_back(stored > value ? 1.0 : -1.0);
    }
    return signs;
  };
  const std::vector<double> signs = signs_of(1'000);
  for (const std::size_t lag : {1,  2,   3,   4,   8,   16,  31,  32,  33,    64,    96,
                                97, 128, 160, 192, 224, 225, 255, 256, 1'024, 65'536}) {
    EXPECT_LT(std::fabs(correlation(signs, signs, lag)), 4.0) << "elements " << lag << " apart";
  }
  for (const std::int64_t step : {1'001, 1'002, 1'004, 1'016, 2'000, 66'536}) {
    const std::vector<double> others = signs_of(step);
    for (const std::size_t lag : {0, 1, 2, 16}) {
      EXPECT_LT(std::fabs(correlation(signs, others, lag)), 4.0)
          << "steps 1000 and " << step << ", elements " << lag << " apart";
      EXPECT_LT(std::fabs(correlation(others, signs, lag)), 4.0)
          << "steps " << step << " and 1000, elements " << lag << " apart";
    }
  }
  const std::vector<double> far = signs_of(1'000, Elems{3} << 32);
  EXPECT_LT(std::fabs(correlation(signs, far, 0)), 4.0) << "elements 3 * 2^32 apart";
}

/// Elements of a block share generators of random bits, so their errors could add up.
TEST_P(StochasticRounding, SumsOfABlockVaryAsMuchAsWithIndependentElements) {
  constexpr std::size_t kBlocks = 4'096;
  for (const double fraction : {0.5, 0.1}) {
    const double step = std::ldexp(1.0, 1 - bits());
    const auto value = static_cast<float>(1.0 + (3.0 + fraction) * step);
    const std::vector<float> stored =
        rounded(format(), std::vector<float>(kBlocks * kBlock, value), 7);
    double squares = 0.0;
    for (std::size_t block = 0; block < kBlocks; ++block) {
      double sum = 0.0;
      for (std::size_t i = 0; i < kBlock; ++i) {
        sum += (double{stored[block * kBlock + i]} - double{value}) / step;
      }
      squares += sum * sum;
    }
    const double expected = kBlock * fraction * (1.0 - fraction);
    EXPECT_NEAR(squares / kBlocks / expected, 1.0, 4.0 * std::sqrt(2.0 / kBlocks)) << fraction;
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, StochasticRounding,
                         testing::Values(std::tuple(Moments::Format::bf16_first, 8),
                                         std::tuple(Moments::Format::blockwise8, 4)),
                         [](const auto& info) {
                           return std::get<1>(info.param) == 8 ? "Bf16" : "Codes";
                         });

TEST(Bf16Moment, KeepsInfinitiesAndNans) {
  const std::vector<float> values = {INFINITY, -INFINITY, NAN, -NAN,
                                     std::bit_cast<float>(0x7f800001U)};
  for (std::int64_t step = 1; step <= 50; ++step) {
    const std::vector<float> stored = rounded(Moments::Format::bf16_first, values, step);
    EXPECT_EQ(stored[0], INFINITY);
    EXPECT_EQ(stored[1], -INFINITY);
    EXPECT_TRUE(std::isnan(stored[2]) && std::isnan(stored[3]) && std::isnan(stored[4]));
  }
}

/// Every code once in every block; block b has exponent `lowest` + b.
void set_every_code(test::Array& codes, test::Array& exponents, std::size_t lowest) {
  for (std::size_t i = 0; i < codes.bytes(); ++i) {
    codes.as<std::uint8_t>()[i] = static_cast<std::uint8_t>(i);
  }
  for (std::size_t block = 0; block < exponents.bytes(); ++block) {
    exponents.as<std::uint8_t>()[block] = static_cast<std::uint8_t>(lowest + block);
  }
}

// No block has an exponent below 48, and 255 means NaN.
constexpr std::size_t kLowestExponent = 48;
constexpr std::size_t kExponents = 254 - kLowestExponent + 1;

TEST(Codes, EveryFirstMomentSurvivesAnUpdateThatChangesNothing) {
  for (const Isa isa : available()) {
    States states = first_moments(Moments::Format::blockwise8, kExponents * kBlock);
    set_every_code(states.first, states.first_exponents, kLowestExponent);
    const States before = states;
    for (std::int64_t step = 1; step <= 3; ++step) {
      single(isa).step(sgd(1.0, step), states.shard());
    }
    EXPECT_EQ(states.first_exponents, before.first_exponents);
    for (std::size_t i = 0; i < states.size; ++i) {
      ASSERT_EQ(states.element(i).first, before.element(i).first) << to_string(isa) << ' ' << i;
    }
  }
}

TEST(Codes, EverySecondMomentSurvivesAnUpdateThatChangesNothing) {
  for (const Isa isa : available()) {
    States states = second_moments(kExponents * kBlock);
    set_every_code(states.second, states.second_exponents, kLowestExponent);
    const States before = states;
    for (std::int64_t step = 1; step <= 3; ++step) {
      single(isa).step(adagrad(step), states.shard());
    }
    EXPECT_EQ(states.second_exponents, before.second_exponents);
    EXPECT_EQ(states.second, before.second) << to_string(isa);
  }
}

TEST(Codes, StandForFloatsWithThreeFractionBitsUnderTheSharedExponent) {
  States first = first_moments(Moments::Format::blockwise8, kBlock);
  set_every_code(first.first, first.first_exponents, 127);
  EXPECT_EQ(first.element(0x00).first, 0.0F);
  EXPECT_EQ(first.element(0x7f).first, 1.875F);
  EXPECT_EQ(first.element(0x7e).first, 1.75F);
  EXPECT_EQ(first.element(0x78).first, 1.0F);
  EXPECT_EQ(first.element(0x77).first, 0.9375F);
  EXPECT_EQ(first.element(0x01).first, 1.125F * 0x1p-15F);
  EXPECT_EQ(first.element(0xff).first, -1.875F);
  EXPECT_EQ(first.element(5).first_smallest, 1.125F * 0x1p-15F);
  States second = second_moments(kBlock);
  set_every_code(second.second, second.second_exponents, 100);
  EXPECT_EQ(second.element(0x00).second, 0.0F);
  EXPECT_EQ(second.element(0xff).second, 1.875F * 0x1p-27F);
  EXPECT_EQ(second.element(0x01).second, 1.125F * 0x1p-58F);
  for (std::size_t code = 1; code < 256; ++code) {
    ASSERT_GT(second.element(code).second, second.element(code - 1).second);
  }
}

TEST(Codes, AllZerosMeanZero) {
  States states({Optimizer::adamw, Weights::Format::plain, DType::f32, Moments::Format::blockwise8},
                2 * kBlock + 3);
  for (const Isa isa : available()) {
    single(isa).step({.step = 1}, states.shard());
    for (std::size_t i = 0; i < states.size; ++i) {
      ASSERT_EQ(states.element(i).first, 0.0F) << to_string(isa);
      ASSERT_EQ(states.element(i).second, 0.0F) << to_string(isa);
    }
  }
}

TEST(Codes, SharedExponentIsThatOfTheLargestRoundedUp) {
  for (const Isa isa : available()) {
    for (const auto& [largest, exponent] : {std::pair(1.0F, 127), std::pair(1.875F, 127),
                                            std::pair(1.876F, 128), std::pair(0x1p-30F, 97)}) {
      for (const std::size_t place : {0UL, 100UL, kBlock - 1}) {
        States states = first_moments(Moments::Format::blockwise8, kBlock);
        for (std::size_t i = 0; i < kBlock; ++i) states.set_gradient(i, largest / 4);
        states.set_gradient(place, -largest);
        single(isa).step(sgd(0.0), states.shard());
        EXPECT_EQ(*states.first_exponents.as<std::uint8_t>(), exponent) << largest;
      }
    }
  }
}

TEST(Codes, SecondMomentAboveZeroNeverBecomesZero) {
  for (const Isa isa : available()) {
    States states = second_moments(3 * kBlock + 9);
    Numbers numbers(3);
    for (std::int64_t step = 1; step <= 10; ++step) {
      for (std::size_t i = 0; i < states.size; ++i) states.set_gradient(i, numbers.any(-60, -10));
      states.set_gradient(kBlock + 5, 0x1p20F);
      single(isa).step(adagrad(step), states.shard());
      for (std::size_t i = 0; i < states.size; ++i) {
        ASSERT_GT(states.element(i).second, 0.0F) << to_string(isa) << ", element " << i;
      }
    }
  }
}

TEST(Codes, OneHugeValueLeavesTheOthersTheirMagnitude) {
  for (const Isa isa : available()) {
    // Second moments from 2^-24 to 2^2 in a block with one of 2^6, first moments from 2^-12 to 2
    // with one of 2^2.
    States second = second_moments(kBlock);
    States first = first_moments(Moments::Format::blockwise8, kBlock);
    Numbers numbers(4);
    for (std::size_t i = 0; i < kBlock; ++i) {
      const float small = numbers.any(-12, 0);
      second.set_gradient(i, i == 77 ? 8.0F : small);
      first.set_gradient(i, i == 77 ? 4.0F : small);
    }
    single(isa).step(adagrad(), second.shard());
    single(isa).step(sgd(0.0), first.shard());
    for (std::size_t i = 0; i < kBlock; ++i) {
      const Element m = first.element(i);
      const Element v = second.element(i);
      EXPECT_NEAR(m.first / m.gradient, 1.0F, 0.125F) << to_string(isa) << ", element " << i;
      EXPECT_NEAR(v.second / (v.gradient * v.gradient), 1.0F, 0.125F) << to_string(isa);
    }
  }
}

TEST(Codes, FirstMomentsBelowTheSmallestCodeKeepTheirMean) {
  constexpr std::size_t kBlocks = 256;
  constexpr float kSmallest = 1.125F * 0x1p-15F;
  for (const float share : {0.02F, 0.4F, 0.93F}) {
    std::vector<float> values(kBlocks * kBlock, -share * kSmallest);
    for (std::size_t block = 0; block < kBlocks; ++block) values[block * kBlock] = 1.0F;
    double sum = 0.0;
    double count = 0.0;
    for (std::int64_t step = 1; step <= 4; ++step) {
      const std::vector<float> stored = rounded(Moments::Format::blockwise8, values, step);
      for (std::size_t i = 0; i < stored.size(); ++i) {
        if (i % kBlock == 0) continue;
        ASSERT_TRUE(stored[i] == 0.0F || stored[i] == -kSmallest);
        sum += stored[i] == 0.0F ? 0.0 : 1.0;
        count += 1.0;
      }
    }
    const double sigma = std::sqrt(share * (1.0 - share) / count);
    EXPECT_NEAR(sum / count, share, 4.0 * sigma);
  }
}

TEST(Codes, TwoMomentsOfAnElementAreRoundedIndependently) {
  // Both moments are half way between two codes: first 1 + 1/16, second its square under a scale.
  States states({Optimizer::adam, Weights::Format::plain, DType::f32, Moments::Format::blockwise8},
                1'024 * kBlock);
  Hyper hyper{.optimizer = Optimizer::adam, .learning_rate = 0.0, .beta1 = 0.0, .beta2 = 0.0};
  const float g = 1.03F;  // g in [1, 1.125), g * g in [1, 1.125)
  for (std::size_t i = 0; i < states.size; ++i) states.set_gradient(i, g);
  single().step(hyper, states.shard());
  const double p = (static_cast<double>(g) - 1.0) * 8.0;
  const double q = (static_cast<double>(g) * static_cast<double>(g) - 1.0) * 8.0;
  double both = 0.0;
  for (std::size_t i = 0; i < states.size; ++i) {
    const Element element = states.element(i);
    both += (element.first > g ? 1.0 - p : -p) * (element.second > g * g ? 1.0 - q : -q);
  }
  const double n = static_cast<double>(states.size);
  EXPECT_NEAR(both / n, 0.0, 4.0 * std::sqrt(p * (1.0 - p) * q * (1.0 - q) / n));
}

TEST(Codes, NanOrInfinityMakesItsBlockNanAndLeavesTheOthers) {
  for (const Isa isa : available()) {
    for (const float bad : {NAN, INFINITY, -INFINITY}) {
      States states(
          {Optimizer::adamw, Weights::Format::plain, DType::f32, Moments::Format::blockwise8},
          3 * kBlock + 40);
      Numbers numbers(5);
      for (std::size_t i = 0; i < states.size; ++i) states.set_gradient(i, numbers.any(-5, 0));
      States clean = states;
      states.set_gradient(kBlock + 200, bad);
      for (std::int64_t step = 1; step <= 2; ++step) {
        single(isa).step({.step = step}, states.shard());
        single(isa).step({.step = step}, clean.shard());
      }
      for (std::size_t i = 0; i < states.size; ++i) {
        const Element element = states.element(i);
        if (i / kBlock == 1) {
          ASSERT_TRUE(std::isnan(element.first)) << to_string(isa) << ", element " << i;
          ASSERT_TRUE(std::isnan(element.second)) << to_string(isa) << ", element " << i;
        } else {
          ASSERT_EQ(element.first, clean.element(i).first) << to_string(isa);
          ASSERT_EQ(element.second, clean.element(i).second) << to_string(isa);
        }
      }
    }
  }
}

}  // namespace
}  // namespace ballast::cpu_adam::moments_test
