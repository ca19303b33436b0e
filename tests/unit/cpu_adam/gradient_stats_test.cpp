#include <limits>

#include <gtest/gtest.h>

#include "states.h"

namespace ballast::cpu_adam::gradient_stats_test {
namespace {

using test::Layout;
using test::States;

/// Longer than three chunks of an update, and not a multiple of any vector.
constexpr std::size_t kLong = 200'011;

States gradients(DType type, std::size_t size, std::uint64_t seed, std::size_t offset = 0) {
  return States::random({Optimizer::lion, Weights::Format::plain, type}, size, seed, offset);
}

GradientStats stats(const Updater& updater, States& states) {
  return updater.gradient_stats(states.shard().gradient, states.size);
}

std::uint64_t bits(double value) {
  return std::bit_cast<std::uint64_t>(value);
}

TEST(GradientStats, SumsLikeALongDouble) {
  for (const DType type : test::kGradients) {
    for (const std::size_t size : {1UL, 3UL, 64UL, 67UL, 1'000UL, kLong}) {
      States states = gradients(type, size, size);
      long double expected = 0.0L;
      for (std::size_t i = 0; i < size; ++i) {
        const long double g = states.element(i).gradient;
        expected += g * g;
      }
      const GradientStats actual = stats(Updater({.threads = 2}), states);
      EXPECT_EQ(actual.non_finite, 0U);
      EXPECT_NEAR(actual.sum_of_squares / static_cast<double>(expected), 1.0, 1e-12)
          << to_string(type) << ", " << size << " elements";
    }
  }
}

TEST(GradientStats, AreTheSameBitsForEveryInstructionSetAndAlignment) {
  const Updater scalar({.threads = 1, .isa = Isa::scalar});
  for (const DType type : test::kGradients) {
    for (std::size_t size = 0; size <= 67; ++size) {
      States expected_of = gradients(type, size, 1);
      const double expected = stats(scalar, expected_of).sum_of_squares;
      for (const Isa isa : available()) {
        const Updater updater({.threads = 1, .isa = isa});
        for (std::size_t offset = 0; offset < 16; ++offset) {
          States states = gradients(type, size, 1, offset);
          ASSERT_EQ(bits(stats(updater, states).sum_of_squares), bits(expected))
              << to_string(isa) << ", " << size << " elements, offset " << offset;
        }
      }
    }
  }
}

TEST(GradientStats, AreTheSameBitsForEveryNumberOfThreadsAndChunks) {
  for (const DType type : test::kGradients) {
    for (const std::size_t size : {65'535UL, 65'536UL, 65'537UL, 131'072UL, kLong}) {
      States states = gradients(type, size, 2, 3);
      const double expected =
          stats(Updater({.threads = 1, .isa = Isa::scalar}), states).sum_of_squares;
      for (const int threads : {1, 2, 3, 7}) {
        const Updater updater({.threads = threads});
        ASSERT_EQ(bits(stats(updater, states).sum_of_squares), bits(expected))
            << threads << " threads, " << size << " elements";
      }
    }
  }
}

TEST(GradientStats, CountInfinitiesAndNans) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const DType type : test::kGradients) {
    for (const Isa isa : available()) {
      const Updater updater({.threads = 2, .isa = isa});
      States states = gradients(type, kLong, 3, 1);
      EXPECT_EQ(stats(updater, states).non_finite, 0U);
      states.set_gradient(0, NAN);
      states.set_gradient(65'536, kInfinity);
      states.set_gradient(65'537, -kInfinity);
      states.set_gradient(kLong - 1, -NAN);
      const GradientStats found = stats(updater, states);
      EXPECT_EQ(found.non_finite, 4U) << to_string(isa) << ", " << to_string(type);
      EXPECT_FALSE(std::isfinite(found.sum_of_squares));
      for (std::size_t i = 0; i < kLong; ++i) states.set_gradient(i, i % 3 == 0 ? kInfinity : NAN);
      EXPECT_EQ(stats(updater, states).non_finite, kLong);
    }
  }
}

TEST(GradientStats, LargestFloatsDoNotOverflow) {
  constexpr float kLargest = std::numeric_limits<float>::max();
  for (const Isa isa : available()) {
    States states = gradients(DType::f32, 1'000, 4);
    for (std::size_t i = 0; i < states.size; ++i) {
      states.set_gradient(i, i % 2 == 0 ? kLargest : -kLargest);
    }
    const GradientStats found = stats(Updater({.threads = 1, .isa = isa}), states);
    EXPECT_EQ(found.non_finite, 0U);
    const double square = static_cast<double>(kLargest) * static_cast<double>(kLargest);
    EXPECT_NEAR(found.sum_of_squares / (1'000.0 * square), 1.0, 1e-12);
  }
}

TEST(GradientStats, DenormalsCount) {
  const float tiny = std::numeric_limits<float>::denorm_min();
  for (const Isa isa : available()) {
    States states = gradients(DType::f32, 16, 5);
    for (std::size_t i = 0; i < states.size; ++i) states.set_gradient(i, tiny);
    const GradientStats found = stats(Updater({.threads = 1, .isa = isa}), states);
    EXPECT_EQ(found.sum_of_squares, 16.0 * static_cast<double>(tiny) * static_cast<double>(tiny));
  }
}

TEST(GradientStats, OfAnEmptyGradientAreZero) {
  const Updater updater({.threads = 2});
  const GradientStats found =
      updater.gradient_stats(Gradient(static_cast<const float*>(nullptr)), 0);
  EXPECT_EQ(bits(found.sum_of_squares), bits(0.0));
  EXPECT_EQ(found.non_finite, 0U);
}

}  // namespace
}  // namespace ballast::cpu_adam::gradient_stats_test
