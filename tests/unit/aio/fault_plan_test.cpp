#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <limits>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/core/error.h"

#include "aio/faults/faulty_transport.h"

namespace ballast::aio::fault_plan_test {
namespace {

Block block(Direction direction, std::size_t length = 64 * kKiB) {
  return {.direction = direction, .length = length};
}

/// Errors that `plan` chooses for `count` starts in `direction`.
std::vector<int> errors(FaultPlan& plan, Direction direction, std::size_t count) {
  std::vector<int> found(count);
  for (int& error : found) error = plan(block(direction)).error_number;
  return found;
}

std::string mistake(const std::string& text) {
  try {
    (void)FaultPlan(text);
  } catch (const Error& error) {
    EXPECT_EQ(error.category(), ErrorCategory::config);
    return error.what();
  }
  return "accepted";
}

TEST(FaultPlan, FailsEveryBlockByDefault) {
  FaultPlan plan("eio");
  EXPECT_EQ(errors(plan, Direction::read, 3), (std::vector<int>{EIO, EIO, EIO}));
  EXPECT_EQ(errors(plan, Direction::write, 2), (std::vector<int>{EIO, EIO}));
}

TEST(FaultPlan, CountsOnlyTheBlocksOfItsDirection) {
  FaultPlan plan("enospc:after=2:every=2:times=2");
  EXPECT_EQ(errors(plan, Direction::read, 4), (std::vector<int>(4, 0)));
  EXPECT_EQ(errors(plan, Direction::write, 9),
            (std::vector<int>{0, 0, 0, ENOSPC, 0, ENOSPC, 0, 0, 0}));
}

TEST(FaultPlan, SparesEveryOtherStartFromFaultsThatAreRetried) {
  FaultPlan plan("eintr");
  EXPECT_EQ(errors(plan, Direction::read, 4), (std::vector<int>{0, EINTR, 0, EINTR}));
}

TEST(FaultPlan, OnChoosesTheDirection) {
  FaultPlan plan("eio:on=write");
  EXPECT_EQ(errors(plan, Direction::read, 2), (std::vector<int>{0, 0}));
  EXPECT_EQ(errors(plan, Direction::write, 1), (std::vector<int>{EIO}));
}

TEST(FaultPlan, SeveralFaultsMayApplyToOneBlock) {
  FaultPlan plan("late:reaps=3,late:reaps=2,reorder,torn,lost,flip,short:bytes=8KiB,hang:on=read");
  const Fault write = plan(block(Direction::write));
  EXPECT_EQ(write.held_back, 3U);
  EXPECT_TRUE(write.reordered && write.torn && write.lost);
  EXPECT_FALSE(write.flip.has_value() || write.hang);
  EXPECT_EQ(write.at_most, 8 * kKiB);
  const Fault read = plan(block(Direction::read));
  EXPECT_TRUE(read.flip.has_value() && read.hang);
  EXPECT_FALSE(read.torn || read.lost);
}

TEST(FaultPlan, AShortTransferIsHalfUnlessBytesAreGiven) {
  FaultPlan plan("short");
  EXPECT_EQ(plan(block(Direction::read, 64 * kKiB)).at_most, 32 * kKiB);
  EXPECT_EQ(plan(block(Direction::read, 3 * kPage)).at_most, kPage);
  EXPECT_EQ(plan(block(Direction::read, kPage)).at_most, kPage);
}

TEST(FaultPlan, ChanceDependsOnTheSeed) {
  const auto hits = [](const std::string& text) {
    FaultPlan plan(text);
    return errors(plan, Direction::write, 1000);
  };
  EXPECT_EQ(hits("eio:percent=30:seed=7"), hits("eio:percent=30:seed=7"));
  EXPECT_NE(hits("eio:percent=30:seed=7"), hits("eio:percent=30:seed=8"));
  const std::vector<int> third = hits("eio:percent=30");
  const auto count = std::count(third.begin(), third.end(), EIO);
  EXPECT_GT(count, 200);
  EXPECT_LT(count, 400);
  EXPECT_EQ(hits("eio:percent=100"), std::vector<int>(1000, EIO));
  EXPECT_EQ(hits("eio:percent=0"), std::vector<int>(1000, 0));
}

TEST(FaultPlan, AMistakeIsNamedWithASuggestion) {
  EXPECT_EQ(mistake("enopsc"),
            "there is no fault 'enopsc' (did you mean 'enospc'?); choose from short, eio, enospc, "
            "eintr, eagain, late, reorder, flip, torn, lost, hang");
  EXPECT_EQ(mistake("eio:evry=2"),
            "fault eio has no key 'evry' (did you mean 'every'?); choose from on, after, every, "
            "times, bytes, reaps, seed, percent");
  EXPECT_EQ(mistake("eio:times"), "fault eio: 'times' has no value; write times=VALUE");
  EXPECT_EQ(mistake("eio:times=x"), "times=x: write a whole number from 1 up");
  EXPECT_EQ(mistake("eio:times=0"), "times=0: write a whole number from 1 up");
  EXPECT_EQ(mistake("eio:after=-1"), "after=-1: write a whole number from 0 up");
  EXPECT_EQ(mistake("eio:percent=101"), "percent=101: write a number from 0 to 100");
  EXPECT_EQ(mistake("eio:percent=nan"), "percent=nan: write a number from 0 to 100");
  EXPECT_EQ(mistake("eio:on=both"), "on=both: write on=read or on=write");
  EXPECT_EQ(mistake("flip:on=write"), "fault flip applies to reads only; remove on=write");
  EXPECT_EQ(mistake("eio:bytes=4096"), "bytes belongs to fault short, not eio");
  EXPECT_EQ(mistake("eio:reaps=1"), "reaps belongs to fault late, not eio");
  EXPECT_EQ(mistake("short:bytes=many").rfind("'many' is not a size", 0), 0U);
  EXPECT_EQ(mistake("eio,").rfind("there is no fault ''", 0), 0U);
}

TEST(FaultPlan, TheEnvironmentVariableIsReadAndNamed) {
  unsetenv("BALLAST_IO_FAULTS");
  EXPECT_FALSE(faults_from_environment().has_value());
  setenv("BALLAST_IO_FAULTS", "", 1);
  EXPECT_FALSE(faults_from_environment().has_value());
  setenv("BALLAST_IO_FAULTS", "eio:on=write:after=100:times=1", 1);
  auto plan = faults_from_environment();
  ASSERT_TRUE(plan.has_value());
  EXPECT_EQ(plan->text(), "eio:on=write:after=100:times=1");
  EXPECT_EQ(errors(*plan, Direction::write, 100), std::vector<int>(100, 0));
  EXPECT_EQ(errors(*plan, Direction::write, 2), (std::vector<int>{EIO, 0}));
  setenv("BALLAST_IO_FAULTS", "oops", 1);
  try {
    (void)faults_from_environment();
    ADD_FAILURE() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(
        std::string(error.what()).rfind("environment variable BALLAST_IO_FAULTS: there is", 0), 0U);
  }
  unsetenv("BALLAST_IO_FAULTS");
}

}  // namespace
}  // namespace ballast::aio::fault_plan_test
