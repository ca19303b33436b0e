#include <gtest/gtest.h>

// A program of which every test skips itself must say so with status 77 (see its Meson test).

TEST(AllSkipped, SkipsItself) {
  GTEST_SKIP() << "on purpose";
}
