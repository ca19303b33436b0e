#include <algorithm>
#include <limits>

#include <gtest/gtest.h>

#include "states.h"

namespace ballast::cpu_adam::kernels_test {
namespace {

using test::describe;
using test::difference;
using test::hyper_at;
using test::Layout;
using test::States;

/// Every instruction set of this CPU except the scalar one. Skips the test if there is none.
class Kernels : public testing::Test {
 protected:
  void SetUp() override {
    for (const Isa isa : available()) {
      if (isa != Isa::scalar) vector_.emplace_back(UpdaterOptions{.threads = 1, .isa = isa});
    }
    if (vector_.empty()) GTEST_SKIP() << "this CPU has none of the vector instruction sets";
  }

  /// Steps copies of `start` with the scalar and with each vector kernel. The results must be
  /// equal, and the gradient and the memory around the arrays must not change.
  void expect_same_bits(const States& start, int steps, const Hyper& hyper) const {
    States expected = start;
    test::run(scalar_, expected, steps, hyper);
    EXPECT_EQ(expected.gradient, start.gradient);
    for (const Updater& updater : vector_) {
      States actual = start;
      test::run(updater, actual, steps, hyper);
      EXPECT_EQ(difference(expected, actual), "")
          << to_string(updater.isa()) << ": " << describe(start.layout) << ", " << start.size
          << " elements";
    }
  }
  void expect_same_bits(const States& start, int steps) const {
    expect_same_bits(start, steps, hyper_at(start.layout.optimizer, 1));
  }

  /// All available updaters, including the scalar one.
  std::vector<const Updater*> all() const {
    std::vector<const Updater*> updaters = {&scalar_};
    for (const Updater& updater : vector_) updaters.push_back(&updater);
    return updaters;
  }

