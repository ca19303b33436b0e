#include <algorithm>
#include <set>

#include <gtest/gtest.h>

#include "ballast/aio/queue.h"

#include "tools/io_load/tune.h"

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
  const IoSetting threads{kMiB, 32, "threads"};
  EXPECT_EQ(choose({{threads, 1.0}, {uring, 0.98}}, kBackends), uring);
  EXPECT_EQ(choose({{threads, 1.0}, {uring, 0.9}}, kBackends), threads);
  const IoSetting less{kMiB, 4, "threads"};
  EXPECT_EQ(choose({{less, 0.98}, {uring, 1.0}}, kBackends), less);
  const IoSetting same{2 * kMiB, 16, "io_uring"};
  EXPECT_EQ(choose({{uring, 0.98}, {same, 0.99}}, kBackends), same);
}

TEST(IoSearch, EverySettingThatWasTriedIsConsidered) {
  const IoSetting early{kMiB, 4, "io_uring"};
  const IoSetting steady{kMiB, 64, "io_uring"};
  const std::vector<IoTrial> trials = {{early, {4.9}}, {steady, {4.0, 5.0, 6.0, 5.0}}, {{}, {}}};
  const auto scores = scores_of(trials);
  ASSERT_EQ(scores.size(), 2U);
  EXPECT_DOUBLE_EQ(scores.front().share, 4.9 / 5.0);
  EXPECT_EQ(choose(scores, kBackends), early);
}

TEST(IoSearch, TrialsThatDecideAfterFewTurnsAreDoubtful) {
  const IoSetting small{kMiB, 4, "io_uring"};
  const IoSetting large{kMiB, 64, "io_uring"};
  const IoSetting slow{kMiB, 8, "io_uring"};
  const std::vector<double> four = {5.0, 5.0, 5.0, 5.0};
  // The fastest has one lucky turn.
  EXPECT_EQ(doubtful({{large, four}, {small, {9.0}}, {slow, {1.0}}}, kBackends), 1U);
  // The fastest is sure, but the one with the least memory is not.
  EXPECT_EQ(doubtful({{large, four}, {slow, {1.0}}, {small, {4.9}}}, kBackends), 2U);
  EXPECT_EQ(doubtful({{large, four}, {slow, {1.0}}, {small, {4.9, 4.9}}}, kBackends), std::nullopt);
  EXPECT_EQ(doubtful({{large, {}}, {small, {}}}, kBackends), std::nullopt);
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
