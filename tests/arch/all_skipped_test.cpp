#include <gtest/gtest.h>

// A program whose tests all skip themselves must exit with status 77 (see its Meson test).

TEST(AllSkipped, SkipsItself) {
  GTEST_SKIP() << "on purpose";
}
