#include "ballast/core/dtype.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include <gtest/gtest.h>

namespace ballast::dtype_test {
namespace {

constexpr bool is_nan(std::uint32_t bits) {
  return (bits & 0x7fffffffU) > 0x7f800000U;
}

/// A simple model of a 16-bit format: its finite magnitudes in double, in order. After the last one
/// comes the value that infinity would have if the exponent continued; rounding to it is an
/// overflow.
class Slow {
 public:
  Slow(int exponent_bits, int fraction_bits)
      : infinity_(((1 << exponent_bits) - 1) << fraction_bits) {
    const int bias = (1 << (exponent_bits - 1)) - 1;
    for (int pattern = 0; pattern <= infinity_; ++pattern) {
      const int exponent = pattern >> fraction_bits;
      const int fraction = pattern & ((1 << fraction_bits) - 1);
      const int integer = exponent == 0 ? fraction : fraction + (1 << fraction_bits);
      magnitudes_.push_back(std::ldexp(integer, std::max(exponent, 1) - bias - fraction_bits));
    }
  }

  [[nodiscard]] int infinity() const { return infinity_; }
  [[nodiscard]] double magnitude(int pattern) const {
    return magnitudes_[static_cast<std::size_t>(pattern)];
  }

  /// The pattern nearest to `value`, the even one of two equally near ones. Not for NaN.
  [[nodiscard]] int nearest(float value) const {
    const int sign = std::signbit(value) ? 0x8000 : 0;
    const double x = std::fabs(static_cast<double>(value));
    const auto above = std::upper_bound(magnitudes_.begin(), magnitudes_.end(), x);
    if (above == magnitudes_.end()) return sign | infinity_;
    const auto upper = static_cast<int>(above - magnitudes_.begin());
    const double down = x - magnitude(upper - 1);
    const double up = magnitude(upper) - x;
    if (down == up) return sign | (upper % 2 == 0 ? upper : upper - 1);
    return sign | (up < down ? upper : upper - 1);
  }

