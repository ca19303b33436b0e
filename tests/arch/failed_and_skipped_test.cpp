#include <gtest/gtest.h>

// A failure counts more than what was skipped (see the Meson test).

TEST(FailedAndSkipped, Fails) {
  FAIL() << "on purpose";
}
TEST(FailedAndSkipped, SkipsItself) {
  GTEST_SKIP() << "on purpose";
}
