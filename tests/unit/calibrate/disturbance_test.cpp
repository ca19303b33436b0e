#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "src/calibrate/calibration.h"

namespace ballast::calibrate::disturbance_test {
namespace {

/// Rates whose forward curve is `tflops` for 64, 128, 256 ... tokens.
plan::Rates with_forward(const std::vector<double>& tflops) {
  plan::Rates rates;
  double tokens = 64.0;
  for (const double rate : tflops) {
    rates.forward.push_back({tokens, 1e12 * rate});
    tokens *= 2.0;
  }
  return rates;
}

/// Makes `attempts` in turn, on a machine that can `repeat`. `reasons` gets why each attempt after
/// the first was made.
Measurement measure(const std::vector<Attempt>& attempts, std::vector<std::string>& reasons,
                    bool repeat = true) {
  std::size_t next = 0;
  return measure_part([&] { return attempts.at(next++); },
                      [&](const std::string& why) {
                        if (repeat) reasons.push_back(why);
                        return repeat;
                      });
}

std::string disturbance(const plan::Rates& rates) {
  std::vector<std::string> reasons;
  return measure({{rates}, {rates}}, reasons).disturbance;
}

TEST(Disturbance, DetectsImpossibleRates) {
  EXPECT_EQ(disturbance(with_forward({0.0014, 0.145, 0.0072})),
            "the forward rate went from 0.0014 to 0.145 TFLOP/s between 64 and 128 tokens");
  EXPECT_EQ(disturbance(with_forward({0.145, 0.0072})),
            "the forward rate went from 0.145 to 0.0072 TFLOP/s between 64 and 128 tokens");
  plan::Rates rates = with_forward({0.1});
  rates.head = with_forward({0.3, 0.1}).forward;
  EXPECT_NE(disturbance(rates).find("head"), std::string::npos);
}

TEST(Disturbance, IgnoresSmallChangesOfRates) {
  EXPECT_EQ(disturbance(with_forward({0.1, 0.2, 0.3, 0.25})), "");
  EXPECT_EQ(disturbance({}), "");
}

TEST(Measurement, IsMadeOnceOnAQuietMachine) {
  std::vector<std::string> reasons;
  const Measurement found = measure({{with_forward({0.1}), 0.05}}, reasons);
  EXPECT_EQ(found.rates, with_forward({0.1}));
  EXPECT_EQ(found.disturbance, "");
  EXPECT_EQ(found.other_work, 0.05);
  EXPECT_TRUE(reasons.empty());
}

TEST(Measurement, IsRepeatedOnceIfOtherWorkDisturbedIt) {
  std::vector<std::string> reasons;
  const Measurement found =
      measure({{with_forward({0.1}), 0.48}, {with_forward({0.2}), 0.6}}, reasons);
  EXPECT_EQ(found.rates, with_forward({0.2}));  // corrected for other work
  EXPECT_EQ(found.disturbance, "other work used 60% of the CPU time");
  EXPECT_EQ(found.other_work, 0.6);
  EXPECT_EQ(reasons, std::vector<std::string>{"other work used 48% of the CPU time"});
}

TEST(Measurement, IsNotRepeatedOnAMachineThatIsKnownToBeBusy) {
  std::vector<std::string> reasons;
  const Measurement found = measure({{with_forward({0.1}), 0.48}}, reasons, false);
  EXPECT_EQ(found.rates, with_forward({0.1}));
  EXPECT_EQ(found.other_work, 0.48);
}

TEST(Measurement, IsNotTrustedIfItsRatesContradictEachOther) {
  std::vector<std::string> reasons;
  const Attempt wrong = {with_forward({0.1, 0.01}), 0.0};
  EXPECT_EQ(measure({wrong, wrong}, reasons).other_work, 1.0);
}

}  // namespace
}  // namespace ballast::calibrate::disturbance_test
