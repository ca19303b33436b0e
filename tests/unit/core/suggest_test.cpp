#include <vector>

#include <gtest/gtest.h>

#include "ballast/core/error.h"

namespace ballast::suggest_test {
namespace {

const std::vector<std::string> kWords = {"gradient_clipping", "scheduler", "optimizer"};

TEST(Suggest, FindsSwapsInsertionsAndCase) {
  EXPECT_EQ(nearest("gradient_clipp1ng", kWords), "gradient_clipping");
  EXPECT_EQ(nearest("shceduler", kWords), "scheduler");
  EXPECT_EQ(nearest("Optimizer", kWords), "optimizer");
}

TEST(Suggest, SuggestsNothingIfNothingIsSimilar) {
  EXPECT_EQ(nearest("banana", kWords), "");
  EXPECT_EQ(did_you_mean("banana", kWords), "");
  EXPECT_EQ(did_you_mean("optimiser", kWords), " (did you mean 'optimizer'?)");
}

TEST(Suggest, ListsWords) {
  EXPECT_EQ(listed({}), "");
  EXPECT_EQ(listed(std::vector<std::string>{"one"}), "one");
  EXPECT_EQ(listed(std::vector<std::string>{"one", "two"}), "one, two");
}

}  // namespace
}  // namespace ballast::suggest_test
