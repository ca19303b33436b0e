#include "ballast/comm/agreement.h"

#include <functional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tests/support/thread_ranks.h"

namespace ballast::comm::agreement_test {
namespace {

using List = std::vector<Identity>;

Identity file(const std::string& name, const std::string& content) {
  return {.name = name, .subject = "/here/" + name, .content = content, .remedy = "copy it"};
}

/// The message of require_agreement() on each rank, which must be a JointError; "" if there is
/// none.
std::vector<std::string> messages(std::uint32_t world,
                                  const std::function<List(std::uint32_t rank)>& list) {
  std::vector<std::string> found(world);
  test::as_ranks(world, [&](Ranks& ranks) {
    try {
      require_agreement(&ranks, list(ranks.rank()));
    } catch (const JointError& error) {
      found[ranks.rank()] = error.what();
    }
  });
  return found;
}

TEST(Agreement, EqualListsAreNoError) {
  const auto found = messages(3, [](std::uint32_t rank) {
    List list = {file("a", "1"), file("b", "2")};
    list[1].subject = "/on/rank/" + std::to_string(rank);
    return list;
  });
  EXPECT_EQ(found, std::vector<std::string>(3));
}

TEST(Agreement, OfTwoRanksTheSecondIsNamed) {
  const std::string host = host_name();
  const auto found = messages(2, [](std::uint32_t rank) {
    return List{file("a", "1"), file("b", rank == 0 ? "2" : "3"), file("c", std::to_string(rank))};
  });
  EXPECT_EQ(found, std::vector<std::string>(2, "rank 1 on " + host +
                                                   ": /here/b differs from that of rank 0 on " +
                                                   host + " (3, not 2); copy it"));
}

TEST(Agreement, TheMinorityIsNamedWhicheverRankItIs) {
  const std::string host = host_name();
  for (std::uint32_t odd = 0; odd < 4; ++odd) {
    const auto found = messages(
        4, [odd](std::uint32_t rank) { return List{file("a", rank == odd ? "other" : "usual")}; });
    const std::string right = odd == 0 ? "1" : "0";
    EXPECT_EQ(found.back(), "rank " + std::to_string(odd) + " on " + host +
                                ": /here/a differs from that of rank " + right + " on " + host +
                                " (other, not usual); copy it");
  }
}

TEST(Agreement, FurtherRanksAreListed) {
  const auto found = messages(5, [](std::uint32_t rank) {
    return List{file("a", rank == 1 || rank == 4 ? "other" : "usual")};
  });
  EXPECT_NE(found.front().find("; so does rank 4; copy it"), std::string::npos) << found.front();
}

TEST(Agreement, AMissingNameDiffers) {
  const std::string host = host_name();
  for (const bool more : {false, true}) {
    const auto found = messages(3, [more](std::uint32_t rank) {
      return (rank == 2) == more ? List{file("a", "1"), file("b", "2")} : List{file("a", "1")};
    });
    EXPECT_EQ(found.front(), "rank 2 on " + host + ": /here/b differs from that of rank 0 on " +
                                 host + (more ? " (2, not missing)" : " (missing, not 2)") +
                                 "; copy it");
  }
}

TEST(Agreement, OneRankAgreesWithItself) {
  EXPECT_FALSE(find_disagreement(nullptr, {file("a", "1")}));
  EXPECT_EQ(messages(1, [](std::uint32_t) { return List{file("a", "1")}; }).front(), "");
}

}  // namespace
}  // namespace ballast::comm::agreement_test
