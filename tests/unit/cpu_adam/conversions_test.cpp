#include <gtest/gtest.h>

#include "masters.h"
#include "states.h"

namespace ballast::cpu_adam::conversions_test {
namespace {

using test::is_nan;
using test::kHalf;
using test::kKeepWeights;
using test::Masters;
using test::States;

TEST(SplitWeights, ManyMastersPassEveryKernelUnchanged) {
  std::vector<std::uint16_t> highs = {0x0000, 0x0001, 0x007f, 0x0080, 0x7f7f, 0x7f80, 0x7f81,
                                      0x7fff, 0x8000, 0x807f, 0xff7f, 0xff80, 0xff81, 0xffff};
  for (std::uint16_t high = 0x0abc; high < 0xf000; high = static_cast<std::uint16_t>(high + 4001)) {
    highs.push_back(high);
  }
  Masters masters(highs);
  for (const Isa isa : available()) {
    EXPECT_EQ(masters.changed_by(Updater({.threads = 1, .isa = isa})), 0U) << to_string(isa);
  }
}

/// SGD without momentum or decay stores the gradient itself in the first moment; the negative zeros
/// keep the sign of a zero gradient.
States decoded_gradients(DType type, Isa isa) {
  States states({Optimizer::sgd, Weights::Format::plain, type}, kHalf);
  for (std::size_t i = 0; i < kHalf; ++i) {
    states.set(i, -0.0F, -0.0F, 0.0F, 0.0F);
    states.gradient.as<std::uint16_t>()[i] = static_cast<std::uint16_t>(i);
  }
  const Hyper hyper{.optimizer = Optimizer::sgd, .learning_rate = 0.0, .momentum = 0.0};
  Updater({.threads = 1, .isa = isa}).step(hyper, states.shard());
  return states;
}

template <class Half>
void expect_all_gradients_decoded(DType type) {
  for (const Isa isa : available()) {
    const States states = decoded_gradients(type, isa);
    for (std::size_t i = 0; i < kHalf; ++i) {
      const float expected = to_float(Half{static_cast<std::uint16_t>(i)});
      const float actual = states.first.as<float>()[i];
      if (std::isnan(expected)) {
        ASSERT_TRUE(std::isnan(actual)) << to_string(isa) << ", pattern " << i;
      } else {
        ASSERT_EQ(std::bit_cast<std::uint32_t>(actual), std::bit_cast<std::uint32_t>(expected))
            << to_string(isa) << ", pattern " << i;
      }
    }
  }
}

TEST(Gradients, EveryBf16IsDecodedAsInCore) {
  expect_all_gradients_decoded<Bf16>(DType::bf16);
}

TEST(Gradients, EveryF16IsDecodedAsInCore) {
  expect_all_gradients_decoded<F16>(DType::f16);
}

/// Copies that every kernel writes of `masters`, compared with `convert` of core/dtype.h.
template <class Half>
void expect_copies(const std::vector<float>& masters, Weights::Format format,
                   Half (*convert)(float)) {
  States start({Optimizer::lion, format}, masters.size());
  for (std::size_t i = 0; i < masters.size(); ++i) start.set_weight(i, masters[i]);
  for (const Isa isa : available()) {
    States states = start;
    Updater({.threads = 1, .isa = isa}).step(kKeepWeights, states.shard());
    EXPECT_EQ(test::first_difference<float>(states.main, start.main), -1) << to_string(isa);
    for (std::size_t i = 0; i < masters.size(); ++i) {
      const Half expected = convert(masters[i]);
      const Half actual = states.remainder_or_copy.as<Half>()[i];
      if (is_nan(expected) && is_nan(actual)) continue;
      ASSERT_EQ(actual.bits, expected.bits) << to_string(isa) << ", master " << masters[i];
    }
  }
}

TEST(Copies, Bf16IsTheMasterRoundedAsInCore) {
  std::vector<float> masters;
  for (std::uint32_t high = 0; high < kHalf; ++high) {
    for (const std::uint32_t low : {0x0000U, 0x0001U, 0x7fffU, 0x8000U, 0x8001U, 0xffffU}) {
      masters.push_back(std::bit_cast<float>((high << 16) | low));
    }
  }
  expect_copies<Bf16>(masters, Weights::Format::copy_bf16, to_bf16);
}

TEST(Copies, F16IsTheMasterRoundedAsInCore) {
  std::vector<float> masters = {65519.996F, 65520.0F, 65536.0F,  1e9F,
                                INFINITY,   -1e9F,    -65520.0F, -INFINITY};
  for (std::uint32_t bits = 0; bits < kHalf; ++bits) {
    const float here = to_float(F16{static_cast<std::uint16_t>(bits)});
    const float next = to_float(F16{static_cast<std::uint16_t>(bits + 1)});
    const float middle = (here + next) / 2;
    for (const float value : {here, middle}) {
      masters.push_back(value);
      masters.push_back(std::nextafter(value, -INFINITY));
      masters.push_back(std::nextafter(value, INFINITY));
    }
  }
  // Values below binary16's range, and patterns from the whole range.
  for (std::uint32_t bits = 0; bits < 0xffff0000U; bits += 10'007) {
    masters.push_back(std::bit_cast<float>(bits));
  }
  expect_copies<F16>(masters, Weights::Format::copy_f16, to_f16);
}

}  // namespace
}  // namespace ballast::cpu_adam::conversions_test
