// Sum rows of the rows of the embedding on a GPU.
#include <algorithm>
#include <cstdint>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/model/block_layout.h"

#include "src/model/cuda/tokens/tokens.h"
#include "tests/support/device_array.h"
#include "tests/support/in_every_order.h"
#include "tests/unit/model/cuda/values.h"

namespace ballast::model::cuda::token_sums_test {
namespace {

using test::DeviceArray;

class CudaTokenSums : public test::Kernels {};

TEST_F(CudaTokenSums, AreFoundForTheRowsOfATile) {
  constexpr std::size_t kFirst = 16;
  constexpr std::size_t kRows = 16;
  constexpr std::int32_t kPad = 17;
  const auto slot_of = [](std::int32_t token) {
    return token == kPad ? kPadSumRow : (7 * token + 3) % 16;
  };
  std::vector<std::int32_t> tokens;
  std::vector<std::int32_t> sum_rows;
  std::vector<std::uint32_t> expected(kRows, kNoSumRow);
  for (std::int32_t i = 0; i < 600; ++i) {
    const std::int32_t token = i * i % 41 - 1;
    tokens.push_back(token);
    sum_rows.push_back(slot_of(token));
    const auto row = static_cast<std::size_t>(token) - kFirst;
    if (row < kRows) expected[row] = static_cast<std::uint32_t>(slot_of(token));
  }
  const DeviceArray<std::int32_t> of_tokens(tokens);
  const DeviceArray<std::int32_t> of_slots(sum_rows);
  const Ids ids = {.tokens = of_tokens.data(), .sum_rows = of_slots.data()};
  const auto found = test::in_every_order([&] {
    const DeviceArray<std::uint32_t> rows(kRows, kNoSumRow);
    test::must(find_sum_rows(nullptr, ids, tokens.size(), {kFirst, kRows, rows.data()}));
    return rows.get();
  });
  EXPECT_EQ(found, expected);
  EXPECT_EQ(found[kPad - kFirst], kNoSumRow);
  EXPECT_NE(std::ranges::find(tokens, kPad), tokens.end());
  test::must(find_sum_rows(nullptr, ids, 0, {}));
}

TEST_F(CudaTokenSums, APadTokenAddsNothingToItsRow) {
  constexpr std::size_t kWidth = 8;
  constexpr std::size_t kRows = 4;
  const std::vector<std::int32_t> tokens = {1, 2, 1, 0, 2};
  const std::vector<std::int32_t> sum_rows = {kPadSumRow, 0, kPadSumRow, 1, 0};
  const DeviceArray<std::int32_t> of_tokens(tokens);
  const DeviceArray<std::int32_t> of_slots(sum_rows);
  const DeviceArray<float> dy(tokens.size() * kWidth, 1.0F);
  const Ids ids = {.tokens = of_tokens.data(), .sum_rows = of_slots.data()};
  const auto found = test::in_every_order([&] {
    const DeviceArray<float> sums(2 * kWidth, 0.0F);
    const DeviceArray<std::uint32_t> links(2 * tokens.size(), 0xdeadbeefU);
    const EmbeddingExtents extents = {tokens.size(), tokens.size(), kWidth};
    const Embedding<float> gradients = {.tokens = sums.data(), .size = kRows};
    test::must(embed_backward<float>(nullptr, ids, dy.data(), extents, gradients, links.data()));
    return sums.get();
  });
  std::vector<float> expected(kWidth, 2.0F);  // of token 2, then of token 0
  expected.resize(2 * kWidth, 1.0F);
  EXPECT_EQ(found, expected);
}

}  // namespace
}  // namespace ballast::model::cuda::token_sums_test
