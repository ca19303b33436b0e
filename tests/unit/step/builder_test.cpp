#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <tuple>

#include <gtest/gtest.h>

#include "ballast/core/error.h"
#include "ballast/step/labels.h"

#include "tests/support/hazards.h"
#include "tests/support/random_problem.h"

namespace ballast::step::builder_test {
namespace {

BuildArguments uniform(std::size_t blocks, std::uint32_t micro_batches, Tier weights,
                       Tier optimizer) {
  return equal_blocks(blocks, micro_batches, {weights, optimizer, Tier::device});
}

bool moves(const Operation& op, Action action, Payload payload) {
  return op.action == action && op.payload == payload;
}

std::size_t count(const Plan& plan, Action action, Payload payload) {
  return static_cast<std::size_t>(
      std::count_if(plan.operations.begin(), plan.operations.end(),
                    [&](const Operation& op) { return moves(op, action, payload); }));
}

TEST(Builder, ARemovedEdgeIsFoundAsAHazard) {
  Schedule schedule = build(uniform(4, 2, Tier::host, Tier::nvme));
  for (Operation& operation : schedule.steady.operations) {
    if (moves(operation, Action::upload, Payload::weights)) operation.after.clear();
  }
  EXPECT_FALSE(plan::find_hazards(schedule, {&schedule.steady, &schedule.steady}).empty());
}

/// Two operations that write the same buffer one after the other, without an edge.
struct TwoWriters {
  explicit TwoWriters(Lane lane) {
    schedule.buffers = {{.name = "shared", .bytes = 8}};
    for (int i = 0; i < 2; ++i) {
      plan.operations.push_back({.lane = lane, .uses = {{plan::Role::target, 0, true}}});
    }
  }
  [[nodiscard]] std::size_t hazards() const { return plan::find_hazards(schedule, {&plan}).size(); }

