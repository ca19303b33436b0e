// Rates of the parts of a layer and of the rest, from measurements of whole layers.

#include <gtest/gtest.h>

#include "ballast/plan/rates.h"

#include "src/calibrate/calibration.h"

namespace ballast::calibrate::attention_rates_test {
namespace {

constexpr double kProducts = 500e12;
constexpr double kAdapters = 2e12;
constexpr plan::AttentionRate kAttention = {.forward = 400e12, .backward = 200e12};
constexpr plan::AttentionRate kRecurrence = {.forward = 20e12, .backward = 10e12};

PartRates parts_of(AttentionClass attention, plan::AttentionRate rate) {
  PartRates parts;
  parts.attention[static_cast<std::size_t>(attention)] = rate;
  return parts;
}

/// All parts: attention with heads of 256, recurrences and adapters.
PartRates all_parts() {
  PartRates parts = parts_of(AttentionClass::heads_256, kAttention);
  parts.attention[static_cast<std::size_t>(AttentionClass::recurrence)] = kRecurrence;
  parts.adapters = kAdapters;
  return parts;
}

AttentionFlops attention_of(double tokens) {
  AttentionFlops flops{};
  flops[static_cast<std::size_t>(AttentionClass::heads_256)] = 20e9 * tokens;
  flops[static_cast<std::size_t>(AttentionClass::recurrence)] = 1e9 * tokens;
  return flops;
}

LayerWork work_of(double tokens) {
  return {.forward = 60e9 * tokens,
          .backward = 170e9 * tokens,
          .attention = attention_of(tokens),
          .attention_of_backward = attention_of(tokens),
          .adapters = 30e6 * tokens,
          .adapters_of_backward = 80e6 * tokens};
}

/// Rates as measured on whole layers whose products have kProducts and whose parts have the rates
/// of all_parts().
plan::Rates measured() {
  plan::Rates rates;
  for (const double tokens : {1024.0, 4096.0}) {
    const double attention = 20e9 * tokens;
    const double recurrence = 1e9 * tokens;
    const double again = attention / kAttention.forward + recurrence / kRecurrence.forward;
    const double forward =
        (60e9 * tokens - attention - recurrence) / kProducts + again + 30e6 * tokens / kAdapters;
    rates.forward.push_back({tokens, 60e9 * tokens / forward});
    const double backward = (170e9 * tokens - 3.0 * (attention + recurrence)) / kProducts + again +
                            2.5 * attention / kAttention.backward +
                            2.0 * recurrence / kRecurrence.backward + 80e6 * tokens / kAdapters;
    rates.backward.push_back({tokens, 170e9 * tokens / backward});
  }
  return rates;
}

TEST(PartRates, LeaveTheRateOfTheRestInTheCurves) {
  plan::Rates rates = measured();
  separate_parts(rates, all_parts(), work_of);
  EXPECT_EQ(rates.of(AttentionClass::heads_256), kAttention);
  EXPECT_EQ(rates.of(AttentionClass::recurrence), kRecurrence);
  EXPECT_EQ(rates.of(AttentionClass::heads_128), plan::AttentionRate());
  EXPECT_EQ(rates.adapter_per_second, kAdapters);
  for (const plan::Curve* curve : {&rates.forward, &rates.backward}) {
    for (const plan::CurvePoint& point : *curve) {
      EXPECT_NEAR(point.flops_per_second, kProducts, 1e-9 * kProducts);
    }
  }
}

TEST(PartRates, StayInTheCurvesIfTheyWereNotMeasured) {
  plan::Rates rates = measured();
  separate_parts(rates, {}, work_of);
  EXPECT_EQ(rates, measured());
  separate_parts(rates, parts_of(AttentionClass::heads_256, {.forward = kAttention.forward}),
                 work_of);
  EXPECT_EQ(rates, measured());
}

TEST(PartRates, StayInTheCurvesIfTheyLeaveTooLittleTime) {
  plan::Rates rates = measured();
  PartRates slow = all_parts();
  slow.attention[static_cast<std::size_t>(AttentionClass::heads_256)].forward *= 0.2;
  separate_parts(rates, slow, work_of);
  EXPECT_EQ(rates, measured());
}

}  // namespace
}  // namespace ballast::calibrate::attention_rates_test
