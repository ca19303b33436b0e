#include <limits>

#include <gtest/gtest.h>

#include "states.h"

namespace ballast::cpu_adam {
namespace {

using test::difference;
using test::hyper_at;
using test::States;

/// Every instruction set of this CPU but the scalar one. Skips the test when there is none.
class Kernels : public testing::Test {
 protected:
  void SetUp() override {
    for (const Isa isa : available()) {
      if (isa != Isa::scalar) vector_.push_back(isa);
    }
    if (vector_.empty()) GTEST_SKIP() << "this CPU has none of the vector instruction sets";
  }

  /// Steps copies of `start` with the scalar and with each vector kernel; they must stay equal.
  void expect_same_bits(const States& start, int steps, AdamW hyper = hyper_at(1)) const {
    States expected = start;
    step(Isa::scalar, expected, steps, hyper);
    for (const Isa isa : vector_) {
      States actual = start;
      step(isa, actual, steps, hyper);
      EXPECT_EQ(difference(expected, actual), "")
          << to_string(isa) << ", " << start.size << " elements, offset " << start.offset;
    }
  }

 private:
  static void step(Isa isa, States& states, int steps, AdamW hyper) {
    const Updater updater(1, isa);
    States plain = states;
    for (int i = 0; i < steps; ++i, ++hyper.step) {
      updater.step(hyper, states.split());
      updater.step(hyper, plain.plain());
    }
    states.master = plain.master;
    states.first.insert(states.first.end(), plain.first.begin(), plain.first.end());
    states.second.insert(states.second.end(), plain.second.begin(), plain.second.end());
  }

  std::vector<Isa> vector_;
};

TEST_F(Kernels, AgreeForEveryLengthAndAlignment) {
  constexpr std::size_t kLanes = 16;
  for (std::size_t size = 0; size <= 4 * kLanes + 3; ++size) {
    for (std::size_t offset = 0; offset < 16; ++offset) {
      expect_same_bits(States(size, static_cast<std::uint32_t>(size), offset), 2);
    }
  }
}

TEST_F(Kernels, AgreeOverFiftySteps) {
  expect_same_bits(States(10'007, 1, 3), 50);
}

TEST_F(Kernels, AgreeOnManyChunks) {
  expect_same_bits(States(300'001, 2, 1), 2);
}

TEST_F(Kernels, AgreeWhereTheFirstMomentStartsFromTheGradient) {
  for (const double beta1 : {0.0, 0.3, 0.5}) {
    AdamW hyper = hyper_at(1);
    hyper.beta1 = beta1;
    expect_same_bits(States(1'003, 3), 5, hyper);
  }
}

TEST_F(Kernels, AgreeOnSpecialValues) {
  using Limits = std::numeric_limits<float>;
  const std::vector<float> values = {
      0.0F,
      -0.0F,
      Limits::denorm_min(),
      -Limits::denorm_min(),
      std::bit_cast<float>(0x007fffffU),
      Limits::min(),
      1.0F,
      -1.0F,
      std::bit_cast<float>(0x3f808000U),
      std::bit_cast<float>(0x7f7f7fffU),
      std::bit_cast<float>(0x7f7f8000U),
      Limits::max(),
      Limits::lowest(),
      Limits::infinity(),
      -Limits::infinity(),
      Limits::quiet_NaN(),
      std::bit_cast<float>(0x7f800001U),
      std::bit_cast<float>(0xffffffffU),
  };
  States states(0, 0);
  for (const float p : values) {
    for (const float m : values) {
      for (const float v : values) {
        for (const float g : values) states.add(p, m, v, g);
      }
    }
  }
  states.size = states.master.size();
  AdamW hyper = hyper_at(1);
  for (const float scale : {1.0F, 0.0F, 1e-30F}) {
    hyper.gradient_scale = scale;
    expect_same_bits(states, 2, hyper);
  }
  hyper.epsilon = 0.0;
  expect_same_bits(states, 2, hyper);
}

TEST_F(Kernels, AgreeOnEveryWeightAndManyRemainders) {
  States states(0, 0);
  for (std::uint32_t weight = 0; weight < 0x10000U; ++weight) {
    for (const std::uint32_t low : {0x0000U, 0x0001U, 0x7fffU, 0x8000U, 0x8001U, 0xffffU}) {
      states.add(0.0F, 0.25F, 0.5F, 0.125F);
      states.weight.back() = Bf16{static_cast<std::uint16_t>(weight)};
      states.remainder.back() = static_cast<std::uint16_t>(low);
    }
  }
  states.size = states.weight.size();
  AdamW hyper = hyper_at(1);
  hyper.weight_decay = 0.0;
  hyper.learning_rate = 0.0;
  expect_same_bits(states, 1, hyper);
  expect_same_bits(states, 1);
}

}  // namespace
}  // namespace ballast::cpu_adam
