#include <set>

#include <gtest/gtest.h>

#include "ballast/plan/rates.h"
#include "ballast/plan/simulator.h"
#include "ballast/step/labels.h"
#include "ballast/step/problem.h"

#include "tests/unit/plan/unit_rates.h"

namespace ballast::step::rank_sizes_test {
namespace {

/// Three blocks in stage 3: one is sharded, one is replicated, one is trained in part.
Problem in_groups(std::uint32_t world, std::uint32_t group, bool per_rank = false) {
  model::StepProgram program;
  program.blocks.assign(3, {.name = "block", .per_rank = per_rank});
  Problem problem = {.index = std::make_shared<const ProgramIndex>(std::move(program)),
                     .sharers = world,
                     .stage = 3,
                     .hpz_partition_size = group};
  problem.blocks.assign(3, {.weight_bytes = 100 * kPage, .gradient_bytes = 100 * kPage});
  problem.blocks[1].replicated = problem.blocks[2].replicated = true;
  problem.blocks[2].gradient_bytes = 40 * kPage;
  return problem;
}

TEST(RankSizes, EveryPartHasOneOwner) {
  for (std::uint32_t world = 1; world <= 24; ++world) {
    for (std::uint32_t group = 1; group <= world; ++group) {
      if (world % group != 0) continue;
      const Problem work = in_groups(world, group);
      const RankSizes sizes(work);
      std::set<std::uint32_t> shards;
      for (std::uint32_t rank = 0; rank < world; ++rank) {
        shards.insert(sizes.shard_of(rank));
        EXPECT_EQ(sizes.owner_of(sizes.shard_of(rank)), rank);
      }
      EXPECT_EQ(shards.size(), world);
      EXPECT_EQ(*shards.rbegin(), world - 1);
    }
  }
}

TEST(RankSizes, AShareIsThePartsOfTheRanksThatKeepItInAllGroups) {
  const Problem work = in_groups(12, 4);
  const RankSizes sizes(work);
  EXPECT_EQ(sizes.copies(), 3U);
  for (std::uint32_t rank = 0; rank < 12; ++rank) {
    const std::uint32_t place = rank % 4;  // place in its group
    EXPECT_EQ(sizes.shard_of(rank) / 3, place);
    EXPECT_EQ(sizes.shard_at_home(0, rank), rank / 4);
    EXPECT_EQ(sizes.shard_at_home(1, rank), sizes.shard_of(rank));
  }
}

TEST(RankSizes, OfOneGroupAreThoseWithoutGroups) {
  const Problem grouped = in_groups(6, 6);
  const Problem plain = in_groups(6, 0);
  for (std::uint32_t rank = 0; rank < 6; ++rank) {
    EXPECT_EQ(RankSizes(grouped).shard_of(rank), rank);
    EXPECT_EQ(RankSizes(plain).shard_of(rank), rank);
    EXPECT_EQ(RankSizes(plain).shard_at_home(0, rank), 0U);
  }
  EXPECT_EQ(RankSizes(grouped).resident_weights(0), RankSizes(plain).resident_weights(0));
}

TEST(RankSizes, WeightsAreSplitOverAGroupAndTheRestOverAll) {
  const Problem work = in_groups(10, 2);
  const RankSizes sizes(work);
  EXPECT_EQ(sizes.resident_weights(0), 50 * kPage);
  EXPECT_EQ(sizes.updated_weights(0), 10 * kPage);
  EXPECT_EQ(sizes.updated_gradient(0), 10 * kPage);
  EXPECT_EQ(sizes.resident_weights(1), 100 * kPage);
  EXPECT_EQ(sizes.updated_weights(1), 10 * kPage);
  EXPECT_EQ(sizes.resident_weights(2), 100 * kPage);
  EXPECT_EQ(sizes.updated_weights(2), 4 * kPage);
  EXPECT_EQ(sizes.trained_weights(0), 50 * kPage);
  EXPECT_EQ(sizes.trained_weights(1), 100 * kPage);
  EXPECT_EQ(sizes.trained_weights(2), 40 * kPage);
}

TEST(RankSizes, AnExpertForEachRankIsSharedWithNone) {
  for (const std::uint32_t stage : {0U, 3U}) {
    Problem problem = in_groups(10, 2, true);
    problem.stage = stage;
    const RankSizes sizes(problem);
    EXPECT_FALSE(sizes.is_distributed(0) || sizes.shards_states(0) || sizes.shards_gradients(0));
    EXPECT_FALSE(sizes.shards_weights(0) || sizes.updates_shard(0));
    EXPECT_TRUE(sizes.keeps_part_of_weights(0) && sizes.keeps_part_of_states(0));
    EXPECT_EQ(sizes.resident_weights(0), 100 * kPage);
    EXPECT_EQ(sizes.padded_weights(0), 100 * kPage);
    EXPECT_EQ(sizes.updated_weights(0), 100 * kPage);
    EXPECT_EQ(sizes.updated_gradient(2), 40 * kPage);
    EXPECT_EQ(sizes.padded_gradient(2), 40 * kPage);
  }
}

/// An all-gather of weights: from the group, or of this rank's part from the ranks that keep it.
Operation gather(bool from_group) {
  Operation operation;
  operation.action = Action::gather;
  operation.payload = Payload::weights;
  operation.group = from_group ? RankGroup::weight_copy : RankGroup::same_share;
  operation.lane = Lane::gather;
  operation.bytes = 1000;
  return operation;
}

/// A schedule without plans for this number of ranks.
Schedule for_ranks(std::uint32_t ranks, std::uint32_t group) {
  Schedule schedule;
  schedule.ranks = ranks;
  const Problem problem = in_groups(ranks, group);
  schedule.ranks_in_group = RankSizes(problem).ranks_per_copy();
  return schedule;
}

TEST(RankSizes, GatherInAGroupTakesTheFabricsTimeWhenTheGroupIsInsideANode) {
  plan::Rates rates = plan::unit_rates();
  rates.fabric_per_second = 100.0;
  rates.network_per_second = 10.0;
  rates.ranks_per_node = 4;
  for (const std::uint32_t group : {2U, 4U}) {
    EXPECT_EQ(plan::seconds_alone(gather(true), for_ranks(24, group), rates), 10.0) << group;
    EXPECT_EQ(plan::seconds_alone(gather(false), for_ranks(24, group), rates), 100.0) << group;
  }
  // A group over several nodes, or one that does not end at a node's border.
  for (const std::uint32_t group : {0U, 3U, 8U, 24U}) {
    EXPECT_EQ(plan::seconds_alone(gather(true), for_ranks(24, group), rates), 100.0) << group;
  }
  EXPECT_EQ(plan::seconds_alone(gather(false), for_ranks(4, 2), rates), 10.0);
}

}  // namespace
}  // namespace ballast::step::rank_sizes_test
