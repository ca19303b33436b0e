// Sums of rows of logits, by vocabulary tile.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>

#include "src/model/cuda/tokens/tokens.h"
#include "tests/support/device_array.h"
#include "tests/support/in_every_order.h"
#include "tests/support/tags.h"

namespace ballast::model::cuda::row_sums_test {
namespace {

using test::DeviceArray;
using test::in_every_order;
using test::must;
using test::same_bits;

using CudaRowSums = test::Kernels;

TAG_TESTS("small_shapes", "CudaRowSums.*");
TEST_F(CudaRowSums, OfTilesAreMergedAsIfTheyWereVisited) {
  // Two places with three tiles of 8 logits. The first tile of the first row is -infinity.
  constexpr std::size_t kRows = 5;
  constexpr std::size_t kPlaces = 2;
  constexpr std::size_t kTiles = 3;
  constexpr std::size_t kWidth = 8;
  constexpr std::size_t kStride = kPlaces * kTiles * kWidth;
  constexpr std::size_t kStep = kTiles * kRows + 7;
  std::mt19937 random(11);
  std::vector<float> logits(kRows * kStride);
  for (float& logit : logits) logit = std::normal_distribution<float>(0.0F, 4.0F)(random);
  std::fill_n(logits.begin(), kWidth, -std::numeric_limits<float>::infinity());
  const DeviceArray<float> values(logits);
  const DeviceArray<std::int32_t> targets(std::vector<std::int32_t>{9, 0, -1, 47, 20});
  const std::vector<RowSum<float>> before(kPlaces * kStep, {7.0F, 7.0F, 7.0});
  const auto [visited, merged] = in_every_order([&] {
    const DeviceArray<RowSum<float>> sums(std::vector(before.begin(), before.begin() + kRows));
    const DeviceArray<RowSum<float>> apart(before);
    const DeviceArray<RowSum<float>> together(std::vector(before.begin(), before.begin() + kRows));
    for (std::size_t i = 0; i < kPlaces * kTiles; ++i) {
      const LogitTile tile = {values.data() + i * kWidth, kRows, kStride, i * kWidth, kWidth};
      must(sum_logits(nullptr, tile, targets.data(), i == 0, sums.data()));
      must(sum_logits(nullptr, tile, targets.data(), true,
                      apart.data() + i / kTiles * kStep + i % kTiles * kRows));
    }
    must(merge_row_sums(nullptr, {apart.data(), kPlaces, kTiles, kRows, kStep}, together.data()));
    return std::tuple(sums.get(), together.get());
  });
  EXPECT_TRUE(same_bits(visited, merged));
  EXPECT_GE(visited[0].total, 1.0);
  EXPECT_EQ(visited[0].wanted, logits[9]);
  EXPECT_EQ(visited[2].total, 0.0) << "a row without a target";
}

TEST_F(CudaRowSums, OfCappedLogitsGiveTheDerivativesBeforeTheCap) {
  constexpr std::size_t kRows = 2;
  constexpr std::size_t kWidth = 131;
  constexpr std::size_t kStride = 144;
  constexpr float kCap = 2.0F;
  std::mt19937 random(12);
  std::vector<float> logits(kRows * kStride);
  for (float& logit : logits) logit = std::normal_distribution<float>(0.0F, 2.0F)(random);
  const std::vector<std::int32_t> wanted = {0, 130};
  const DeviceArray<std::int32_t> targets(wanted);
  const auto gradients = in_every_order([&] {
    const DeviceArray<float> values(logits);
    const DeviceArray<RowSum<float>> sums(kRows);
    const LogitTile tile = {values.data(), kRows, kStride, 0, kWidth, kCap};
    must(cap_logits(nullptr, tile));
    must(sum_logits(nullptr, tile, targets.data(), true, sums.data()));
    must(logit_gradients<float>(nullptr, tile, targets.data(), 1.0F, nullptr, sums.data()));
    return values.get();
  });
  for (std::size_t r = 0; r < kRows; ++r) {
    const auto u = [&](std::size_t i) {
      return std::tanh(static_cast<double>(logits[r * kStride + i]) / kCap);
    };
    double total = 0.0;
    for (std::size_t i = 0; i < kWidth; ++i) total += std::exp(kCap * u(i));
    for (std::size_t i = 0; i < kWidth; ++i) {
      const double one = i == static_cast<std::size_t>(wanted[r]) ? 1.0 : 0.0;
      const double expected = (std::exp(kCap * u(i)) / total - one) * (1.0 - u(i) * u(i));
      EXPECT_NEAR(gradients[r * kStride + i], expected, 1e-5 * std::abs(expected) + 1e-8)
          << r << ", " << i;
    }
  }
}

}  // namespace
}  // namespace ballast::model::cuda::row_sums_test
