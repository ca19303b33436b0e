#include <algorithm>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/plan/simulator.h"

#include "tests/support/random_problem.h"
#include "tests/unit/plan/unit_rates.h"

// Properties of the simulation of any schedule.

namespace ballast::plan::simulator_random_test {
namespace {

constexpr SimulationOptions kOneRun = {.warm_up = 0, .measured = 1, .timeline = true};

double at(const std::array<double, kLaneCount>& values, Lane lane) {
  return values[static_cast<std::size_t>(lane)];
}

Rates random_rates(std::uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto pick = [&] { return 1e4 * static_cast<double>(1 + random() % 100); };
  Rates rates = unit_rates();
  rates.forward = rates.backward = rates.head = {{128.0, pick() / 100.0}};
  rates.device_memory_per_second = pick();
  rates.update_per_second = pick();
  rates.upload_per_second = pick();
  rates.offload_per_second = pick();
  rates.read_per_second = pick();
  rates.write_per_second = pick();
  // Not slower than serial execution, for every byte.
  rates.mixed_per_second = 2.0 / (1.0 / rates.read_per_second + 1.0 / rates.write_per_second);
  rates.launch_seconds = 0.001;
  rates.io_latency_seconds = 0.002;
  if (random() % 2 == 0) {
    rates.shared_cores = 2;
    rates.compute_threads = 2;
    rates.update_threads = 1;
    rates.link_cores = 0.5;
    rates.io_cores = 0.25;
    rates.compute_beside_copy = 0.3;
    rates.compute_beside_io = 0.8;
    rates.update_beside_io = 0.7;
    rates.io_beside_compute = 0.9;
    rates.io_beside_update = 0.6;
  }
  return rates;
}

struct Alone {
  double largest_lane = 0.0;
  double sum = 0.0;
  double critical_path = 0.0;
};

/// Durations of one plan's operations without sharing: lower bounds from lanes and paths, and the
/// sum of all as an upper bound.
Alone alone(const Plan& plan, const Schedule& schedule, const Rates& rates) {
  Alone result;
  std::map<std::size_t, double> lanes;  // by lane_number()
  std::vector<double> end(plan.operations.size(), 0.0);
  for (OpId id = 0; id < plan.operations.size(); ++id) {
    const Operation& operation = plan.operations[id];
    const double seconds = seconds_alone(operation, schedule, rates);
    const double least = seconds_in_turn(operation, schedule, rates);
    double start = lanes[lane_number(operation)];
    for (const OpId before : operation.after) start = std::max(start, end[before]);
    end[id] = start + least;
    result.critical_path = std::max(result.critical_path, end[id]);
    result.sum += seconds;
    double& lane = lanes[lane_number(operation)];
    lane += least;
    result.largest_lane = std::max(result.largest_lane, lane);
  }
  return result;
}

TEST(Simulator, AStepIsNeverShorterThanItsPathsNorLongerThanSerial) {
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    const Schedule schedule = build(step::random_problem(seed, {.devices = true}));
    const Rates rates = random_rates(seed);
    const Prediction prediction = simulate(schedule, rates, kOneRun);
    const Alone limits = alone(schedule.first, schedule, rates);
    const double makespan = prediction.timeline.spans.back().end;
    EXPECT_GE(makespan, limits.largest_lane * (1.0 - 1e-9)) << seed;
    EXPECT_GE(makespan, limits.critical_path * (1.0 - 1e-9)) << seed;
    EXPECT_GE(makespan, prediction.bounds.front().seconds * (1.0 - 1e-9)) << seed;
    EXPECT_LE(makespan, limits.sum * (1.0 + 1e-9)) << seed;
  }
}

TEST(Simulator, EveryOperationRunsOnceInLaneOrderAfterItsPredecessors) {
  for (std::uint64_t seed = 0; seed < 100; ++seed) {
    const Schedule schedule = build(step::random_problem(seed, {.devices = true}));
    const Prediction prediction =
        simulate(schedule, random_rates(seed), {.warm_up = 0, .timeline = true});
    std::map<std::pair<std::uint64_t, OpId>, Span> spans;
    for (const Span& span : prediction.timeline.spans) {
      EXPECT_TRUE(spans.emplace(std::pair(span.run, span.op), span).second) << seed;
    }
    ASSERT_EQ(spans.size(),
              schedule.first.operations.size() + 2 * schedule.steady.operations.size());
    const auto behind_first = seam(schedule.first, schedule.steady);
    const auto behind_steady = seam(schedule.steady, schedule.steady);
    std::map<std::size_t, double> lane_free;  // by lane_number()
    for (const auto& [key, span] : spans) {   // in order of runs and plans
      const auto [run, op] = key;
      double& free = lane_free[lane_number(span.operation())];
      EXPECT_GE(span.start, free) << seed;
      free = span.end;
      for (const OpId before : span.operation().after) {
        EXPECT_GE(span.start, spans.at({run, before}).end) << seed;
      }
      if (run == 0) continue;
      const auto& joint = run == 1 ? behind_first : behind_steady;
      for (const OpId before : joint[op]) {
        EXPECT_GE(span.start, spans.at({run - 1, before}).end) << seed;
      }
    }
  }
}

TEST(Simulator, TheSameArgumentsGiveTheSameBits) {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    const Schedule schedule = build(step::random_problem(seed, {.devices = true}));
    const auto run = [&] { return simulate(schedule, random_rates(seed)); };
    const Prediction one = run();
    const Prediction two = run();
    EXPECT_EQ(one.step_seconds, two.step_seconds);
    EXPECT_EQ(one.busy_seconds, two.busy_seconds);
    EXPECT_EQ(one.stalled_seconds, two.stalled_seconds);
  }
}

