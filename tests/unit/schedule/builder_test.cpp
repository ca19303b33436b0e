#include <algorithm>
#include <map>

#include <gtest/gtest.h>

#include "ballast/core/error.h"

#include "tests/unit/schedule/random_workload.h"

namespace ballast::schedule {
namespace {

Problem uniform(std::size_t blocks, std::uint32_t micro_batches, Tier weights, Tier optimizer) {
  Problem problem = random_problem(1);
  problem.workload.blocks.assign(blocks, {"block", 4096, 8192, 4096, 20480, 10.0, 53248});
  problem.workload.tied = false;
  problem.workload.micro_batches = micro_batches;
  problem.workload.evaluation_micro_batches = 1;
  problem.placement.blocks.assign(blocks, {weights, optimizer, Tier::device});
  problem.options = {};
  return problem;
}

Schedule build(const Problem& problem) {
  return schedule::build(problem.workload, problem.placement, problem.options);
}

std::size_t count(const Plan& plan, Action action) {
  return static_cast<std::size_t>(
      std::count_if(plan.operations.begin(), plan.operations.end(),
                    [&](const Operation& op) { return op.action == action; }));
}

TEST(Builder, EveryRandomPlanIsFreeOfHazards) {
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    const Problem problem = random_problem(seed);
    const Schedule schedule = build(problem);
    const bool gated = problem.options.update == Update::gated;
    const Plan& steady = schedule.steady;
    const auto runs =
        gated ? std::vector{&schedule.first,      &steady,        &steady, &schedule.flush,
                            &schedule.evaluation, &schedule.first}
              : std::vector{&steady, &steady, &schedule.evaluation, &steady};
    EXPECT_EQ(find_hazards(schedule, runs), std::vector<std::string>{}) << seed;
  }
}

TEST(Builder, ARemovedEdgeIsFoundAsAHazard) {
  Schedule schedule = build(uniform(4, 2, Tier::host, Tier::nvme));
  for (Operation& operation : schedule.steady.operations) {
    if (operation.action == Action::upload_weights) operation.after.clear();
  }
  EXPECT_FALSE(find_hazards(schedule, {&schedule.steady, &schedule.steady}).empty());
}

TEST(Builder, LayerMajorMovesWeightsOncePerPassWhateverTheNumberOfMicroBatches) {
  for (const std::uint32_t micro_batches : {1U, 2U, 8U}) {
    const Schedule schedule = build(uniform(6, micro_batches, Tier::host, Tier::host));
    // Forward: 6 blocks. Backward: the layers below those still in their two slots, and no
    // weights for the embedding's gradient.
    EXPECT_EQ(schedule.steady.bytes_on(Lane::upload) - micro_batches * Bytes{512},
              (6 + 3) * Bytes{4096});
    EXPECT_EQ(count(schedule.steady, Action::offload_gradient), 6U);
  }
}

TEST(Builder, MicroBatchMajorMovesWeightsPerMicroBatch) {
  Problem problem = uniform(6, 4, Tier::host, Tier::host);
  problem.options.order = Order::micro_batch_major;
  const Schedule schedule = build(problem);
  EXPECT_GT(count(schedule.steady, Action::upload_weights), 4U * 6U);
  EXPECT_EQ(count(schedule.steady, Action::offload_gradient), 6U);
}

TEST(Builder, NvmeTrafficIsTheStatesOnceEachWay) {
  const Schedule schedule = build(uniform(5, 2, Tier::host, Tier::nvme));
  EXPECT_EQ(schedule.steady.bytes_on(Lane::fetch), 5U * 20480U);
  EXPECT_EQ(schedule.steady.bytes_on(Lane::writeback), 5U * 20480U);
}

TEST(Builder, EverythingOnTheDeviceMovesOnlyBatchesAndResults) {
  const Schedule schedule = build(uniform(5, 2, Tier::device, Tier::device));
  EXPECT_EQ(schedule.steady.bytes_on(Lane::upload), 2U * 512U);
  EXPECT_EQ(schedule.steady.bytes_on(Lane::offload), 64U + 5U * 16U);
  EXPECT_EQ(schedule.steady.bytes_on(Lane::fetch), 0U);
  EXPECT_EQ(count(schedule.steady, Action::update_on_device), 5U);
  EXPECT_EQ(schedule.bytes(Tier::nvme), 0U);
}

TEST(Builder, GradientsAreNeverOnNvme) {
  for (std::uint64_t seed = 0; seed < 100; ++seed) {
    for (const Buffer& buffer : build(random_problem(seed)).buffers) {
      if (buffer.tier != Tier::nvme) continue;
      EXPECT_TRUE(buffer.kind == Kind::weights || buffer.kind == Kind::states ||
                  buffer.kind == Kind::activations)
          << buffer.name;
    }
  }
}

TEST(Builder, MicroBatchesAccumulateInIndexOrder) {
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    const Schedule schedule = build(random_problem(seed));
    std::map<std::uint32_t, std::uint32_t> next;
    for (const Operation& operation : schedule.steady.operations) {
      if (operation.action != Action::backward && operation.action != Action::train_head) continue;
      EXPECT_EQ(operation.micro, next[operation.block]++);
    }
  }
}

TEST(Builder, NextForwardOfABlockWaitsOnlyForThatBlocksUpdate) {
  const Schedule schedule = build(uniform(4, 1, Tier::host, Tier::host));
  const auto& operations = schedule.steady.operations;
  std::size_t found = 0;
  for (const Operation& operation : operations) {
    if (operation.action != Action::upload_weights) continue;
    for (const OpId id : operation.after) {
      if (operations[id].action != Action::update_on_host) continue;
      EXPECT_EQ(operations[id].block, operation.block);
      ++found;
    }
  }
  EXPECT_GE(found, 4U);
}

TEST(Builder, RefusesWhatMakesNoSense) {
  Problem problem = uniform(3, 1, Tier::host, Tier::host);
  problem.placement.blocks.pop_back();
  EXPECT_THROW(build(problem), Error);
  problem = uniform(3, 1, Tier::host, Tier::host);
  problem.options.weight_slots = 1;
  EXPECT_THROW(build(problem), Error);
  problem = uniform(3, 2, Tier::host, Tier::host);
  problem.workload.evaluation_micro_batches = 3;
  EXPECT_THROW(build(problem), Error);
}

}  // namespace
}  // namespace ballast::schedule
