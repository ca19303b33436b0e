// Attention's rates and those of the rest of a layer, from measurements of whole layers.

#include <gtest/gtest.h>

#include "ballast/plan/rates.h"

#include "src/calibrate/calibration.h"

namespace ballast::calibrate::attention_rates_test {
namespace {

constexpr double kProducts = 500e12;
constexpr AttentionRates kAttention = {.forward = 400e12, .backward = 200e12};

LayerFlops flops_of(double tokens) {
  return {.forward = 60e9 * tokens,
          .backward = 170e9 * tokens,
          .attention = 20e9 * tokens,
          .attention_of_backward = 20e9 * tokens};
}

/// Rates as measured on whole layers whose products have kProducts, and attention kAttention.
plan::Rates measured() {
  plan::Rates rates;
  for (const double tokens : {1024.0, 4096.0}) {
    const LayerFlops layer = flops_of(tokens);
    const double attention = layer.attention / kAttention.forward;
    const double forward = (layer.forward - layer.attention) / kProducts + attention;
    rates.forward.push_back({tokens, layer.forward / forward});
    const double flops = layer.backward;
    const double backward = (flops - 3.0 * layer.attention) / kProducts + attention +
                            2.5 * layer.attention / kAttention.backward;
    rates.backward.push_back({tokens, flops / backward});
  }
  return rates;
}

TEST(AttentionRates, LeaveTheRateOfTheRestInTheCurves) {
  plan::Rates rates = measured();
  separate_attention(rates, kAttention, flops_of);
  EXPECT_EQ(rates.attention_forward_per_second, kAttention.forward);
  EXPECT_EQ(rates.attention_backward_per_second, kAttention.backward);
  for (const plan::Curve* curve : {&rates.forward, &rates.backward}) {
    for (const plan::CurvePoint& point : *curve) {
      EXPECT_NEAR(point.flops_per_second, kProducts, 1e-9 * kProducts);
    }
  }
}

TEST(AttentionRates, StayInTheCurvesIfTheyWereNotMeasured) {
  plan::Rates rates = measured();
  separate_attention(rates, {}, flops_of);
  EXPECT_EQ(rates, measured());
  separate_attention(rates, {.forward = kAttention.forward}, flops_of);
  EXPECT_EQ(rates, measured());
}

TEST(AttentionRates, StayInTheCurvesIfTheyLeaveTooLittleTime) {
  plan::Rates rates = measured();
  separate_attention(rates, {.forward = 0.2 * kAttention.forward, .backward = kAttention.backward},
                     flops_of);
  EXPECT_EQ(rates, measured());
}

}  // namespace
}  // namespace ballast::calibrate::attention_rates_test
