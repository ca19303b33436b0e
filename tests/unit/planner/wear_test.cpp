#include <vector>

#include <gtest/gtest.h>

#include "ballast/setup/forecast.h"
#include "ballast/setup/translate.h"

#include "tests/support/tiny_config.h"

namespace ballast::setup::wear_test {
namespace {

TEST(Wear, IsThePaceOfADayAndTheLifeOfTheBusiestDrive) {
  const std::vector<Bytes> one = {864'000'000};  // in 24 s: 36 MB/s, 3.1104 TB a day
  const auto wear = estimate_wear(one, 24.0);
  ASSERT_TRUE(wear);
  EXPECT_DOUBLE_EQ(wear->terabytes_per_day, 3.1104);
  EXPECT_DOUBLE_EQ(wear->days, 600.0 / 3.1104);
  EXPECT_EQ(describe(*wear), "3.1 TB a day at this pace: a drive rated 600 TBW lasts 193 days");
}

TEST(Wear, OfSeveralPathsIsThatOfTheOneThatGetsMost) {
  const std::vector<Bytes> three = {1'000'000'000, 6'000'000'000, 5'000'000'000};
  const auto wear = estimate_wear(three, 86400.0);
  ASSERT_TRUE(wear);
  EXPECT_DOUBLE_EQ(wear->terabytes_per_day, 0.012);
  EXPECT_DOUBLE_EQ(wear->days, 100'000.0);
}

TEST(Wear, IsUnknownWithoutBytesOrTime) {
  EXPECT_FALSE(estimate_wear({}, 5.0));
  EXPECT_FALSE(estimate_wear(std::vector<Bytes>{0, 0}, 5.0));
  EXPECT_FALSE(estimate_wear(std::vector<Bytes>{5}, 0.0));
}

TEST(Wear, IsPrintedInSuitableUnits) {
  const auto life = [](double days) {
    const std::string text = describe({.terabytes_per_day = 1.0, .days = days});
    return text.substr(text.find("lasts ") + 6);
  };
  EXPECT_EQ(life(0.25), "0.25 days");
  EXPECT_EQ(life(1.0), "1 day");
  EXPECT_EQ(life(9.96), "10 days");
  EXPECT_EQ(life(1095.0), "1095 days");
  EXPECT_EQ(life(1461.0), "4 years");
  EXPECT_EQ(life(1e6), "more than 100 years");
  EXPECT_EQ(describe({.terabytes_per_day = 1234.5, .days = 1.0}).substr(0, 12), "1234 TB a da");
}

TEST(Wear, OfAChangeIsItsBytesADayAndTheLifeOfADrive) {
  EXPECT_EQ(describe_writes({.terabytes_per_day = 31.2, .days = 77.0}),
            "31 TB a day to NVMe, a drive lasts 77 days");
  EXPECT_EQ(describe_writes({.terabytes_per_day = 0.0, .days = 0.0}), "nothing is written to NVMe");
}

TEST(Wear, CountsTheBytesOfAllRanksOfAMachine) {
  const auto written = [](const std::string& paths, std::uint32_t ranks,
                          const std::vector<Bytes>& own) {
    const config::Config config = test::tiny_config(
        R"("vocab_size": 131, "hidden_size": 32, "num_layers": 2, "num_heads": 2)", true, "/run",
        {"zero_optimization.offload_optimizer.nvme_path=" + paths});
    return written_by_machine(config, ranks, own);
  };
  using Written = std::vector<Bytes>;
  EXPECT_EQ(written("null", 1, {12}), (Written{12}));
  EXPECT_EQ(written("null", 3, {12}), (Written{36}));
  EXPECT_EQ(written(R"(["/a", "/b"])", 1, {9, 3}), (Written{9, 3}));
  EXPECT_EQ(written(R"(["/a", "/b"])", 2, {12}), (Written{12, 12}));
  EXPECT_EQ(written(R"(["/a", "/b"])", 3, {12}), (Written{24, 12}));
  EXPECT_EQ(written(R"(["/a", "/b", "/c", "/d"])", 2, {9, 3}), (Written{9, 9, 3, 3}));
  EXPECT_EQ(written(R"(["/a", "/b", "/c"])", 2, {9, 3}), (Written{9, 12, 3}));
  EXPECT_EQ(written(R"(["/a", "/b"])", 1, {12}), (Written{6, 6})) << "a sum is divided evenly";
}

}  // namespace
}  // namespace ballast::setup::wear_test
