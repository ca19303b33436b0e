#include <algorithm>
#include <set>

#include <gtest/gtest.h>

#include "ballast/aio/queue.h"

#include "tools/io/search.h"

namespace ballast::tools::io_search_test {
namespace {

const std::vector<std::string> kBackends = {"io_uring", "threads"};

TEST(IoSearch, TriesEachSettingOnceAndNoneWithMoreInFlightThanAQueueAllows) {
  std::set<std::tuple<Bytes, unsigned, std::string>> seen;
  const auto settings = settings_to_try(kBackends);
  for (const IoSetting& setting : settings) {
    EXPECT_LE(setting.in_flight(), aio::QueueOptions().in_flight_bytes);
    EXPECT_TRUE(seen.emplace(setting.block, setting.depth, setting.backend).second);
  }
  const auto of_second =
      std::count_if(settings.begin(), settings.end(),
                    [](const IoSetting& setting) { return setting.backend == kBackends[1]; });
  EXPECT_GT(of_second, 0);
  EXPECT_LT(of_second, std::ssize(settings_to_try({"threads"})));
}

TEST(IoSearch, ChoosesTheLeastInFlightWithinThreePercentOfTheBest) {
  const IoSetting most{4 * kMiB, 16, "io_uring"};
  const IoSetting less{kMiB, 16, "io_uring"};
  const IoSetting least{256 * kKiB, 4, "io_uring"};
  EXPECT_EQ(choose({{most, 1.0}, {less, 0.98}, {least, 0.96}}, kBackends), less);
  EXPECT_EQ(choose({{most, 1.0}, {less, 0.96}, {least, 0.96}}, kBackends), most);
  EXPECT_EQ(choose({{most, 0.5}, {less, 0.49}, {least, 0.486}}, kBackends), least);
}

TEST(IoSearch, ChoosesTheBetterBackendAmongEquals) {
  const IoSetting uring{kMiB, 32, "io_uring"};
  const IoSetting threads{kMiB, 4, "threads"};
  EXPECT_EQ(choose({{threads, 1.0}, {uring, 0.98}}, kBackends), uring);
  EXPECT_EQ(choose({{threads, 1.0}, {uring, 0.9}}, kBackends), threads);
  const IoSetting same{2 * kMiB, 16, "io_uring"};
  EXPECT_EQ(choose({{uring, 0.98}, {same, 0.99}}, kBackends), same);
}

TEST(IoSearch, OneTurnDoesNotBeatMany) {
  const IoSetting lucky{kMiB, 64, "io_uring"};
  const IoSetting steady{kMiB, 8, "io_uring"};
  const std::vector<IoTrial> trials = {{lucky, {9.0}}, {steady, {4.0, 5.0, 6.0, 5.0}}, {{}, {}}};
  const auto proven = scores_of(trials, true);
  ASSERT_EQ(proven.size(), 1U);
  EXPECT_EQ(proven.front().setting, steady);
  EXPECT_EQ(proven.front().share, 1.0);
  const auto all = scores_of(trials, false);
  ASSERT_EQ(all.size(), 2U);
  EXPECT_DOUBLE_EQ(all.back().share, 5.0 / 9.0);
}

TEST(IoSearch, SeveralPathsShareTheSettingThatIsBestForTheWorst) {
  const IoSetting a{kMiB, 8, "io_uring"};
  const IoSetting b{kMiB, 16, "io_uring"};
  const IoSetting c{kMiB, 32, "io_uring"};
  const auto scores =
      common_scores({{{a, {4.0}}, {b, {3.0}}, {c, {4.0}}}, {{a, {1.0}}, {b, {2.0}}}});
  ASSERT_EQ(scores.size(), 2U);
  EXPECT_DOUBLE_EQ(scores[0].share, 0.5);
  EXPECT_DOUBLE_EQ(scores[1].share, 0.75);
  EXPECT_EQ(choose(scores, kBackends), b);
}

}  // namespace
}  // namespace ballast::tools::io_search_test
