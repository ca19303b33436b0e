// Sums of rows of logits, by vocabulary tile.
#include <algorithm>
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

namespace ballast::model::cuda::row_sums_test {
namespace {

using test::DeviceArray;
using test::in_every_order;
using test::must;
using test::same_bits;

using CudaRowSums = test::Kernels;

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

}  // namespace
}  // namespace ballast::model::cuda::row_sums_test
