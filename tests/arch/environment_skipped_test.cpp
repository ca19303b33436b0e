// All tests are skipped by a global environment, which Google Test counts as passed.
#include <gtest/gtest.h>

namespace {

class NoDevice : public testing::Environment {
 public:
  void SetUp() override { GTEST_SKIP() << "there is no device"; }
};

const auto* const registered = testing::AddGlobalTestEnvironment(new NoDevice);

TEST(Skipped, ByTheEnvironment) {
  EXPECT_NE(registered, nullptr);
}

}  // namespace
