#include "ballast/plan/rates.h"

#include <gtest/gtest.h>

#include "ballast/core/error.h"
#include "ballast/plan/simulator.h"

#include "tests/unit/plan/unit_rates.h"

namespace ballast::plan::rates_test {
namespace {

TEST(SecondsAlone, AreBytesOverTheRateOfTheLane) {
  Rates rates = unit_rates();
  rates.upload_per_second = 4.0;
  rates.read_per_second = 2.0;
  rates.launch_seconds = 0.5;
  rates.io_latency_seconds = 0.25;
  Operation operation;
  operation.bytes = 8;
  operation.lane = Lane::upload;
  EXPECT_DOUBLE_EQ(seconds_alone(operation, Schedule(), rates), 2.5);
  operation.lane = Lane::fetch;
  EXPECT_DOUBLE_EQ(seconds_alone(operation, Schedule(), rates), 4.75);
}

TEST(SecondsAlone, OfACollectiveAreThoseOfTheSlowestLineItCrosses) {
  Rates rates = unit_rates();
  rates.fabric_per_second = 8.0;
  rates.network_per_second = 2.0;
  rates.ranks_per_node = 4;
  Operation operation;
  operation.lane = Lane::gather;
  operation.bytes = 16;
  Schedule schedule;
  schedule.ranks = 4;
  EXPECT_DOUBLE_EQ(seconds_alone(operation, schedule, rates), 2.0);
  schedule.ranks = 8;
  EXPECT_DOUBLE_EQ(seconds_alone(operation, schedule, rates), 8.0);
  rates.network_per_second = 100.0;
  EXPECT_DOUBLE_EQ(seconds_alone(operation, schedule, rates), 2.0);
  rates.ranks_per_node = 1;
  EXPECT_DOUBLE_EQ(seconds_alone(operation, schedule, rates), 0.16);
}

TEST(SecondsAlone, OfComputeAreThoseOfFlopsAndOfMemoryTraffic) {
  Rates rates = unit_rates();
  rates.forward = {{64.0, 10.0}};
  rates.backward = {{64.0, 20.0}};
  rates.head = {{64.0, 40.0}};
  rates.device_memory_per_second = 4.0;
  Schedule schedule;
  schedule.micro_batch_tokens = 64;
  Operation operation;
  operation.flops = 80.0;
  operation.traffic = 8;
  const auto seconds = [&](Speed speed) {
    operation.speed = speed;
    return seconds_alone(operation, schedule, rates);
  };
  EXPECT_DOUBLE_EQ(seconds(Speed::forward), 10.0);
  EXPECT_DOUBLE_EQ(seconds(Speed::backward), 6.0);
  EXPECT_DOUBLE_EQ(seconds(Speed::head), 4.0);
}

TEST(SecondsAlone, OfAttentionHaveTheirOwnRates) {
  Rates rates = unit_rates();
  rates.backward = {{64.0, 10.0}};
  Schedule schedule;
  schedule.micro_batch_tokens = 64;
  // A backward pass that recomputes its layer: 8 FLOPs of attention forward, and twice that back.
  Operation operation;
  operation.speed = Speed::backward;
  operation.flops = 100.0;
  operation.attention_flops = 8.0;
  operation.attention_backward_flops = 16.0;
  EXPECT_DOUBLE_EQ(seconds_alone(operation, schedule, rates), 10.0);
  rates.of(AttentionClass::heads_128).forward = 4.0;
  EXPECT_DOUBLE_EQ(seconds_alone(operation, schedule, rates), 9.2 + 2.0);
  // Five products, of which 16 FLOPs are four.
  rates.of(AttentionClass::heads_128).backward = 2.0;
  EXPECT_DOUBLE_EQ(seconds_alone(operation, schedule, rates), 7.6 + 2.0 + 10.0);
  operation.flops = 24.0;
  rates.backward.clear();
  EXPECT_DOUBLE_EQ(seconds_alone(operation, schedule, rates), 2.0 + 10.0);
}

TEST(SecondsAlone, OfEachClassOfAttentionHaveItsRates) {
  for (const AttentionClassInfo& info : kAttentionClasses) {
    Rates rates = unit_rates();
    for (const AttentionClassInfo& other : kAttentionClasses) rates.of(other.id) = {32.0, 32.0};
    rates.of(info.id) = {.forward = 4.0, .backward = 2.0};
    Operation operation;
    operation.flops = 24.0;
    operation.attention_flops = 8.0;
    operation.attention_backward_flops = 16.0;
    operation.attention = info.id;
    // Five products of attention count as four; a recurrence has no product more.
    const double backward = info.id == AttentionClass::recurrence ? 8.0 : 10.0;
    EXPECT_DOUBLE_EQ(seconds_alone(operation, Schedule(), rates), 2.0 + backward) << info.key;
  }
}

TEST(SecondsAlone, OfAdaptersAreThoseOfTheirTraffic) {
  Rates rates = unit_rates();
  Operation operation;
  operation.adapter_traffic = 12;
  EXPECT_DOUBLE_EQ(seconds_alone(operation, Schedule(), rates), 0.0);  // the curves include them
  rates.adapter_per_second = 4.0;
  EXPECT_DOUBLE_EQ(seconds_alone(operation, Schedule(), rates), 3.0);
}

Rates with_attention(double forward, double backward) {
  Rates rates = unit_rates();
  rates.of(AttentionClass::heads_128) = {.forward = forward, .backward = backward};
  return rates;
}

TEST(Complete, DerivesMissingRatesFromThoseOfTheSubstitute) {
  Rates rates = with_attention(100.0, 50.0);
  rates.of(AttentionClass::heads_256) = {.forward = 40.0, .backward = 20.0};
  complete(rates);
  for (const AttentionClassInfo& info : kAttentionClasses) {
    const AttentionRate& like = rates.of(info.substitute);
    const bool given = info.id == AttentionClass::heads_128 || info.id == AttentionClass::heads_256;
    EXPECT_EQ(rates.of(info.id).assumed, !given) << info.key;
    if (given) continue;
    EXPECT_DOUBLE_EQ(rates.of(info.id).forward, info.forward * like.forward) << info.key;
    EXPECT_DOUBLE_EQ(rates.of(info.id).backward, info.backward * like.backward) << info.key;
  }
  EXPECT_EQ(rates.of(AttentionClass::heads_256).forward, 40.0);
  EXPECT_TRUE(rates.adapters_assumed);
  EXPECT_EQ(rates.adapter_per_second, kAdapterShare * rates.device_memory_per_second);
}

TEST(Complete, LeavesGivenRatesCalibrationsAndCurvesWithAttention) {
  Rates all = with_attention(100.0, 50.0);
  for (AttentionRate& rate : all.attention) rate = {7.0, 5.0};
  all.adapter_per_second = 3.0;
  Rates same = all;
  complete(same);
  EXPECT_EQ(same, all);
  Rates calibrated = with_attention(100.0, 50.0);
  calibrated.measured_at = 1.8e9;
  same = calibrated;
  complete(same);
  EXPECT_EQ(same, calibrated);
  Rates none = unit_rates();
  complete(none);
  EXPECT_EQ(none.attention, Rates().attention);
}

TEST(Complete, TakesKernelsOfTheHostDeviceAsEquallyFast) {
  Rates rates = with_attention(100.0, 50.0);
  rates.shared_cores = 4;
  complete(rates);
  for (const AttentionRate& rate : rates.attention) {
    EXPECT_EQ(rate.forward, 100.0);
    EXPECT_EQ(rate.backward, 50.0);
  }
  EXPECT_EQ(rates.adapter_per_second, 0.0);
}

TEST(RateAt, InterpolatesTheTimePerFlopInTheLogarithmOfTokens) {
  const Curve curve = {{256.0, 10.0}, {1024.0, 30.0}, {2048.0, 40.0}};
  EXPECT_DOUBLE_EQ(rate_at(curve, 256.0), 10.0);
  EXPECT_DOUBLE_EQ(rate_at(curve, 1024.0), 30.0);
  EXPECT_DOUBLE_EQ(rate_at(curve, 512.0), 15.0);  // half way between 1/10 and 1/30
  EXPECT_DOUBLE_EQ(rate_at(curve, 1.0), 10.0);
  EXPECT_DOUBLE_EQ(rate_at(curve, 1e6), 40.0);
  EXPECT_THROW(rate_at({}, 1.0), Error);
}

}  // namespace
}  // namespace ballast::plan::rates_test
