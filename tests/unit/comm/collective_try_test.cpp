#include <functional>
#include <new>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/comm/agreement.h"

#include "tests/support/thread_ranks.h"

namespace ballast::comm::collective_try_test {
namespace {

/// The result of collective_try() on each of `world` ranks with `work`: "" if it returns, otherwise
/// the message, with the prefix "alone: " if the error is not a JointError.
std::vector<std::string> outcomes(std::uint32_t world,
                                  const std::function<void(Ranks& ranks)>& work) {
  std::vector<std::string> found(world);
  test::as_ranks(world, [&](Ranks& ranks) {
    try {
      collective_try(&ranks, [&] { work(ranks); });
    } catch (const JointError& error) {
      found[ranks.rank()] = error.what();
    } catch (const Error& error) {
      found[ranks.rank()] = std::string("alone: ") + error.what();
    }
  });
  return found;
}

using Texts = std::vector<std::string>;

TEST(Together, ReturnsWhenEveryRankSucceeded) {
  EXPECT_EQ(outcomes(3, [](Ranks& ranks) { ranks.barrier(); }), (Texts{"", "", ""}));
}

TEST(Together, ACommonFailureNamesNoRank) {
  const auto found = outcomes(3, [](Ranks&) { throw Error(ErrorCategory::config, "no such key"); });
  EXPECT_EQ(found, Texts(3, "no such key"));
}

TEST(Together, TheFirstRankThatFailedIsNamedToAll) {
  const auto found = outcomes(4, [](Ranks& ranks) {
    if (ranks.rank() >= 2) {
      throw Error(ErrorCategory::io, "disk " + std::string(ranks.rank() * 10, 'x') + " is full");
    }
  });
  EXPECT_EQ(found,
            Texts(4, "rank 2 on " + host_name() + ": disk " + std::string(20, 'x') + " is full"));
}

TEST(Together, KeepsTheCategoryOfTheRankThatFailed) {
  test::as_ranks(2, [](Ranks& ranks) {
    try {
      collective_try(&ranks, [&] {
        if (ranks.rank() == 1) throw Error(ErrorCategory::memory, "too large");
      });
      ADD_FAILURE() << "nothing was thrown";
    } catch (const Error& error) {
      EXPECT_EQ(error.category(), ErrorCategory::memory);
    }
  });
}

TEST(Together, MayBeNestedAndReportsStandardExceptions) {
  const auto found = outcomes(2, [](Ranks& ranks) {
    collective_try(&ranks, [&] {
      if (ranks.rank() == 0) throw std::bad_alloc();
    });
  });
  EXPECT_EQ(found, Texts(2, "rank 0 on " + host_name() + ": out of memory"));
}

TEST(Together, CommunicationErrorsPassThrough) {
  const auto found = outcomes(2, [](Ranks&) { throw Error(ErrorCategory::comm, "no answer"); });
  EXPECT_EQ(found, Texts(2, "alone: no answer"));
}

TEST(Together, OneRankNeedsNoAgreement) {
  int calls = 0;
  collective_try(nullptr, [&] { ++calls; });
  EXPECT_EQ(outcomes(1, [](Ranks&) { throw Error(ErrorCategory::io, "full"); }),
            Texts{"alone: full"});
  EXPECT_EQ(calls, 1);
}

}  // namespace
}  // namespace ballast::comm::collective_try_test
