#include "ballast/plan/simulator.h"

#include <algorithm>
#include <array>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/core/error.h"

#include "tests/unit/plan/unit_rates.h"

namespace ballast::plan::simulator_test {
namespace {

Action action_of(Lane lane) {
  constexpr std::array<Action, kLaneCount> kActions = {
      Action::compute, Action::upload, Action::offload,   Action::gather,  Action::reduce,
      Action::update,  Action::fetch,  Action::writeback, Action::transfer};
  return kActions[static_cast<std::size_t>(lane)];
}

/// A plan written by hand, including edges and boundaries.
class Hand {
 public:
  /// An operation of `seconds` on the machine above.
  OpId add(Lane lane, double seconds, std::vector<OpId> after = {}) {
    Operation operation;
    operation.lane = lane;
    operation.action = action_of(lane);
    operation.after = std::move(after);
    if (lane == Lane::compute) {
      operation.flops = seconds;
    } else if (lane == Lane::update) {
      operation.traffic = static_cast<Bytes>(seconds);
    } else {
      operation.bytes = static_cast<Bytes>(seconds);
    }
    plan_.operations.push_back(std::move(operation));
    return static_cast<OpId>(plan_.operations.size() - 1);
  }
  /// Moves the last operation to another device.
  void on(std::uint8_t device) {
    plan_.operations.back().device = device;
    devices_ = std::max(devices_, device + 1U);
  }

  Hand& gate(OpId id) {
    plan_.gate = id;
    return *this;
  }
  /// `reader` of the next run waits for `writer` of this run.
  Hand& carry(OpId writer, OpId reader) {
    const auto buffer = static_cast<BufferId>(plan_.boundaries.size());
    plan_.boundaries.push_back({buffer, writer, {reader}, writer, {}});
    return *this;
  }

  [[nodiscard]] Schedule schedule() const {
    Schedule schedule;
    schedule.steady = plan_;
    schedule.devices = devices_;
    return schedule;
  }

