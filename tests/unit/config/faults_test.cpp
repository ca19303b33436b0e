#include <gtest/gtest.h>

#include "tests/unit/config/samples.h"

// Keys of checkpoints and of reactions to failures.

namespace ballast::config::faults_test {
namespace {

using test::error_of;
using test::kMinimal;
using test::parse_text;
using test::with;
using Action = SpikeSection::Action;

std::string refusal(const std::string& override) {
  const std::string message = error_of(kMinimal, {override});
  const auto end = message.find("): ");
  return end == std::string::npos ? message : message.substr(end + 3);
}

TEST(ConfigCheckpoints, AreWrittenAfterStepsOrATime) {
  const auto every = [](const std::string& value) {
    const BallastSection b = parse_text(kMinimal, {"ballast.checkpoint_every=" + value}).ballast;
    return std::pair(b.checkpoint_every, b.checkpoint_seconds);
  };
  using Both = std::pair<std::uint64_t, double>;
  EXPECT_EQ(every("500"), Both(500, 0.0));
  EXPECT_EQ(every("500 steps"), Both(500, 0.0));
  EXPECT_EQ(every("1 step"), Both(1, 0.0));
  EXPECT_EQ(every("30m"), Both(0, 1800.0));
  EXPECT_EQ(every("1.5 hours"), Both(0, 5400.0));
  EXPECT_EQ(every("0"), Both(0, 0.0));
  EXPECT_TRUE(parse_text(kMinimal, {"ballast.checkpoint_every=2s"}).ballast.writes_checkpoints());
  EXPECT_FALSE(parse_text(kMinimal).ballast.writes_checkpoints());
}

TEST(ConfigCheckpoints, KeepTheirTimeWhenPrinted) {
  for (const char* time : {"45s", "0.25s", "30m", "90m", "2h", "1d", "1000d"}) {
    const Config before = parse_text(kMinimal, {std::string("ballast.checkpoint_every=") + time});
    EXPECT_NE(print(before).find("\"checkpoint_every\": \"" + std::string(time) + "\""),
              std::string::npos)
        << print(before);
    EXPECT_EQ(parse_text(print(before)).ballast.checkpoint_seconds,
              before.ballast.checkpoint_seconds);
  }
}

TEST(ConfigCheckpoints, RefuseOtherIntervalsWithASuggestion) {
  const auto message = [](const std::string& value) {
    return refusal("ballast.checkpoint_every=" + value);
  };
  const std::string expected = "expected a number of steps or a time such as \"30m\", got ";
  const std::string units = " for a time (s, m, h, d; at most 1000 days)";
  EXPECT_EQ(message("30x"), expected + "the string \"30x\"; write 30 for steps or \"30m\"" + units);
  EXPECT_EQ(message("30 mintes"),
            expected + "the string \"30 mintes\"; write 30 for steps or \"30 minutes\"" + units);
  EXPECT_EQ(message("\"30\""),
            expected + "the string \"30\"; write 30 for steps or \"30m\"" + units);
  EXPECT_EQ(message("2000d"),
            expected + "the string \"2000d\"; write 2000 for steps or \"2000m\"" + units);
  EXPECT_EQ(message("often"), expected + "the string \"often\"");
  EXPECT_EQ(message("true"), expected + "true");
  EXPECT_EQ(message("-1"), "must be at least 0, got -1");
  EXPECT_EQ(message("auto"),
            "\"auto\" is not accepted here; expected a number of steps or a time "
            "such as \"30m\"");
}

TEST(ConfigSpike, IsAnActionOrAnObject) {
  EXPECT_EQ(parse_text(kMinimal).ballast.spike.action, Action::off);
  const SpikeSection name = parse_text(kMinimal, {"ballast.spike=warn"}).ballast.spike;
  EXPECT_EQ(name.action, Action::warn);
  EXPECT_EQ(name.window, 50U);
  EXPECT_EQ(name.factor, 6.0);
  EXPECT_EQ(name.most_rollbacks, 3U);
  const SpikeSection object =
      parse_text(with(R"("ballast": {"checkpoint_every": 9, "spike": {"action": "rollback",
                          "window": 20, "factor": 4.5, "most_rollbacks": 1}})"))
          .ballast.spike;
  EXPECT_EQ(object.action, Action::rollback);
  EXPECT_EQ(object.window, 20U);
  EXPECT_EQ(object.factor, 4.5);
  EXPECT_EQ(object.most_rollbacks, 1U);
}

TEST(ConfigSpike, RefusesImpossibleValues) {
  EXPECT_EQ(refusal("ballast.spike=rolback"),
            "expected one of off, warn, stop, rollback, got the string \"rolback\" (did you mean "
            "'rollback'?)");
  EXPECT_EQ(refusal("ballast.spike={\"window\": 20}"),
            "lacks \"action\"; add \"warn\", \"stop\" or \"rollback\"");
  EXPECT_EQ(refusal("ballast.spike={\"action\": \"warn\", \"sigma\": 1}"), "unknown key");
  EXPECT_EQ(refusal("ballast.spike={\"action\": \"warn\", \"window\": 3}"),
            "must be at least 4, got 3");
  EXPECT_EQ(refusal("ballast.spike=rollback"),
            "\"rollback\" needs checkpoints to go back to; set ballast.checkpoint_every");
}

TEST(ConfigOnError, NeedsCheckpointsToResume) {
  EXPECT_EQ(parse_text(kMinimal).ballast.on_error, OnError::stop);
  EXPECT_EQ(refusal("ballast.on_error=resume"),
            "\"resume\" needs checkpoints to go back to; set ballast.checkpoint_every");
  const std::vector<std::string> both = {"ballast.on_error=resume", "ballast.checkpoint_every=30m",
                                         "optimizer.type=SGD"};
  EXPECT_EQ(parse_text(kMinimal, both).ballast.on_error, OnError::resume);
  EXPECT_TRUE(parse_text(kMinimal, both).notes.empty());
  const Config ranks = parse_text(kMinimal, both, 2);
  ASSERT_EQ(ranks.notes.size(), 1U);
  EXPECT_EQ(ranks.notes[0].find("ballast.on_error: \"resume\" is for a run of one rank"), 0U);
}

}  // namespace
}  // namespace ballast::config::faults_test