  Schedule schedule;
  Plan plan;
};

TEST(Hazards, OperationsOfALaneOnTwoStreamsNeedAnEdge) {
  TwoWriters writers(Lane::compute);
  EXPECT_EQ(writers.hazards(), 0U);
  writers.plan.operations[1].device = 1;
  EXPECT_EQ(writers.hazards(), 1U);
  writers.plan.operations[1].after = {0};
  EXPECT_EQ(writers.hazards(), 0U);
}

TEST(Hazards, RequestsToTheDisksNeedAnEdge) {
  for (const Lane lane : {Lane::fetch, Lane::writeback}) {
    TwoWriters writers(lane);
    EXPECT_EQ(writers.hazards(), 1U) << to_string(lane);
    writers.plan.operations[1].after = {0};
    EXPECT_EQ(writers.hazards(), 0U) << to_string(lane);
  }
}

TEST(Hazards, LanesThatDoOneThingAtATimeNeedNone) {
  for (const Lane lane : {Lane::update, Lane::gather, Lane::reduce}) {
    EXPECT_EQ(TwoWriters(lane).hazards(), 0U) << to_string(lane);
  }
}

using BytesOfHomes = std::map<std::pair<std::uint32_t, std::uint32_t>, Bytes>;

/// Bytes that host operations see, by block and sub-group. The pieces follow each other.
BytesOfHomes seen(const Plan& plan, Action action, Payload payload) {
  BytesOfHomes found;
  for (const Operation& operation : plan.operations) {
    if (!moves(operation, action, payload)) continue;
    Bytes& bytes = found[{operation.block, operation.sub_group}];
    EXPECT_EQ(operation.offset, bytes);
    bytes += operation.bytes;
  }
  return found;
}

TEST(Builder, FillAndReadShowEveryByteOfEveryHomeOnceAndInOrderWithoutZerosOfTheDevice) {
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    BuildArguments placed = random_problem(seed, {.ranks = seed % 2 == 1});
    auto& [problem, placement, options] = placed;
    // Large enough for several pieces.
    for (BlockSizes& block : problem.blocks) {
      for (SubGroup& group : block.sub_groups) {
        group.state_bytes *= 64;
        group.initial_state_bytes *= 64;
      }
    }
    const Schedule schedule = build(placed);
    const auto blocks = static_cast<std::uint32_t>(problem.blocks.size());
    BytesOfHomes weights;
    BytesOfHomes states;
    BytesOfHomes filled;
    for (std::uint32_t b = 0; b < blocks; ++b) {
      weights[{b, 0}] = schedule.buffers[schedule.weight_home[b]].bytes;
      const BufferId trained = schedule.trained_home[b];
      if (trained != kNoBuffer) weights[{b, 0}] += schedule.buffers[trained].bytes;
      const std::vector<SubGroup>& groups = problem.blocks[b].sub_groups;
      for (std::uint32_t g = 0; g < groups.size(); ++g) {
        const Buffer& home = schedule.buffers[schedule.state_home[b][g]];
        states[{b, g}] = home.bytes;
        filled[{b, g}] = home.tier == Tier::device ? groups[g].initial_state_bytes : home.bytes;
      }
    }
    const Plan fill = build_fill(problem, placement, options);
    EXPECT_EQ(seen(fill, Action::initialize, Payload::weights), weights) << seed;
    EXPECT_EQ(seen(fill, Action::initialize, Payload::states), filled) << seed;
    const Plan read = build_read(problem, placement, options, 0, blocks);
    EXPECT_EQ(seen(read, Action::read, Payload::weights), weights) << seed;
    EXPECT_EQ(seen(read, Action::read, Payload::states), states) << seed;
    EXPECT_EQ(fill.bytes_on(Lane::writeback), schedule.bytes(Tier::nvme)) << seed;
  }
}

TEST(Builder, AFillMakesTheStatesOfABlockWhileThoseOfTheBlockBeforeAreWritten) {
  const auto [problem, placement, options] = uniform(4, 1, Tier::nvme, Tier::nvme);
  const Plan fill = build_fill(problem, placement, options);
  const auto last = [&](Action action, Payload payload, std::uint32_t block) {
    OpId found = 0;
    for (OpId id = 0; id < fill.operations.size(); ++id) {
      const Operation& op = fill.operations[id];
      if (moves(op, action, payload) && op.block == block) found = id;
    }
    return found;
  };
  for (std::uint32_t block = 1; block < 4; ++block) {
    std::set<OpId> before = {last(Action::initialize, Payload::states, block)};
    // Edges lead to earlier operations.
    for (auto at = before.rbegin(); at != before.rend(); ++at) {
      const auto& after = fill.operations[*at].after;
      before.insert(after.begin(), after.end());
    }
    for (const Payload payload : {Payload::weights, Payload::states}) {
      EXPECT_EQ(before.count(last(Action::writeback, payload, block - 1)), 0U) << block;
    }
  }
}

TEST(Builder, ThePassingPlaceForTheDeviceIsSmallAndOftenThereAlready) {
  const auto host_bytes = [](const BuildArguments& problem) {
    return build(problem).bytes(Tier::host);
  };
  BuildArguments large = uniform(3, 1, Tier::device, Tier::device);
  BuildArguments tiny = large;
  for (BlockSizes& block : large.problem.blocks) block.sub_groups = {{64 * kMiB}};
  const Bytes batch = host_bytes(uniform(3, 1, Tier::nvme, Tier::nvme));
  EXPECT_LE(host_bytes(large) - host_bytes(tiny), 1 * kMiB);
  EXPECT_LT(host_bytes(tiny), batch);
  // The staging of a step is used.
  const BuildArguments mixed = uniform(3, 1, Tier::device, Tier::host);
  for (const Buffer& buffer : build(mixed).buffers) {
    EXPECT_EQ(buffer.name.find("passing place"), std::string::npos) << buffer.name;
  }
}

TEST(Builder, LayerMajorMovesWeightsOncePerPassForAnyNumberOfMicroBatches) {
  for (const std::uint32_t micro_batches : {1U, 2U, 8U}) {
    const Schedule schedule = build(uniform(6, micro_batches, Tier::host, Tier::host));
    // Forward: 6 blocks. Backward: the layers below those that are still in the two slots; the
    // gradient of the embedding needs no weights.
    EXPECT_EQ(schedule.steady.bytes_on(Lane::upload) - micro_batches * Bytes{512},
              (6 + 3) * Bytes{4096});
    EXPECT_EQ(count(schedule.steady, Action::offload, Payload::gradient), 6U);
  }
}

TEST(Builder, MicroBatchMajorMovesWeightsPerMicroBatch) {
  BuildArguments problem = uniform(6, 4, Tier::host, Tier::host);
  problem.options.order = Order::micro_batch_major;
  const Schedule schedule = build(problem);
  EXPECT_GT(count(schedule.steady, Action::upload, Payload::weights), 4U * 6U);
  EXPECT_EQ(count(schedule.steady, Action::offload, Payload::gradient), 6U);
}

TEST(Builder, SumsInHostMemoryMoveBetweenMicroBatchesThroughTwoBuffers) {
  BuildArguments problem = uniform(6, 4, Tier::host, Tier::host);
  const auto sums_of = [&](Order order, Tier tier) {
    problem.options.order = order;
    std::vector<Bytes> sums;
    // Packed gradients wait in the homes of the sums.
    const Kind kind = tier == Tier::host ? Kind::gradients : Kind::accumulators;
    for (const Buffer& buffer : build(problem).buffers) {
      if (buffer.kind == kind && buffer.tier == tier) sums.push_back(buffer.bytes);
    }
    return sums;
  };
  const std::vector<Bytes> all = sums_of(Order::micro_batch_major, Tier::device);
  ASSERT_EQ(all.size(), 6U);
  const auto offloaded = Order::micro_batch_major_offload;
  EXPECT_EQ(sums_of(offloaded, Tier::host), all);
  EXPECT_EQ(sums_of(offloaded, Tier::device), (std::vector<Bytes>{all[0], all[0]}));
  const Schedule schedule = build(problem);
  std::map<Action, Bytes> moved;
  for (const Operation& op : schedule.steady.operations) {
    if (moves(op, MovedValue::gradient_sum)) moved[op.action] += op.bytes;
  }
  EXPECT_EQ(moved, (std::map<Action, Bytes>{{Action::upload, 3 * 6 * all[0]},
                                            {Action::offload, 3 * 6 * all[0]}}));
  // One micro-batch is never interrupted.
  problem.problem.micro_batches = 1;
  EXPECT_EQ(build(problem).steady.bytes_on(Lane::upload),
            build(uniform(6, 1, Tier::host, Tier::host)).steady.bytes_on(Lane::upload));
}

TEST(Builder, NvmeTrafficIsTheStatesOnceEachWay) {
  const Schedule schedule = build(uniform(5, 2, Tier::host, Tier::nvme));
  EXPECT_EQ(schedule.steady.bytes_on(Lane::fetch), 5U * 20480U);
  EXPECT_EQ(schedule.steady.bytes_on(Lane::writeback), 5U * 20480U);
}

TEST(Builder, EverythingOnTheDeviceMovesOnlyBatchesAndResults) {
  const Schedule schedule = build(uniform(5, 2, Tier::device, Tier::device));
  EXPECT_EQ(schedule.steady.bytes_on(Lane::upload), 2U * 512U);
  EXPECT_EQ(schedule.steady.bytes_on(Lane::offload), 2U * 8U + 5U * 16U);
  EXPECT_EQ(schedule.steady.bytes_on(Lane::fetch), 0U);
  EXPECT_EQ(count(schedule.steady, Action::update_on_device, Payload::none), 5U);
  EXPECT_EQ(schedule.bytes(Tier::nvme), 0U);
}

TEST(Builder, GradientsOnNvmeNeedOnlyStaging) {
  const auto gradients = [](const Schedule& schedule, Tier tier) {
    return std::count_if(schedule.buffers.begin(), schedule.buffers.end(), [&](const Buffer& one) {
      return one.kind == Kind::gradients && one.tier == tier;
    });
  };
  for (const Tier optimizer : {Tier::device, Tier::host, Tier::nvme}) {
    for (const Update update : {Update::gated, Update::eager}) {
      BuildArguments problem = uniform(5, 2, Tier::device, optimizer);
      problem.options.update = update;
      const Schedule without = build(problem);
      for (BlockPlacement& block : problem.placement.blocks) block.gradients = Tier::nvme;
      const Schedule schedule = build(problem);
      const bool swaps = optimizer != Tier::device;
      EXPECT_EQ(gradients(schedule, Tier::host), 0);
      // An eager update uses the gradients in the staging buffers.
      EXPECT_EQ(gradients(schedule, Tier::nvme), swaps && update == Update::gated ? 5 : 0);
      EXPECT_EQ(schedule.gradient_staging != kNoBuffer, swaps);
      EXPECT_EQ(schedule.bytes(Tier::host) < without.bytes(Tier::host), swaps);
      const std::size_t moved = swaps && update == Update::gated ? 5 : 0;
      EXPECT_EQ(count(schedule.steady, Action::writeback, Payload::gradient), moved);
      EXPECT_EQ(count(schedule.steady, Action::fetch, Payload::gradient), moved);
    }
  }
}

TEST(Builder, NextForwardOfABlockWaitsOnlyForThatBlocksUpdate) {
  const Schedule schedule = build(uniform(4, 1, Tier::host, Tier::host));
  const auto& operations = schedule.steady.operations;
  std::size_t found = 0;
  for (const Operation& operation : operations) {
    if (!moves(operation, Action::upload, Payload::weights)) continue;
    for (const OpId id : operation.after) {
      if (operations[id].action != Action::update) continue;
      EXPECT_EQ(operations[id].block, operation.block);
      ++found;
    }
  }
  EXPECT_GE(found, 4U);
}

/// Every other block speculates.
BuildArguments speculating(Tier weights, Tier optimizer) {
  BuildArguments problem = uniform(6, 2, weights, optimizer);
  for (std::size_t b = 1; b < 6; b += 2) problem.placement.blocks[b].speculates = true;
  return problem;
}

TEST(Builder, SpeculativeUpdatesAreInTheBackwardPassAndTheOthersWait) {
  for (const Tier optimizer : {Tier::host, Tier::nvme}) {
    const Schedule schedule = build(speculating(Tier::host, optimizer));
    EXPECT_EQ(count(schedule.first, Action::update, Payload::none), 3U);
    EXPECT_EQ(count(schedule.steady, Action::update, Payload::none), 6U);
    EXPECT_EQ(count(schedule.flush, Action::update, Payload::none), 3U);
    EXPECT_EQ(count(schedule.rollback, Action::update, Payload::none), 6U);
    for (const Operation& operation : schedule.steady.operations) {
      if (operation.action != Action::update) continue;
      const bool speculates = operation.block % 2 == 1;
      EXPECT_EQ(operation.lag, speculates ? 0U : 1U);
      EXPECT_EQ(operation.buffer(plan::Role::decision) == kNoBuffer, speculates);
    }
  }
}

TEST(Builder, OldValuesTakeWhatTheirUpdateChanges) {
  const auto undo = [](Tier weights, Tier optimizer) {
    std::array<Bytes, 3> bytes{};
    for (const Buffer& buffer : build(speculating(weights, optimizer)).buffers) {
      if (buffer.kind == Kind::undo) bytes[static_cast<std::size_t>(buffer.tier)] += buffer.bytes;
    }
    return bytes;
  };
  // Three blocks with weights of 4096 bytes and states of 20480: on the device, host and NVMe.
  using Undo = std::array<Bytes, 3>;
  for (const Tier weights : {Tier::device, Tier::host}) {
    EXPECT_EQ(undo(weights, Tier::host), (Undo{0, 3 * (4096 + 20480), 0}));
    EXPECT_EQ(undo(weights, Tier::nvme), (Undo{0, 3 * 4096, 3 * 20480}));
  }
  EXPECT_EQ(undo(Tier::nvme, Tier::host), (Undo{0, 3 * 20480, 3 * 4096}));
  EXPECT_EQ(undo(Tier::nvme, Tier::nvme), (Undo{0, 0, 3 * (4096 + 20480)}));
}

TEST(Builder, CopiesOfOldValuesCountAsTrafficOfTheUpdate) {
  for (const Tier optimizer : {Tier::host, Tier::nvme}) {
    const Schedule schedule = build(speculating(Tier::host, optimizer));
    for (const Operation& operation : schedule.steady.operations) {
      if (operation.action != Action::update) continue;
      const Bytes copied = 4096 + (optimizer == Tier::host ? 20480 : 0);
      EXPECT_EQ(operation.traffic, 53248 + (operation.block % 2 == 1 ? 2 * copied : 0));
    }
  }
}

TEST(Builder, SumsAreThoseOfTheListedBuffers) {
  using Sums = std::map<std::tuple<Tier, Kind, std::uint8_t>, Bytes>;
  const auto sums_of = [](const std::vector<Buffer>& buffers) {
    Sums sums;
    for (const Buffer& buffer : buffers) {
      sums[{buffer.tier, buffer.kind, buffer.device}] += round_up(buffer.bytes, kPage);
    }
    return sums;
  };
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    auto [problem, placement, options] = any_problem(seed, true);
    options.kept_checkpoints = static_cast<std::uint32_t>(seed % 3);
    EXPECT_EQ(sums_of(sum_buffers(problem, placement, options)),
              sums_of(list_buffers(problem, placement, options)))
        << seed;
  }
}

