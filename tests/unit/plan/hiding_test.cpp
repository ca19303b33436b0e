#include <gtest/gtest.h>

#include "ballast/core/error.h"
#include "ballast/plan/simulator.h"

namespace ballast::plan::hiding_test {
namespace {

constexpr double kFast = 400e12;

TEST(Hiding, NvmeStatesNeedAHundredThousandTokensAtTenGigabytesASecond) {
  EXPECT_DOUBLE_EQ(tokens_to_hide(kNvmeStateBytesPerParameter, kFast, 10e9), 100e3);
  // With the bf16 weights on NVMe too, which are written once and read once.
  EXPECT_DOUBLE_EQ(tokens_to_hide(kNvmeStateBytesPerParameter + 4.0, kFast, 10e9), 120e3);
}

TEST(Hiding, AnUpdateInMemoryAndTheLinkNeedThousands) {
  EXPECT_DOUBLE_EQ(tokens_to_hide(26.0, kFast, 200e9), 6500.0);
  EXPECT_DOUBLE_EQ(tokens_to_hide(4.0, kFast, 50e9), 4000.0);
}

TEST(Hiding, GrowsWithTheArithmeticAndFallsWithTheBandwidth) {
  const double one = tokens_to_hide(20.0, 100e12, 3e9);
  EXPECT_DOUBLE_EQ(tokens_to_hide(20.0, 200e12, 3e9), 2.0 * one);
  EXPECT_DOUBLE_EQ(tokens_to_hide(20.0, 100e12, 6e9), 0.5 * one);
  EXPECT_DOUBLE_EQ(tokens_to_hide(40.0, 100e12, 3e9), 2.0 * one);
}

TEST(Hiding, RefusesZeroBandwidth) {
  EXPECT_THROW(static_cast<void>(tokens_to_hide(20.0, 100e12, 0.0)), Error);
  EXPECT_THROW(static_cast<void>(tokens_to_hide(20.0, 0.0, 1e9)), Error);
}

}  // namespace
}  // namespace ballast::plan::hiding_test
