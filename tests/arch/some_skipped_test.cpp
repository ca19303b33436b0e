#include <gtest/gtest.h>

// A program in which some tests ran has passed (see its Meson test).

TEST(SomeSkipped, Runs) {
  SUCCEED();
}
TEST(SomeSkipped, SkipsItself) {
  GTEST_SKIP() << "on purpose";
}