 private:
  Updater scalar_{UpdaterOptions{.threads = 1, .isa = Isa::scalar}};
  std::vector<Updater> vector_;
};

constexpr std::size_t kLongest = 4 * 16 + 3;  // four of the widest vectors and some more

TEST_F(Kernels, AgreeForEveryLayoutAndLength) {
  for (const Layout& layout : test::all_layouts()) {
    for (std::size_t size = 0; size <= kLongest; ++size) {
      expect_same_bits(States::random(layout, size, size, size * 7 % 16), 2);
    }
    if (HasFailure()) return;
  }
}

TEST_F(Kernels, AgreeForEveryLengthAtEveryAlignment) {
  for (const Layout& layout : test::some_layouts()) {
    for (std::size_t size = 0; size <= kLongest; ++size) {
      for (std::size_t offset = 0; offset < 16; ++offset) {
        expect_same_bits(States::random(layout, size, size, offset), 2);
      }
    }
    if (HasFailure()) return;
  }
}

TEST_F(Kernels, AgreeAroundTheEndsOfBlocks) {
  for (const Layout& layout : test::some_layouts()) {
    for (const std::size_t size : {255, 256, 257, 271, 272, 511, 512, 513, 768 + 67}) {
      expect_same_bits(States::random(layout, size, size, size % 16), 3);
    }
  }
}

TEST_F(Kernels, AgreeOverFiftySteps) {
  for (const Layout& layout : test::all_layouts()) {
    expect_same_bits(States::random(layout, 603, 1, 3), 50);
    if (HasFailure()) return;
  }
}

TEST_F(Kernels, AgreeOnManyChunks) {
  for (const auto optimizer : test::kOptimizers) {
    expect_same_bits(States::random({optimizer}, 150'001, 2, 1), 2);
  }
  for (const auto moments : {Moments::Format::bf16_first, Moments::Format::blockwise8}) {
    States states = States::random({.moments = moments}, 150'001, 3, 1);
    states.first_element = (Elems{1} << 32) - 512;  // chunks on both sides of a multiple of 2^32
    expect_same_bits(states, 2);
  }
}

TEST_F(Kernels, AgreeForOtherHyperParameters) {
  for (const Layout& layout : test::some_layouts()) {
    const States start = States::random(layout, 1'003, 3);
    for (const double beta : {0.0, 0.3, 0.5, 0.51, 0.999}) {
      Hyper hyper = hyper_at(layout.optimizer, 1);
      hyper.beta1 = hyper.beta2 = hyper.momentum = beta;
      hyper.weight_decay = beta < 0.5 ? 0.0 : 0.01;
      hyper.epsilon = beta < 0.4 ? 0.0 : 1e-3;
      hyper.nesterov = beta > 0.5;
      expect_same_bits(start, 3, hyper);
    }
  }
}

/// Zeros, denormals, the limits of the range, ties and values that round up to the next binade (in
/// bf16 and in binary16), infinities and NaNs.
const std::vector<float>& special_values() {
  using Limits = std::numeric_limits<float>;
  static const std::vector<float> values = {0.0F,
                                            -0.0F,
                                            Limits::denorm_min(),
                                            -Limits::denorm_min(),
                                            std::bit_cast<float>(0x007fffffU),
                                            Limits::min(),
                                            0x1p-25F,
                                            1.0F,
                                            -1.0F,
                                            std::bit_cast<float>(0x3f808000U),
                                            std::bit_cast<float>(0x3fffffffU),
                                            65519.99F,
                                            -65520.0F,
                                            std::bit_cast<float>(0x7f7f7fffU),
                                            std::bit_cast<float>(0x7f7f8000U),
                                            Limits::max(),
                                            Limits::lowest(),
                                            Limits::infinity(),
                                            -Limits::infinity(),
                                            Limits::quiet_NaN(),
                                            std::bit_cast<float>(0x7f800001U),
                                            std::bit_cast<float>(0xffffffffU)};
  return values;
}

/// Each combination of special values is one element; with Codes a block has 256 combinations.
States special_states(const Layout& layout) {
  const std::vector<float>& values = special_values();
  const std::size_t n = values.size();
  const bool first = has_first_moment(layout.optimizer);
  const bool second = has_second_moment(layout.optimizer);
  States states(layout, n * n * (first ? n : 1) * (second ? n : 1));
  for (std::size_t i = 0; i < states.size; ++i) {
    std::size_t rest = i / (n * n);
    const float m = first ? values[rest % n] : 0.0F;
    if (first) rest /= n;
    const float v = second ? values[rest % n] : 0.0F;
    states.set(i, values[i % n], m, v, values[i / n % n]);
  }
  return states;
}

TEST_F(Kernels, AgreeOnSpecialValues) {
  for (const auto optimizer : test::kOptimizers) {
    for (const auto weights : test::kWeights) {
      const std::size_t turn = static_cast<std::size_t>(weights);
      const States states = special_states({optimizer, weights, test::kGradients.at(turn % 3)});
      expect_same_bits(states, 2);
      Hyper hyper = hyper_at(optimizer, 1);
      hyper.gradient_scale = 1.0F;
      hyper.epsilon = 0.0;
      hyper.weight_decay = 0.0;
      expect_same_bits(states, 1, hyper);
    }
    expect_same_bits(special_states({.optimizer = optimizer,
                                     .gradient = DType::f32,
                                     .moments = Moments::Format::bf16_first}),
                     2);
  }
}

TEST_F(Kernels, AgreeOnSpecialValuesInBlocksOfCodes) {
  for (const auto optimizer : test::kOptimizers) {
    const Layout layout{optimizer, Weights::Format::plain, DType::f32, Moments::Format::blockwise8};
    for (const float special : special_values()) {
      States states = States::random(layout, 3 * Codes::kBlock + 17, 5, 3);
      states.set_gradient(Codes::kBlock + 77, special);
      states.set_gradient(3 * Codes::kBlock + 16, special);
      expect_same_bits(states, 3);
    }
    // Any byte under any exponent, including those that no update writes.
    States states = States::random(layout, 256 * Codes::kBlock, 6);
    for (std::size_t block = 0; block < 256; ++block) {
      for (auto* exponents : {&states.first_exponents, &states.second_exponents}) {
        if (exponents->bytes() != 0) {
          exponents->as<std::uint8_t>()[block] = static_cast<std::uint8_t>(block);
        }
      }
    }
    expect_same_bits(states, 2);
  }
}

TEST_F(Kernels, KeepNansWhoseBitsAreAllSet) {
  // A carry out of the remainder of such a NaN would turn it into zero.
  for (const auto format : {Moments::Format::bf16_first, Moments::Format::blockwise8}) {
    States states = States::random({Optimizer::adamw, Weights::Format::split, DType::f32, format},
                                   3 * Codes::kBlock, 8);
    states.set_gradient(5, std::bit_cast<float>(0xffffffffU));
    states.set_gradient(2 * Codes::kBlock + 38, std::bit_cast<float>(0x7fffffffU));
    expect_same_bits(states, 2);
    Updater({.threads = 1}).step({}, states.shard());
    EXPECT_TRUE(std::isnan(states.element(5).first));
    EXPECT_TRUE(std::isnan(states.element(2 * Codes::kBlock + 38).first));
  }
}

TEST_F(Kernels, KeepNansOfAGradientScaleWhoseBitsAreAllSet) {
  Hyper hyper = hyper_at(Optimizer::adamw, 1);
  hyper.gradient_scale = std::bit_cast<float>(0x7fffffffU);
  States states = States::random(
      {Optimizer::adamw, Weights::Format::split, DType::bf16, Moments::Format::bf16_first},
      3 * Codes::kBlock, 9);
  expect_same_bits(states, 1, hyper);
  Updater({.threads = 1}).step(hyper, states.shard());
  for (std::size_t i = 0; i < states.size; ++i) EXPECT_TRUE(std::isnan(states.element(i).first));
}

TEST_F(Kernels, AgreeOnEveryWeightAndManyRemainders) {
  constexpr std::array<std::uint16_t, 6> kLow = {0x0000, 0x0001, 0x7fff, 0x8000, 0x8001, 0xffff};
  States states({}, 0x10000U * kLow.size());
  for (std::size_t i = 0; i < states.size; ++i) {
    states.set(i, 0.0F, 0.25F, 0.5F, 0.125F);
    states.main.as<Bf16>()[i] = Bf16{static_cast<std::uint16_t>(i / kLow.size())};
    states.remainder_or_copy.as<std::uint16_t>()[i] = kLow.at(i % kLow.size());
  }
  Hyper hyper = hyper_at(Optimizer::adamw, 1);
  expect_same_bits(states, 1, hyper);
  hyper.weight_decay = 0.0;
  hyper.learning_rate = 0.0;
  expect_same_bits(states, 1, hyper);
}

TEST_F(Kernels, TouchStaysInsideTheArraysAndLeavesAllButACopyAsItIs) {
  for (const Updater* updater : all()) {
    for (const TouchWay& way : touch_ways()) {
      for (const Layout& layout : test::all_layouts()) {
        for (const std::size_t size : {0, 1, 255, 256, 1'001}) {
          States states = States::random(layout, size, 7, size % 5);
          const States before = states;
          updater->touch(layout.optimizer, states.shard(), way);
          EXPECT_TRUE(states.guards_intact()) << describe(layout) << ", " << size << " elements";
          EXPECT_EQ(states.main, before.main);
          EXPECT_EQ(states.first, before.first);
          EXPECT_EQ(states.second, before.second);
          EXPECT_EQ(states.gradient, before.gradient);
        }
      }
    }
  }
}

TEST_F(Kernels, TouchInEveryWayReachesAllOfACopy) {
  Layout layout;
  layout.weights = Weights::Format::copy_bf16;
  for (const Updater* updater : all()) {
    for (const TouchWay& way : touch_ways()) {
      for (const std::size_t offset : {0, 1}) {
        constexpr std::size_t kSize = 70 * Codes::kBlock;
        States states = States::random(layout, kSize, 7, offset);
        updater->touch(layout.optimizer, states.shard(), way);
        const auto* copy = states.remainder_or_copy.as<std::uint16_t>();
        EXPECT_TRUE(std::all_of(copy, copy + kSize, [](std::uint16_t c) { return c == 0; }))
            << to_string(updater->isa()) << ", stretch " << way.stretch << ", " << way.streams;
      }
    }
  }
}

}  // namespace
}  // namespace ballast::cpu_adam::kernels_test
