#include <gtest/gtest.h>

#include "masters.h"

namespace ballast::cpu_adam::exhaustive_test {
namespace {

using test::kHalf;

TEST(SplitWeights, EveryMasterPassesTheBestKernelUnchanged) {
  constexpr std::size_t kBlocks = 64;
  const Updater updater({.isa = active()});
  std::vector<std::uint16_t> highs(kBlocks);
  test::Masters masters(highs);
  std::size_t wrong = 0;
  for (std::size_t block = 0; block < kHalf; block += kBlocks) {
    for (std::size_t i = 0; i < kBlocks; ++i) highs[i] = static_cast<std::uint16_t>(block + i);
    masters.set_highs(highs);
    wrong += masters.changed_by(updater);
  }
  EXPECT_EQ(wrong, 0U);
}

}  // namespace
}  // namespace ballast::cpu_adam::exhaustive_test
