// Packing and measuring of gradients on a GPU.
#include <limits>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>

#include "src/model/cuda/rows/rows.h"
#include "tests/support/device_array.h"
#include "tests/support/in_every_order.h"
#include "tests/unit/model/cuda/values.h"

namespace ballast::model::cuda::gradients_test {
namespace {

using test::DeviceArray;
using test::exact;
using test::in_every_order;
using test::must;
using test::rounded;

class CudaGradients : public test::Kernels {};

template <class T>
struct Packed {
  std::vector<T> values;
  GradientStats stats;
  GradientStats measured;  ///< statistics of the packed values alone
};

std::size_t chunks_of(std::size_t size) {
  return (size + kStatsChunk - 1) / kStatsChunk;
}

/// A gradient, with rows of a table of which some have sum rows.
struct Gradient {
  std::vector<float> rest;  ///< everything, if there is no table
  std::vector<float> tied = {};
  std::size_t width = 1;
  std::vector<std::uint32_t> sum_rows = {};  ///< by row of the table
  std::size_t padding = 0;                   ///< after the table
  std::vector<float> sums = {};              ///< [sum rows, width]

  [[nodiscard]] std::size_t table() const { return sum_rows.size() * width + padding; }
  [[nodiscard]] std::size_t size() const { return table() + rest.size(); }
  [[nodiscard]] float sum(std::size_t at) const {
    float sum = at >= table() ? rest[at - table()] : 0.0F;
    if (at < sum_rows.size() * width && sum_rows[at / width] != kNoSumRow) {
      sum = sums[sum_rows[at / width] * width + at % width];
    }
    return at < tied.size() ? sum + tied[at] : sum;
  }
};

/// Eight elements after the packed ones must not change.
template <class T>
Packed<T> pack(const Gradient& gradient) {
  const std::size_t size = gradient.size();
  const DeviceArray<float> rest(gradient.rest);
  const DeviceArray<float> sums(gradient.sums);
  const DeviceArray<std::uint32_t> sum_rows(gradient.sum_rows);
  const DeviceArray<float> tied(gradient.tied);
  const UnpackedGradient from = {.sum_rows = sums.data(),
                                 .sum_row_of = sum_rows.data(),
                                 .rows = gradient.sum_rows.size(),
                                 .width = gradient.width,
                                 .table = gradient.table(),
                                 .rest = rest.data(),
                                 .tied = tied.data(),
                                 .tied_size = gradient.tied.size()};
  const DeviceArray<GradientStats> partial(chunks_of(size), {-1.0, 5});
  const auto found = in_every_order([&] {
    const DeviceArray<T> packed(size + 8, rounded<T>(3.0));
    const DeviceArray<GradientStats> stats(2, {-1.0, 7});
    must(pack_gradient<T>(nullptr, from, packed.data(), size, partial.data(), stats.data()));
    must(measure_gradient<T>(nullptr, packed.data(), size, partial.data(), stats.data() + 1));
    return std::tuple{packed.get(), stats.get()};
  });
  Packed<T> all = {std::get<0>(found), std::get<1>(found)[0], std::get<1>(found)[1]};
  for (int i = 0; i < 8; ++i) {
    EXPECT_EQ(all.values.back(), rounded<T>(3.0));
    all.values.pop_back();
  }
  return all;
}

template <class T>
void check(const Gradient& gradient) {
  SCOPED_TRACE(testing::Message() << gradient.size() << " elements, " << gradient.sum_rows.size()
                                  << " rows of " << gradient.width << ", " << gradient.tied.size()
                                  << " tied elements");
  const Packed<T> found = pack<T>(gradient);
  double squares = 0.0;
  for (std::size_t i = 0; i < gradient.size(); ++i) {
    ASSERT_EQ(found.values[i], rounded<T>(gradient.sum(i))) << i;
    squares += exact(found.values[i]) * exact(found.values[i]);
  }
  EXPECT_NEAR(found.stats.sum_of_squares, squares, 1e-12 * squares);
  EXPECT_EQ(found.stats.non_finite, 0U);
  EXPECT_EQ(found.measured.sum_of_squares, found.stats.sum_of_squares);
  EXPECT_EQ(found.measured.non_finite, 0U);
}

TEST_F(CudaGradients, ArePackedAndMeasured) {
  // Sizes below a thread's eight elements, below a chunk, exactly one chunk, and above it.
  for (const std::size_t size : {std::size_t{1}, std::size_t{5}, std::size_t{8200}, kStatsChunk,
                                 kStatsChunk + 13, 3 * kStatsChunk - 4}) {
    const Gradient gradient = {.rest = test::normals<float>(size, 1)};
    check<float>(gradient);
    check<Bf16>(gradient);
  }
}

/// Rows in one chunk and over several, with a sum row for every third row.
TEST_F(CudaGradients, OfRowsWithoutSlotsAreThoseOfTheHead) {
  for (const auto& [rows, width] : {std::pair<std::size_t, std::size_t>{3, 8},
                                    {200, 40},
                                    {3000, 72},
                                    {9, 2 * kStatsChunk / 8 + 8}}) {
    for (const std::size_t rest : {std::size_t{0}, std::size_t{24}}) {
      Gradient gradient = {.rest = test::normals<float>(rest, 1),
                           .width = width,
                           .sum_rows = std::vector<std::uint32_t>(rows, kNoSumRow),
                           .padding = rest,
                           .sums = test::normals<float>((rows + 2) / 3 * width, 3)};
      for (std::size_t row = 0; row < rows; row += 3) {
        gradient.sum_rows[row] = static_cast<std::uint32_t>((rows + 2) / 3 - 1 - row / 3);
      }
      check<float>(gradient);
      gradient.tied = test::normals<float>(rows * width, 2);
      check<float>(gradient);
      check<Bf16>(gradient);
    }
  }
}

TEST_F(CudaGradients, OfMoreChunksThanThreadsAddThemUp) {
  // The last kernel has 128 threads.
  const std::size_t size = 129 * kStatsChunk + 8;
  const DeviceArray<Bf16> packed(size, to_bf16(0.5F));
  const DeviceArray<GradientStats> partial(chunks_of(size));
  const DeviceArray<GradientStats> stats(1);
  must(measure_gradient<Bf16>(nullptr, packed.data(), size, partial.data(), stats.data()));
  EXPECT_EQ(stats.get()[0].sum_of_squares, 0.25 * static_cast<double>(size));
}

template <class T>
void check_non_finite() {
  const float infinity = std::numeric_limits<float>::infinity();
  Gradient gradient = {.rest = std::vector<float>(kStatsChunk + 100, 1.0F),
                       .tied = std::vector<float>(48, 0.0F),
                       .width = 8,
                       .sum_rows = {5, 4, 3, 2, 1, 0},
                       .sums = std::vector<float>(48, 1.0F)};
  gradient.sums[3] = infinity;
  gradient.sums[4] = -infinity;
  gradient.rest[kStatsChunk + 99] = std::numeric_limits<float>::quiet_NaN();
  gradient.sums[7] = 3e38F;
  gradient.tied[47] = 3e38F;                              // their sum overflows
  gradient.rest[20] = std::numeric_limits<float>::max();  // rounds to infinity in bf16
  const Packed<T> found = pack<T>(gradient);
  const std::uint64_t expected = std::is_same_v<T, Bf16> ? 5 : 4;
  EXPECT_EQ(found.stats.non_finite, expected);
  EXPECT_EQ(found.measured.non_finite, expected);
  EXPECT_TRUE(std::isnan(found.stats.sum_of_squares));
  EXPECT_TRUE(std::isnan(exact(found.values.back())));
  EXPECT_EQ(exact(found.values[44]), -std::numeric_limits<double>::infinity());
}
TEST_F(CudaGradients, OfInfAndNanAreCounted) {
  check_non_finite<float>();
  check_non_finite<Bf16>();
}

TEST_F(CudaGradients, LargeOnesDoNotOverflowTheSum) {
  const Packed<float> found = pack<float>({.rest = std::vector<float>(16, 1e30F)});
  const auto value = static_cast<double>(1e30F);
  EXPECT_EQ(found.stats.sum_of_squares, 16 * value * value);
}

TEST_F(CudaGradients, ArePackedWithoutStatistics) {
  const DeviceArray<float> gradient(20, 1.5F);
  const DeviceArray<Bf16> packed(20);
  must(
      pack_gradient<Bf16>(nullptr, {.rest = gradient.data()}, packed.data(), 20, nullptr, nullptr));
  EXPECT_EQ(packed.get(), std::vector<Bf16>(20, to_bf16(1.5F)));
}

TEST_F(CudaGradients, EmptyInputsAreAccepted) {
  const DeviceArray<GradientStats> stats(1, {3.0, 4});
  must(measure_gradient<Bf16>(nullptr, nullptr, 0, nullptr, stats.data()));
  EXPECT_EQ(stats.get()[0].sum_of_squares, 0.0);
  EXPECT_EQ(stats.get()[0].non_finite, 0U);
  EXPECT_EQ(pack_gradient<float>(nullptr, {}, nullptr, 0, nullptr, nullptr), cudaSuccess);
}

}  // namespace
}  // namespace ballast::model::cuda::gradients_test
