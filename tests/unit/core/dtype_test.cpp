#include "ballast/core/dtype.h"

#include <cmath>
#include <cstdint>

#include <gtest/gtest.h>

namespace ballast {
namespace {

constexpr bool is_nan(std::uint32_t bits) {
  return (bits & 0x7fffffffU) > 0x7f800000U;
}

TEST(Bf16, EveryPatternReadsBack) {
  for (std::uint32_t bits = 0; bits < 0x10000U; ++bits) {
    const Bf16 value{static_cast<std::uint16_t>(bits)};
    const Bf16 back = to_bf16(to_float(value));
    if (is_nan(bits << 16)) {
      EXPECT_TRUE(std::isnan(to_float(back)));
    } else {
      ASSERT_EQ(back, value);
    }
  }
}

TEST(Bf16, RoundsToNearestEven) {
  EXPECT_EQ(to_bf16(std::bit_cast<float>(0x3f808000U)).bits, 0x3f80);
  EXPECT_EQ(to_bf16(std::bit_cast<float>(0x3f818000U)).bits, 0x3f82);
  EXPECT_EQ(to_bf16(std::bit_cast<float>(0x3f808001U)).bits, 0x3f81);
}

TEST(SplitMaster, IsLosslessForEveryPattern) {
  std::uint64_t wrong = 0;
  for (std::uint64_t pattern = 0; pattern < (std::uint64_t{1} << 32); ++pattern) {
    const auto bits = static_cast<std::uint32_t>(pattern);
    const SplitMaster split = split_master(std::bit_cast<float>(bits));
    const auto joined = std::bit_cast<std::uint32_t>(join_master(split));
    if (is_nan(bits)) {
      const bool weight_is_nan = (split.weight.bits & 0x7fffU) > 0x7f80U;
      wrong += (weight_is_nan && is_nan(joined)) ? 0 : 1;
    } else {
      wrong += joined == bits ? 0 : 1;
    }
  }
  EXPECT_EQ(wrong, 0U);
}

TEST(SplitMaster, WeightIsTheNearestBf16TiesAway) {
  EXPECT_EQ(split_master(std::bit_cast<float>(0x3f808000U)).weight.bits, 0x3f81);
  EXPECT_EQ(split_master(std::bit_cast<float>(0x3f807fffU)).weight.bits, 0x3f80);
  EXPECT_EQ(split_master(std::bit_cast<float>(0xbf808000U)).weight.bits, 0xbf81);
}

}  // namespace
}  // namespace ballast