TEST(Builder, ASteadyStepAloneIsThatOfTheWholeSchedule) {
  std::size_t compared = 0;
  for (std::uint64_t seed = 0; seed < 40; ++seed) {
    const auto [problem, placement, options] = any_problem(seed);
    if (options.purpose != Purpose::training) continue;
    const Schedule whole = build(problem, placement, options);
    const Schedule alone = build_steady_step(problem, placement, options);
    EXPECT_TRUE(alone.first.operations.empty());
    EXPECT_EQ(alone.buffers.size(), whole.buffers.size());
    EXPECT_EQ(alone.steady.applies_updates, whole.steady.applies_updates);
    ASSERT_EQ(alone.steady.operations.size(), whole.steady.operations.size());
    for (std::size_t i = 0; i < whole.steady.operations.size(); ++i, ++compared) {
      const Operation& of_whole = whole.steady.operations[i];
      const Operation& of_alone = alone.steady.operations[i];
      EXPECT_EQ(of_alone.action, of_whole.action);
      EXPECT_EQ(of_alone.bytes, of_whole.bytes);
      EXPECT_EQ(of_alone.after, of_whole.after);
    }
  }
  EXPECT_GT(compared, 0U);
}

TEST(Builder, ACheckpointInTheBackgroundHasRoomInAdditionToTheOthers) {
  const auto count = [](Tier first, Tier others, std::uint32_t kept) {
    BuildArguments problem = uniform(3, 1, others, others);
    problem.placement.blocks[0].optimizer = first;
    problem.options.kept_checkpoints = kept;
    std::size_t homes = 0;
    std::size_t for_checkpoints = 0;
    for (const Buffer& buffer : list_buffers(problem.problem, problem.placement, problem.options)) {
      if (buffer.tier != Tier::nvme) continue;
      (buffer.kind == Kind::checkpoints ? for_checkpoints : homes) += 1;
    }
    return std::pair(for_checkpoints, homes);
  };
  const auto [alone, homes] = count(Tier::nvme, Tier::nvme, 2);  // nothing to write later
  EXPECT_EQ(alone, 2 * homes);
  for (const std::uint32_t kept : {1U, 2U, 3U}) {
    const auto [for_checkpoints, on_nvme] = count(Tier::host, Tier::nvme, kept);
    EXPECT_EQ(for_checkpoints, (kept == 1 ? 1 : kept + 1) * on_nvme) << kept;
  }
  EXPECT_EQ(count(Tier::host, Tier::host, 2).first, 0U);
}

TEST(Builder, RefusesInvalidProblems) {
  BuildArguments problem = uniform(3, 1, Tier::host, Tier::host);
  problem.placement.blocks.pop_back();
  EXPECT_THROW(build(problem), Error);
  problem = uniform(3, 1, Tier::host, Tier::host);
  problem.options.buffers.weight_slots = 0;
  EXPECT_THROW(build(problem), Error);
  problem = uniform(3, 2, Tier::host, Tier::host);
  problem.problem.evaluation_micro_batches = 3;
  EXPECT_THROW(build(problem), Error);
  problem = speculating(Tier::host, Tier::device);
  EXPECT_THROW(build(problem), Error);
  problem = speculating(Tier::host, Tier::host);
  problem.options.update = Update::eager;
  EXPECT_THROW(build(problem), Error);
}

}  // namespace
}  // namespace ballast::step::builder_test