TEST(Simulator, BusyAndStalledTimeFitIntoAStep) {
  for (std::uint64_t seed = 0; seed < 100; ++seed) {
    const Schedule schedule = build(step::random_problem(seed, {.devices = true}));
    const Prediction prediction = simulate(schedule, random_rates(seed));
    for (const Lane lane : kLanes) {
      const double used = at(prediction.busy_seconds, lane) + at(prediction.stalled_seconds, lane);
      EXPECT_LE(used, prediction.step_seconds * (1.0 + 1e-9)) << seed << to_string(lane);
      EXPECT_EQ(prediction.bytes[static_cast<std::size_t>(lane)], schedule.steady.bytes_on(lane));
    }
  }
}

/// GPT of 128 layers of width 25600: a trillion parameters, on 64 nodes of 8 ranks.
step::BuildArguments a_trillion_parameters(std::uint32_t micro_batches) {
  constexpr Bytes kWidth = 25600;
  constexpr Bytes kVocabulary = 51200;
  constexpr std::uint64_t kTokens = 2048;
  constexpr std::uint32_t kWorld = 512;
  const auto dense = [](Elems elements) {
    return step::SimpleBlock{elements,
                             2.0 * static_cast<double>(elements) * static_cast<double>(kTokens)};
  };
  std::vector<step::SimpleBlock> blocks(130, dense(12 * kWidth * kWidth));
  blocks.front() = {(kVocabulary + kTokens) * kWidth, 0.0};
  blocks.back() = dense(kVocabulary * kWidth);
  step::BuildArguments placed = step::simple_problem(blocks, micro_batches, 2 * kTokens * kWidth);
  placed.problem.micro_batch_tokens = kTokens;
  placed.problem.sharers = kWorld;
  placed.problem.stage = 3;
  for (step::BlockSizes& block : placed.problem.blocks) {
    block.sub_groups.front().state_bytes /= kWorld;
    block.sub_groups.front().update_traffic /= kWorld;
  }
  placed.placement.blocks.assign(blocks.size(), {Tier::host, Tier::nvme, Tier::host});
  placed.options.buffers.state_staging = 4;
  return placed;
}

TEST(Simulator, APlanForATrillionParametersOn64NodesSimulates) {
  const Schedule schedule = build(a_trillion_parameters(8));
  Rates rates = unit_rates();
  rates.forward = rates.backward = rates.head = {{2048.0, 400e12}};
  rates.device_memory_per_second = 2e12;
  rates.launch_seconds = 1e-5;
  rates.update_per_second = 50e9;
  rates.upload_per_second = rates.offload_per_second = 50e9;
  rates.read_per_second = rates.write_per_second = rates.mixed_per_second = 5e9;
  rates.fabric_per_second = 360e9;
  rates.network_per_second = 340e9;
  rates.ranks_per_node = 8;
  const Prediction prediction = simulate(schedule, rates);
  // 8 FLOP per parameter and token (less one repetition for the head).
  const double flops = 8.0 * 1.006e12 * 8 * 2048;
  EXPECT_GT(prediction.step_seconds, 0.98 * flops / 400e12);
  EXPECT_LT(prediction.step_seconds, 1.1 * flops / 400e12);
  EXPECT_EQ(prediction.bounds.front().lane, Lane::compute);
}

}  // namespace
}  // namespace ballast::plan::simulator_random_test
