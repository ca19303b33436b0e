#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/calibrate/machine_files.h"
#include "ballast/core/error.h"

#include "tests/support/captured_log.h"
#include "tests/support/temp_dir.h"
#include "tests/support/variable.h"

namespace ballast::calibrate::kept_choices_test {
namespace {

using model::ProductAlgorithm;

class KeptChoices : public testing::Test {
 protected:
  /// The algorithm that `choices` return if `fastest` is the fastest.
  ProductAlgorithm chosen(model::ProductChoices& choices, std::size_t fastest,
                          const std::string& product = "a product",
                          const std::string& library = "a GPU") {
    return candidates_[choices.choose(library, product, candidates_, [&] {
      ++timed_;
      return fastest;
    })];
  }
  ProductAlgorithm chosen(std::size_t fastest, const std::string& product = "a product",
                          const std::string& library = "a GPU") {
    return chosen(*kept_product_choices(), fastest, product, library);
  }

  test::TempDir directory_;
  test::Variable cache_ = {"XDG_CACHE_HOME", directory_.path().c_str()};
  std::vector<ProductAlgorithm> candidates_ = {
      {1, 2, 3, 4, 5, 6, 7, 8}, {1, 2, 3, 4, 5, 6, 7, UINT64_MAX}, {0, 2, 3, 4, 5, 6, 7, 8}};
  int timed_ = 0;
};

TEST_F(KeptChoices, AreTheSameInLaterRuns) {
  const test::CapturedLog log;
  EXPECT_EQ(chosen(1), candidates_[1]);
  EXPECT_EQ(chosen(2), candidates_[1]);
  EXPECT_EQ(timed_, 1);
  // In another order they are still the same algorithms.
  std::swap(candidates_[0], candidates_[1]);
  EXPECT_EQ(chosen(2), candidates_[0]);
  EXPECT_EQ(timed_, 1);
  EXPECT_EQ(log.text(), "");
}

TEST_F(KeptChoices, AreForOneProductAndLibrary) {
  EXPECT_EQ(chosen(1), candidates_[1]);
  EXPECT_EQ(chosen(2, "another product"), candidates_[2]);
  EXPECT_EQ(chosen(0, "a product", "another GPU"), candidates_[0]);
  EXPECT_EQ(timed_, 3);
  EXPECT_EQ(chosen(0), candidates_[1]);
  EXPECT_EQ(chosen(0, "another product"), candidates_[2]);
  EXPECT_EQ(chosen(1, "a product", "another GPU"), candidates_[0]);
  EXPECT_EQ(timed_, 3);
}

TEST_F(KeptChoices, IgnoreAFileOfAnotherLibrary) {
  EXPECT_EQ(chosen(1), candidates_[1]);
  std::filesystem::rename(product_choices_file("a GPU"), product_choices_file("another GPU"));
  EXPECT_EQ(chosen(2, "a product", "another GPU"), candidates_[2]);
  EXPECT_EQ(timed_, 2);
}

TEST_F(KeptChoices, ADamagedFileIsOneWarningAndReplaced) {
  const std::string file = product_choices_file("a GPU").string();
  std::filesystem::create_directory(directory_.path() / "ballast");
  const std::string begin = R"({"library": "a GPU", "algorithms": )";
  for (const std::string& damaged :
       {std::string("{\"lib"), std::string("{}"), begin + "[]}", begin + R"({"a product": 7}})",
        begin + R"({"a product": [1, 2, 3, 4, 5, 6, 7]}})",
        begin + R"({"a product": [1, 2, 3, 4, 5, 6, 7, -8]}})",
        begin + R"({"another": [1, 2, 3, 4, 5, 6, 7, "8"]}})"}) {
    std::ofstream(file) << damaged;
    const test::CapturedLog log;
    const auto choices = kept_product_choices();
    EXPECT_EQ(chosen(*choices, 1), candidates_[1]);
    EXPECT_EQ(chosen(*choices, 2, "another"), candidates_[2]);
    const std::string text = log.text();
    EXPECT_EQ(text.find("products: cannot use the kept algorithms, timing again: " + file + ":"),
              0U)
        << damaged << "\n"
        << text;
    EXPECT_EQ(text.find('\n'), text.size() - 1) << text;
    EXPECT_EQ(chosen(0), candidates_[1]) << damaged;
    EXPECT_EQ(chosen(0, "another"), candidates_[2]) << damaged;
  }
}

TEST_F(KeptChoices, AnAlgorithmThatIsNotOfferedAnyMoreIsTimedAgain) {
  EXPECT_EQ(chosen(1), candidates_[1]);
  candidates_[1][0] = 9;
  const test::CapturedLog log;
  EXPECT_EQ(chosen(2), candidates_[2]);
  EXPECT_EQ(log.text(),
            "products: cuBLASLt does not offer the kept algorithm of a product any more, timing "
            "again\n");
  EXPECT_EQ(chosen(0), candidates_[2]);
}

TEST_F(KeptChoices, AFailedTimingKeepsNothing) {
  const auto choices = kept_product_choices();
  EXPECT_THROW(
      choices->choose("a GPU", "a product", candidates_,
                      []() -> std::size_t { throw Error(ErrorCategory::device, "refused"); }),
      Error);
  EXPECT_EQ(chosen(*choices, 1), candidates_[1]);
}

TEST_F(KeptChoices, GiveOneWarningIfTheFileCannotBeWritten) {
  const auto file = directory_.write("file", "").string();
  const test::Variable nowhere("XDG_CACHE_HOME", file.c_str());
  const test::CapturedLog log;
  const auto choices = kept_product_choices();
  EXPECT_EQ(chosen(*choices, 1), candidates_[1]);
  EXPECT_EQ(chosen(*choices, 2), candidates_[2]);
  const std::string text = log.text();
  EXPECT_EQ(text.find("products: cannot keep the timed algorithms, so later runs and other ranks "
                      "may have other bits: cannot create the directory " +
                      file + "/ballast"),
            0U)
      << text;
  EXPECT_EQ(text.find('\n'), text.size() - 1) << text;
}

TEST_F(KeptChoices, WithoutAHomeAreOneWarning) {
  const test::Variable cache("XDG_CACHE_HOME", nullptr);
  const test::Variable home("HOME", nullptr);
  const test::CapturedLog log;
  const auto choices = kept_product_choices();
  EXPECT_EQ(chosen(*choices, 1), candidates_[1]);
  EXPECT_EQ(chosen(*choices, 2), candidates_[2]);
  EXPECT_EQ(log.text(),
            "products: cannot keep the timed algorithms, so later runs and other ranks may have "
            "other bits: neither XDG_CACHE_HOME nor HOME is an absolute path\n");
}

TEST_F(KeptChoices, AreLeftOutWhereTheyCannotBeKept) {
  const auto file = directory_.write("file", "").string();
  const test::Variable nowhere("XDG_CACHE_HOME", file.c_str());
  const test::CapturedLog log;
  const auto choices = kept_product_choices(Unkept::first);
  EXPECT_EQ(chosen(*choices, 1), candidates_[0]);
  EXPECT_EQ(chosen(*choices, 2, "another"), candidates_[0]);
  EXPECT_EQ(timed_, 0);
  EXPECT_EQ(choices->name(), "");
  const std::string text = log.text();
  EXPECT_EQ(text.find("products: not timed, because choices cannot be kept: cannot create"), 0U)
      << text;
  EXPECT_EQ(text.find('\n'), text.size() - 1) << text;
}

TEST_F(KeptChoices, HaveTheNameOfTheirFile) {
  const auto first = kept_product_choices();
  EXPECT_EQ(first->name(), "");
  chosen(*first, 1);
  chosen(*first, 1, "another");
  const std::string name = first->name();
  EXPECT_EQ(name.size(), 8U) << name;
  const auto later = kept_product_choices(Unkept::first);
  EXPECT_EQ(chosen(*later, 2), candidates_[1]);
  EXPECT_EQ(later->name(), name);
  std::filesystem::remove(product_choices_file("a GPU"));
  const auto other = kept_product_choices();
  chosen(*other, 1);
  EXPECT_NE(other->name(), name) << "another machine may choose differently";
  EXPECT_NE(other->name(), "");
}

TEST_F(KeptChoices, OfAFileWithoutANameGetOne) {
  std::filesystem::create_directory(directory_.path() / "ballast");
  std::ofstream(product_choices_file("a GPU"))
      << R"({"library": "a GPU", "algorithms": {"a product": [1, 2, 3, 4, 5, 6, 7, 8]}})";
  const auto first = kept_product_choices();
  EXPECT_EQ(chosen(*first, 2), candidates_[0]);
  const auto later = kept_product_choices();
  EXPECT_EQ(chosen(*later, 2), candidates_[0]);
  EXPECT_NE(first->name(), "");
  EXPECT_EQ(later->name(), first->name());
}

TEST_F(KeptChoices, AgreeBetweenRanksThatStartTogether) {
  constexpr std::size_t kRanks = 8;
  std::vector<std::size_t> found(kRanks);
  std::atomic<int> timed = 0;
  std::vector<std::thread> ranks;
  for (std::size_t rank = 0; rank < kRanks; ++rank) {
    ranks.emplace_back([&, rank] {
      found[rank] = kept_product_choices()->choose("a GPU", "a product", candidates_, [&] {
        ++timed;
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        return rank % candidates_.size();
      });
    });
  }
  for (std::thread& rank : ranks) rank.join();
  EXPECT_EQ(timed, 1);
  EXPECT_EQ(found, std::vector<std::size_t>(kRanks, found[0]));
}

}  // namespace
}  // namespace ballast::calibrate::kept_choices_test
