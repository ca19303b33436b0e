#include <set>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/cpu_adam/optimizer.h"

namespace ballast::cpu_adam::weight_checks_test {
namespace {

std::vector<Bf16> random_weights(Elems count) {
  std::vector<Bf16> weights;
  std::uint32_t state = 1;
  for (Elems i = 0; i < count; ++i) {
    state = state * 1664525U + 1013904223U;
    weights.push_back({static_cast<std::uint16_t>(state >> 16U)});
  }
  return weights;
}

std::vector<std::uint16_t> checks_of(const std::vector<Bf16>& weights) {
  std::vector<std::uint16_t> values(WeightChecks::values_of(weights.size()));
  compute_checks(weights.data(), weights.size(), values.data());
  return values;
}

/// The check value of a column, computed weight by weight.
std::uint16_t expected_check(const std::vector<Bf16>& weights, Elems value) {
  const Elems first =
      value / WeightChecks::kColumns * WeightChecks::kBlock + value % WeightChecks::kColumns;
  std::uint32_t hash = 0;
  for (Elems row = 0; row < WeightChecks::kRows; ++row) {
    const Elems i = first + row * WeightChecks::kColumns;
    const std::uint32_t bits = i < weights.size() ? weights[i].bits : 0U;
    hash = (hash ^ bits) * 0x9e37U % 65536U;
    hash ^= hash / 128U;
  }
  return static_cast<std::uint16_t>(hash);
}

TEST(WeightChecks, EqualThoseOfEachColumn) {
  for (const Elems count : {0U, 1U, 15U, 17U, 127U, 128U, 129U, 1000U, 4096U, 5001U}) {
    const std::vector<Bf16> weights = random_weights(count);
    const std::vector<std::uint16_t> values = checks_of(weights);
    for (Elems i = 0; i < values.size(); ++i) {
      EXPECT_EQ(values[i], expected_check(weights, i)) << count << " weights, value " << i;
    }
  }
}

TEST(WeightChecks, EveryValueOfOneWeightHasAnotherCheck) {
  for (const Elems place : {0U, 16U, 100U, 127U}) {
    std::vector<Bf16> weights = random_weights(WeightChecks::kBlock);
    std::set<std::uint16_t> seen;
    for (std::uint32_t bits = 0; bits < 65536U; ++bits) {
      weights[place].bits = static_cast<std::uint16_t>(bits);
      seen.insert(checks_of(weights)[place % WeightChecks::kColumns]);
    }
    EXPECT_EQ(seen.size(), 65536U);
  }
}

TEST(WeightChecks, OtherSignsOfAllWeightsHaveOtherChecks) {
  std::vector<Bf16> weights = random_weights(8192);
  const std::vector<std::uint16_t> before = checks_of(weights);
  for (Bf16& weight : weights) weight.bits ^= 0x8000U;
  const std::vector<std::uint16_t> after = checks_of(weights);
  for (Elems i = 0; i < before.size(); ++i) EXPECT_NE(before[i], after[i]);
}

}  // namespace
}  // namespace ballast::cpu_adam::weight_checks_test