 private:
  Plan plan_;
  std::uint32_t devices_ = 1;
};

constexpr SimulationOptions kOneRun = {.warm_up = 0, .measured = 1, .timeline = true};

Prediction run_once(const Hand& hand, const Rates& rates = unit_rates()) {
  return simulate(hand.schedule(), rates, kOneRun);
}

const Span& span_of(const Prediction& prediction, OpId op, std::uint64_t run = 0) {
  const auto& spans = prediction.timeline.spans;
  return *std::find_if(spans.begin(), spans.end(),
                       [&](const Span& span) { return span.op == op && span.run == run; });
}

double at(const std::array<double, kLaneCount>& values, Lane lane) {
  return values[static_cast<std::size_t>(lane)];
}

double bound_of(const Prediction& prediction, Lane lane) {
  for (const auto& bound : prediction.bounds) {
    if (bound.lane == lane) return bound.seconds;
  }
  return 0.0;
}

TEST(Simulator, AChainTakesTheSumOfItsOperations) {
  Hand hand;
  const OpId fetch = hand.add(Lane::fetch, 3.0);
  const OpId upload = hand.add(Lane::upload, 2.0, {fetch});
  const OpId compute = hand.add(Lane::compute, 5.0, {upload});
  const Prediction prediction = run_once(hand);
  EXPECT_DOUBLE_EQ(prediction.step_seconds, 10.0);
  EXPECT_DOUBLE_EQ(span_of(prediction, upload).start, 3.0);
  EXPECT_DOUBLE_EQ(span_of(prediction, compute).start, 5.0);
  EXPECT_DOUBLE_EQ(at(prediction.stalled_seconds, Lane::compute), 5.0);
  EXPECT_DOUBLE_EQ(at(prediction.stalled_seconds, Lane::upload), 3.0);
  EXPECT_DOUBLE_EQ(at(prediction.stalled_seconds, Lane::fetch), 0.0);
  EXPECT_DOUBLE_EQ(at(prediction.busy_seconds, Lane::upload), 2.0);
  EXPECT_EQ(prediction.bytes[static_cast<std::size_t>(Lane::fetch)], 3U);
}

TEST(Simulator, LanesThatShareNothingOverlapInFull) {
  Hand hand;
  hand.add(Lane::compute, 7.0);
  hand.add(Lane::upload, 5.0);
  hand.add(Lane::offload, 6.0);  // the link has two directions
  hand.add(Lane::update, 4.0);
  EXPECT_DOUBLE_EQ(run_once(hand).step_seconds, 7.0);
}

TEST(Simulator, AnOperationBlocksLaterOnesOfItsLane) {
  Hand hand;
  const OpId slow = hand.add(Lane::compute, 4.0);
  hand.add(Lane::upload, 1.0, {slow});
  const OpId ready = hand.add(Lane::upload, 2.0);
  const Prediction prediction = run_once(hand);
  EXPECT_DOUBLE_EQ(span_of(prediction, ready).start, 5.0);
  EXPECT_DOUBLE_EQ(prediction.step_seconds, 7.0);
}

TEST(Simulator, ReadingAndWritingShareTheDisk) {
  Hand hand;
  const OpId read = hand.add(Lane::fetch, 6.0);
  const OpId write = hand.add(Lane::writeback, 3.0);
  Rates rates = unit_rates();
  rates.mixed_per_second = 1.5;  // three quarters of both
  const Prediction prediction = run_once(hand, rates);
  EXPECT_DOUBLE_EQ(span_of(prediction, write).end, 4.0);
  EXPECT_DOUBLE_EQ(span_of(prediction, read).end, 7.0);  // 3 of 6 done by then, then 3 alone
  EXPECT_DOUBLE_EQ(bound_of(prediction, Lane::fetch), 7.0);
  EXPECT_DOUBLE_EQ(bound_of(prediction, Lane::writeback), 3.0);
}

TEST(Simulator, ReadingAndWritingGetTheirSharesOfTheDisk) {
  Hand hand;
  const OpId read = hand.add(Lane::fetch, 12.0);
  const OpId write = hand.add(Lane::writeback, 4.0);
  Rates rates = unit_rates();
  rates.read_per_second = 4.0;
  rates.write_per_second = 2.0;
  rates.mixed_per_second = 2.0;  // one each
  Prediction prediction = run_once(hand, rates);
  EXPECT_DOUBLE_EQ(span_of(prediction, write).end, 4.0);
  EXPECT_DOUBLE_EQ(span_of(prediction, read).end, 6.0);
  EXPECT_DOUBLE_EQ(bound_of(prediction, Lane::fetch), 5.0);  // one after the other
  rates.mixed_per_second = 4.0;
  rates.mixed_read_share = 0.75;
  prediction = run_once(hand, rates);
  EXPECT_DOUBLE_EQ(span_of(prediction, read).end, 4.0);
  EXPECT_DOUBLE_EQ(span_of(prediction, write).end, 4.0);
  rates.mixed_read_share = 0.5;
  rates.mixed_per_second = 5.0;  // writing uses 2 of it and cannot use more
  prediction = run_once(hand, rates);
  EXPECT_DOUBLE_EQ(span_of(prediction, write).end, 2.0);
  EXPECT_DOUBLE_EQ(span_of(prediction, read).end, 3.5);
  EXPECT_DOUBLE_EQ(bound_of(prediction, Lane::fetch), 3.5);
}

TEST(Simulator, BothAtOnceAreNoFasterThanEachAlone) {
  Hand hand;
  hand.add(Lane::fetch, 6.0);
  hand.add(Lane::writeback, 3.0);
  Rates rates = unit_rates();
  rates.mixed_per_second = 5.0;
  EXPECT_DOUBLE_EQ(run_once(hand, rates).step_seconds, 6.0);
}

TEST(Simulator, GatherAndReduceShareTheLinesBetweenRanks) {
  Hand hand;
  hand.add(Lane::gather, 4.0);
  hand.add(Lane::reduce, 2.0);
  const Prediction prediction = run_once(hand);
  EXPECT_DOUBLE_EQ(prediction.step_seconds, 6.0);
  EXPECT_DOUBLE_EQ(bound_of(prediction, Lane::gather), 6.0);
}

TEST(Simulator, DevicesHaveTheirOwnLanesAndShareTheDisks) {
  Hand hand;
  hand.add(Lane::compute, 4.0);
  const OpId upload = hand.add(Lane::upload, 3.0);
  const OpId gather = hand.add(Lane::gather, 2.0);
  hand.add(Lane::compute, 6.0);
  hand.on(1);
  const OpId other_upload = hand.add(Lane::upload, 3.0);
  hand.on(1);
  const OpId reduce = hand.add(Lane::reduce, 2.0);
  hand.on(1);
  const OpId first = hand.add(Lane::fetch, 1.0);
  const OpId second = hand.add(Lane::fetch, 1.0);
  const Prediction prediction = run_once(hand);
  EXPECT_DOUBLE_EQ(prediction.step_seconds, 6.0);
  EXPECT_DOUBLE_EQ(span_of(prediction, upload).end, 3.0);
  EXPECT_DOUBLE_EQ(span_of(prediction, other_upload).end, 3.0);
  EXPECT_DOUBLE_EQ(span_of(prediction, gather).end, 2.0);
  EXPECT_DOUBLE_EQ(span_of(prediction, reduce).end, 2.0);
  EXPECT_DOUBLE_EQ(span_of(prediction, first).end, 1.0);
  EXPECT_DOUBLE_EQ(span_of(prediction, second).end, 2.0);
  EXPECT_DOUBLE_EQ(at(prediction.busy_seconds, Lane::compute), 5.0) << "the mean";
  EXPECT_DOUBLE_EQ(at(prediction.busy_seconds, Lane::fetch), 2.0);
  EXPECT_DOUBLE_EQ(bound_of(prediction, Lane::compute), 6.0) << "of the busiest device";
  EXPECT_DOUBLE_EQ(bound_of(prediction, Lane::gather), 2.0);
  EXPECT_EQ(prediction.bytes[static_cast<std::size_t>(Lane::upload)], 6U);
}

TEST(Simulator, ACopyBetweenDevicesUsesTheLinkUnlessItHasItsOwnRate) {
  Hand hand;
  const OpId pass = hand.add(Lane::peer, 4.0);
  hand.on(1);
  const OpId offload = hand.add(Lane::offload, 2.0);
  hand.on(1);
  const OpId other = hand.add(Lane::offload, 2.0);
  Rates rates = unit_rates();
  const Prediction by_host = run_once(hand, rates);
  EXPECT_DOUBLE_EQ(span_of(by_host, offload).end, 4.0);
  EXPECT_DOUBLE_EQ(span_of(by_host, other).end, 2.0);
  EXPECT_DOUBLE_EQ(span_of(by_host, pass).end, 6.0);
  EXPECT_DOUBLE_EQ(bound_of(by_host, Lane::peer), 6.0);
  rates.offload_per_second = 0.5;  // the slower direction
  EXPECT_DOUBLE_EQ(seconds_alone(hand.schedule().steady.operations[pass], hand.schedule(), rates),
                   8.0);
  rates.peer_per_second = 2.0;
  const Prediction peers = run_once(hand, rates);
  EXPECT_DOUBLE_EQ(span_of(peers, pass).end, 2.0);
  EXPECT_DOUBLE_EQ(span_of(peers, offload).end, 4.0);
  EXPECT_DOUBLE_EQ(bound_of(peers, Lane::peer), 2.0);
}

TEST(Simulator, LinksUpdatesAndDisksShareHostMemory) {
  Hand hand;
  const OpId update = hand.add(Lane::update, 2.0);
  const OpId upload = hand.add(Lane::upload, 3.0);
  const OpId other = hand.add(Lane::upload, 3.0);
  hand.on(1);
  const OpId fetch = hand.add(Lane::fetch, 3.0);
  const OpId compute = hand.add(Lane::compute, 3.0);
  Rates rates = unit_rates();
  EXPECT_DOUBLE_EQ(run_once(hand, rates).step_seconds, 3.0);
  rates.host_memory_per_second = 2.0;  // half of what the four would use
  const Prediction prediction = run_once(hand, rates);
  EXPECT_DOUBLE_EQ(span_of(prediction, compute).end, 3.0);
  EXPECT_DOUBLE_EQ(span_of(prediction, update).end, 4.0);
  for (const OpId op : {upload, other, fetch}) {
    EXPECT_DOUBLE_EQ(span_of(prediction, op).end, 4.0 + 1.5) << "three share the rest";
  }
  EXPECT_DOUBLE_EQ(bound_of(prediction, Lane::upload), 5.5);
  rates.host_memory_per_second = 0.5;  // each alone was measured at 1
  EXPECT_DOUBLE_EQ(run_once(hand, rates).step_seconds, 2.0 + 3.0 + 3.0 + 3.0);
}

TEST(Simulator, ACopyThroughHostMemoryReadsAndWritesIt) {
  Hand hand;
  const OpId pass = hand.add(Lane::peer, 2.0);
  const OpId upload = hand.add(Lane::upload, 2.0);
  hand.add(Lane::compute, 1.0);
  hand.on(1);
  Rates rates = unit_rates();
  rates.host_memory_per_second = 2.0;
  const Prediction by_host = run_once(hand, rates);
  EXPECT_DOUBLE_EQ(span_of(by_host, pass).end, 3.0);
  EXPECT_DOUBLE_EQ(span_of(by_host, upload).end, 3.0);
  rates.peer_per_second = 1.0;
  EXPECT_DOUBLE_EQ(run_once(hand, rates).step_seconds, 2.0);
}

TEST(Simulator, ComputeTeamsOfSeveralDevicesShareTheCores) {
  Hand hand;
  hand.add(Lane::compute, 6.0);
  hand.add(Lane::compute, 6.0);
  hand.on(1);
  EXPECT_DOUBLE_EQ(run_once(hand, with_cores(2, 2, 2)).step_seconds, 12.0);
  EXPECT_DOUBLE_EQ(run_once(hand, with_cores(4, 2, 2)).step_seconds, 6.0);
}

TEST(Simulator, ComputeAndUpdateShareCoresByTheirThreads) {
  Hand hand;
  const OpId compute = hand.add(Lane::compute, 6.0);
  const OpId update = hand.add(Lane::update, 2.0);
  const Prediction half = run_once(hand, with_cores(2, 2, 2));
  EXPECT_DOUBLE_EQ(span_of(half, update).end, 4.0);
  EXPECT_DOUBLE_EQ(span_of(half, compute).end, 8.0);
  EXPECT_DOUBLE_EQ(bound_of(half, Lane::compute), 8.0);
  const Prediction third = run_once(hand, with_cores(2, 2, 1));  // 2 cores for 3 threads
  EXPECT_DOUBLE_EQ(span_of(third, update).end, 3.0);
  // A team that shares one of its cores is half as fast.
  EXPECT_DOUBLE_EQ(span_of(third, compute).end, 7.5);
  EXPECT_DOUBLE_EQ(run_once(hand, with_cores(3, 2, 1)).step_seconds, 6.0);
  EXPECT_DOUBLE_EQ(run_once(hand, with_cores(4, 2, 2)).step_seconds, 6.0);
  EXPECT_DOUBLE_EQ(run_once(hand, unit_rates()).step_seconds, 6.0);
}

TEST(Simulator, ALaneThatNeedsLittleOfACoreGetsIt) {
  Hand hand;
  const OpId compute = hand.add(Lane::compute, 7.0);
  const OpId upload = hand.add(Lane::upload, 4.0);
  Rates rates = with_cores(2, 2, 2);
  rates.link_cores = 0.5;
  const Prediction prediction = run_once(hand, rates);
  EXPECT_DOUBLE_EQ(span_of(prediction, upload).end, 4.0);
  EXPECT_DOUBLE_EQ(span_of(prediction, compute).end, 8.0);  // 1.5 of 2 cores for 4 s
}

TEST(Simulator, ComputeDuringCopiesAndTransfersIsAsSlowAsMeasured) {
  Hand hand;
  const OpId compute = hand.add(Lane::compute, 7.0);
  const OpId upload = hand.add(Lane::upload, 4.0);
  Rates rates = with_cores(2, 2, 2);
  rates.link_cores = 0.5;
  rates.compute_beside_io = 0.1;  // not used here
  rates.compute_beside_copy = 0.5;
  const Prediction prediction = run_once(hand, rates);
  EXPECT_DOUBLE_EQ(span_of(prediction, upload).end, 4.0);
  EXPECT_DOUBLE_EQ(span_of(prediction, compute).end, 4.0 + 5.0);
  rates.compute_beside_copy = 0.9;  // more than the cores allow
  EXPECT_DOUBLE_EQ(span_of(run_once(hand, rates), compute).end, 8.0);
  const OpId fetch = hand.add(Lane::fetch, 4.0);
  rates.compute_beside_copy = rates.compute_beside_io = 0.5;
  rates.io_cores = 0.25;
  const Prediction both = run_once(hand, rates);
  EXPECT_DOUBLE_EQ(span_of(both, fetch).end, 4.0);
  EXPECT_DOUBLE_EQ(span_of(both, compute).end, 4.0 + 6.0);
}

TEST(Simulator, TransfersDuringComputeAndUpdatesAreAsSlowAsMeasured) {
  Hand hand;
  const OpId compute = hand.add(Lane::compute, 2.0);
  const OpId update = hand.add(Lane::update, 2.0);
  const OpId fetch = hand.add(Lane::fetch, 4.0);
  Rates rates = with_cores(2, 1, 1);
  rates.io_beside_compute = 0.75;
  rates.io_beside_update = 0.5;
  rates.update_beside_io = 0.5;
  const Prediction prediction = run_once(hand, rates);
  EXPECT_DOUBLE_EQ(span_of(prediction, compute).end, 2.0);
  EXPECT_DOUBLE_EQ(span_of(prediction, update).end, 4.0);
  EXPECT_DOUBLE_EQ(span_of(prediction, fetch).end, 4.0 + 2.0);
  rates.io_beside_update = rates.update_beside_io = 0.0;  // not measured
  EXPECT_DOUBLE_EQ(span_of(run_once(hand, rates), fetch).end, 2.0 + 2.5);
}

TEST(Simulator, MoreThreadsThanCoresAreNoSlowerAloneThanMeasured) {
  Hand hand;
  hand.add(Lane::compute, 5.0);
  EXPECT_DOUBLE_EQ(run_once(hand, with_cores(2, 8, 2)).step_seconds, 5.0);
}

TEST(Simulator, LaunchAndLatencyAreNotShared) {
  Hand hand;
  hand.add(Lane::fetch, 2.0);
  hand.add(Lane::writeback, 2.0);
  Rates rates = unit_rates();
  rates.mixed_per_second = 1.0;
  rates.launch_seconds = 0.25;
  rates.io_latency_seconds = 0.75;
  EXPECT_DOUBLE_EQ(run_once(hand, rates).step_seconds, 1.0 + 4.0);
}

TEST(Simulator, AnEnqueuedOperationHasNoLaunchTime) {
  Rates rates = unit_rates();
  rates.launch_seconds = 0.25;
  Hand queued;
  const OpId first = queued.add(Lane::compute, 2.0);
  const OpId behind = queued.add(Lane::compute, 2.0, {first});
  const OpId upload = queued.add(Lane::upload, 6.0);
  const OpId late = queued.add(Lane::compute, 1.0, {behind, upload});
  const Prediction prediction = run_once(queued, rates);
  EXPECT_DOUBLE_EQ(span_of(prediction, first).end, 2.25);
  EXPECT_DOUBLE_EQ(span_of(prediction, behind).end, 4.25);
  EXPECT_DOUBLE_EQ(span_of(prediction, late).end, 6.25 + 1.25) << "its upload came later";
  EXPECT_DOUBLE_EQ(bound_of(prediction, Lane::compute), 5.0);
  Hand others;
  const OpId update = others.add(Lane::update, 2.0);
  others.add(Lane::update, 2.0, {update});
  const Prediction not_queued = run_once(others, rates);
  EXPECT_DOUBLE_EQ(not_queued.step_seconds, 4.5);
  EXPECT_DOUBLE_EQ(bound_of(not_queued, Lane::update), 4.5);
}

TEST(Simulator, TheNextStepIsSubmittedAtTheGateAndWaitsOnlyAtSeams) {
  Hand hand;
  const OpId compute = hand.add(Lane::compute, 4.0);
  const OpId gate = hand.add(Lane::update, 0.0, {compute});
  const OpId write = hand.add(Lane::writeback, 3.0, {gate});  // after the gate
  hand.gate(gate);
  const SimulationOptions three = {.warm_up = 1, .measured = 2, .timeline = true};
  const Prediction free = simulate(hand.schedule(), unit_rates(), three);
  EXPECT_DOUBLE_EQ(free.step_seconds, 4.0);  // the write runs during the next step
  EXPECT_DOUBLE_EQ(span_of(free, write, 1).start, 8.0);
  EXPECT_DOUBLE_EQ(at(free.busy_seconds, Lane::writeback), 3.0);
  EXPECT_EQ(free.bytes[static_cast<std::size_t>(Lane::writeback)], 3U);

  hand.carry(write, compute);
  const Prediction tied = simulate(hand.schedule(), unit_rates(), three);
  EXPECT_DOUBLE_EQ(tied.step_seconds, 7.0);
  EXPECT_DOUBLE_EQ(at(tied.stalled_seconds, Lane::compute), 3.0);
}

TEST(Simulator, NoMoreThanTwoRunsAreUnfinished) {
  Hand hand;
  const OpId compute = hand.add(Lane::compute, 1.0);
  const OpId gate = hand.add(Lane::update, 0.0, {compute});
  hand.add(Lane::writeback, 5.0, {gate});
  hand.gate(gate);
  const Prediction prediction =
      simulate(hand.schedule(), unit_rates(), {.warm_up = 0, .measured = 4, .timeline = true});
  // The writes of the first run end at 6: the third can only be submitted then.
  EXPECT_DOUBLE_EQ(span_of(prediction, compute, 1).start, 1.0);
  EXPECT_DOUBLE_EQ(span_of(prediction, compute, 2).start, 6.0);
  EXPECT_DOUBLE_EQ(span_of(prediction, compute, 3).start, 11.0);
}

TEST(Simulator, TheFirstStepIsFollowedBySteadyOnes) {
  Hand first;
  first.gate(first.add(Lane::compute, 10.0));
  Hand steady;
  steady.gate(steady.add(Lane::compute, 2.0));
  Schedule schedule = steady.schedule();
  schedule.first = first.schedule().steady;
  const auto seconds = [&](std::uint32_t warm_up, std::uint32_t measured) {
    return simulate(schedule, unit_rates(), {warm_up, measured}).step_seconds;
  };
  EXPECT_DOUBLE_EQ(seconds(0, 1), 10.0);
  EXPECT_DOUBLE_EQ(seconds(0, 2), 6.0);
  EXPECT_DOUBLE_EQ(seconds(2, 3), 2.0);
}

TEST(Simulator, BoundsComeLargestFirst) {
  Hand hand;
  hand.add(Lane::upload, 2.0);
  hand.add(Lane::compute, 7.0);
  hand.add(Lane::offload, 3.0);
  const Prediction prediction = run_once(hand);
  ASSERT_EQ(prediction.bounds.size(), 3U);
  EXPECT_EQ(prediction.bounds[0].lane, Lane::compute);
  EXPECT_EQ(prediction.bounds[1].lane, Lane::offload);
  EXPECT_EQ(prediction.bounds[2].lane, Lane::upload);
  EXPECT_DOUBLE_EQ(prediction.bounds[1].seconds, 3.0);
}

TEST(Simulator, ACycleOfEdgesIsAnError) {
  Hand hand;
  hand.add(Lane::compute, 1.0, {1});
  hand.add(Lane::upload, 1.0, {0});
  EXPECT_THROW(run_once(hand), Error);
}

std::string refusal(const Hand& hand, const Rates& rates) {
  try {
    run_once(hand, rates);
  } catch (const Error& error) {
    EXPECT_EQ(error.category(), ErrorCategory::config);
    return error.what();
  }
  return "";
}

TEST(Simulator, ARateThatIsMissingIsNamed) {
  Rates rates = unit_rates();
  rates.name = "laptop";
  rates.read_per_second = 0.0;
  Hand reading;
  reading.add(Lane::fetch, 1.0);
  EXPECT_EQ(refusal(reading, rates),
            "rates 'laptop': read_gbps is missing, but the plan fetches from NVMe");
  rates.forward.clear();
  Hand computing;
  computing.add(Lane::compute, 1.0);
  EXPECT_EQ(refusal(computing, rates),
            "rates 'laptop': forward is missing, but the plan computes layers");
  rates = unit_rates();
  rates.mixed_per_second = 0.0;
  EXPECT_EQ(refusal(reading, rates), "");
  reading.add(Lane::writeback, 1.0);
  EXPECT_EQ(refusal(reading, rates),
            "rates 'unit': mixed_gbps is missing, but the plan reads from and writes to NVMe at "
            "once");
  rates.mixed_per_second = 1.0;
  rates.mixed_read_share = 1.0;
  EXPECT_EQ(refusal(reading, rates),
            "rates 'unit': mixed_read_share must be above 0 and below 1, got 1");
  rates = with_cores(2, 0, 1);
  EXPECT_EQ(refusal(computing, rates),
            "rates 'unit': compute_threads is missing, but shared_cores is given");
}

}  // namespace
}  // namespace ballast::plan::simulator_test