 private:
  int infinity_;
  std::vector<double> magnitudes_;
};

template <class T>
struct Format;
template <>
struct Format<Bf16> {
  static Slow slow() { return {8, 7}; }
  static Bf16 round(float value) { return to_bf16(value); }
};
template <>
struct Format<F16> {
  static Slow slow() { return {5, 10}; }
  static F16 round(float value) { return to_f16(value); }
};

template <class T>
class Halves : public testing::Test {};
using HalfTypes = testing::Types<Bf16, F16>;
TYPED_TEST_SUITE(Halves, HalfTypes);

TYPED_TEST(Halves, EveryPatternIsTheNumberOfItsFields) {
  const Slow slow = Format<TypeParam>::slow();
  for (int pattern = 0; pattern < 0x10000; ++pattern) {
    const float value = to_float(TypeParam{static_cast<std::uint16_t>(pattern)});
    const int magnitude = pattern & 0x7fff;
    ASSERT_EQ(std::signbit(value), pattern >= 0x8000) << "pattern " << pattern;
    if (magnitude > slow.infinity()) {
      ASSERT_TRUE(std::isnan(value)) << "pattern " << pattern;
    } else if (magnitude == slow.infinity()) {
      ASSERT_TRUE(std::isinf(value)) << "pattern " << pattern;
    } else {
      ASSERT_EQ(std::fabs(value), slow.magnitude(magnitude)) << "pattern " << pattern;
    }
  }
}

TYPED_TEST(Halves, EveryPatternReadsBack) {
  for (std::uint32_t bits = 0; bits < 0x10000U; ++bits) {
    const TypeParam value{static_cast<std::uint16_t>(bits)};
    const TypeParam back = Format<TypeParam>::round(to_float(value));
    if (std::isnan(to_float(value))) {
      ASSERT_TRUE(std::isnan(to_float(back))) << "pattern " << bits;
    } else {
      ASSERT_EQ(back, value) << "pattern " << bits;
    }
  }
}

TYPED_TEST(Halves, RoundToNearestEvenAroundEveryMiddle) {
  const Slow slow = Format<TypeParam>::slow();
  for (int pattern = 0; pattern < slow.infinity(); ++pattern) {
    const auto middle =
        static_cast<float>((slow.magnitude(pattern) + slow.magnitude(pattern + 1)) / 2);
    for (const float magnitude : {std::nextafter(middle, 0.0F), middle,
                                  std::nextafter(middle, std::numeric_limits<float>::infinity())}) {
      for (const float value : {magnitude, -magnitude}) {
        ASSERT_EQ(Format<TypeParam>::round(value).bits, slow.nearest(value)) << value;
      }
    }
  }
}

TYPED_TEST(Halves, RoundFloatsAllOver) {
  const Slow slow = Format<TypeParam>::slow();
  TypeParam previous{};
  for (std::uint32_t bits = 0; bits <= 0x7f800000U; bits += 4'099) {
    const auto value = std::bit_cast<float>(bits);
    const TypeParam rounded = Format<TypeParam>::round(value);
    ASSERT_EQ(rounded.bits, slow.nearest(value)) << value;
    ASSERT_EQ(Format<TypeParam>::round(-value).bits, rounded.bits | 0x8000U) << value;
    ASSERT_GE(rounded.bits, previous.bits) << value;
    previous = rounded;
  }
}

TYPED_TEST(Halves, InfinityStaysInfinityAndNanStaysNan) {
  const Slow slow = Format<TypeParam>::slow();
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(Format<TypeParam>::round(kInfinity).bits, slow.infinity());
  EXPECT_EQ(Format<TypeParam>::round(-kInfinity).bits, slow.infinity() | 0x8000);
  EXPECT_EQ(Format<TypeParam>::round(std::numeric_limits<float>::max()).bits, slow.infinity());
  for (std::uint32_t fraction = 1; fraction < 0x800000U; fraction += 101) {
    for (const std::uint32_t sign : {0U, 0x80000000U}) {
      const auto nan = std::bit_cast<float>(sign | 0x7f800000U | fraction);
      ASSERT_TRUE(std::isnan(to_float(Format<TypeParam>::round(nan)))) << fraction;
    }
  }
}

TEST(Bf16, RoundsToNearestEven) {
  EXPECT_EQ(to_bf16(std::bit_cast<float>(0x3f808000U)).bits, 0x3f80);
  EXPECT_EQ(to_bf16(std::bit_cast<float>(0x3f818000U)).bits, 0x3f82);
  EXPECT_EQ(to_bf16(std::bit_cast<float>(0x3f808001U)).bits, 0x3f81);
}

TEST(F16, RoundsToNearestEvenAndOverflowsFrom65520On) {
  EXPECT_EQ(to_f16(1.0F).bits, 0x3c00);
  EXPECT_EQ(to_f16(2049.0F).bits, 0x6800);
  EXPECT_EQ(to_f16(2051.0F).bits, 0x6802);
  EXPECT_EQ(to_f16(0x1p-24F).bits, 0x0001);
  EXPECT_EQ(to_f16(0x1p-25F).bits, 0x0000);
  EXPECT_EQ(to_f16(-0x1.8p-24F).bits, 0x8002);
  EXPECT_EQ(to_f16(65519.996F).bits, 0x7bff);
  EXPECT_EQ(to_f16(65520.0F).bits, 0x7c00);
}

bool is_lossless(std::uint32_t bits) {
  const SplitMaster split = split_master(std::bit_cast<float>(bits));
  const auto joined = std::bit_cast<std::uint32_t>(join_master(split));
  if (!is_nan(bits)) return joined == bits;
  return (split.weight.bits & 0x7fffU) > 0x7f80U && is_nan(joined);
}

/// Tests each high half with low halves near each power of two, where carries and rounding change,
/// and each low half with high halves near the limits of exponents. cpu_adam/exhaustive_test.cpp
/// passes all patterns through a kernel.
TEST(SplitMaster, IsLosslessForEveryHalf) {
  std::vector<std::uint32_t> borders = {0x3f80U, 0x7f7fU, 0x7f80U, 0x7f81U, 0x7fbfU, 0x7fc0U};
  for (std::uint32_t power = 1; power < 0x10000U; power *= 2) {
    for (const std::uint32_t near : {power - 1, power, power + 1}) borders.push_back(near);
  }
  for (const std::uint32_t high : std::vector(borders)) borders.push_back(high ^ 0xffffU);
  for (std::uint32_t half = 0; half < 0x10000U; ++half) {
    for (const std::uint32_t border : borders) {
      ASSERT_TRUE(is_lossless(half << 16 | border)) << half << " " << border;
      ASSERT_TRUE(is_lossless(border << 16 | half)) << half << " " << border;
      ASSERT_TRUE(is_lossless((border ^ 0x8000U) << 16 | half)) << half << " " << border;
    }
  }
}

TEST(SplitMaster, WeightIsTheNearestBf16TiesAway) {
  EXPECT_EQ(split_master(std::bit_cast<float>(0x3f808000U)).weight.bits, 0x3f81);
  EXPECT_EQ(split_master(std::bit_cast<float>(0x3f807fffU)).weight.bits, 0x3f80);
  EXPECT_EQ(split_master(std::bit_cast<float>(0xbf808000U)).weight.bits, 0xbf81);
}

}  // namespace
}  // namespace ballast::dtype_test
