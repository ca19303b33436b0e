// The gradient of a table is packed from those of the rows that tokens have selected.

#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/core/dtype.h"
#include "ballast/core/memory.h"
#include "ballast/model/packed_values.h"

namespace ballast::model::scatter_rows_test {
namespace {

constexpr std::size_t kWidth = 19;  // no multiple of a vector
constexpr std::size_t kRows = 6;

/// Two micro-batches, in which token 4 comes four times.
struct Gradients {
  std::vector<std::int32_t> tokens[2] = {{4, 0, 4}, {5, 4, 0, 4}};
  std::vector<float> rows[2];

  Gradients() {
    for (std::size_t m = 0; m < 2; ++m) {
      for (std::size_t i = 0; i < tokens[m].size() * kWidth; ++i) {
        // Sums of these in another order round to other numbers.
        const float sign = i % 3 == 0 ? -1.0F : 1.0F;
        rows[m].push_back(sign * std::exp2(static_cast<float>((7 * i + m) % 29)) / 3.0F);
      }
    }
  }
  [[nodiscard]] std::vector<RowGradients> views() const {
    return {{rows[0], tokens[0]}, {rows[1], tokens[1]}};
  }
  /// The sums of all rows of the table, in the order of micro-batches and tokens.
  [[nodiscard]] std::vector<float> sums() const {
    std::vector<float> all(kRows * kWidth);
    for (std::size_t m = 0; m < 2; ++m) {
      for (std::size_t i = 0; i < rows[m].size(); ++i) {
        all[static_cast<std::size_t>(tokens[m][i / kWidth]) * kWidth + i % kWidth] += rows[m][i];
      }
    }
    return all;
  }
};

template <class T>
std::vector<T> scattered(const Gradients& of, GradientStats& stats) {
  std::vector<T> packed(kRows * kWidth, from_float<T>(7.0F));
  stats = scatter_rows(kTypeOf<T>, of.views(), kWidth, std::as_writable_bytes(std::span(packed)));
  return packed;
}

template <class T>
void expect_sums() {
  const Gradients of;
  GradientStats stats;
  const std::vector<T> packed = scattered<T>(of, stats);
  const std::vector<float> sums = of.sums();
  double squares = 0.0;
  for (std::size_t i = 0; i < sums.size(); ++i) {
    const float expected = to_float(from_float<T>(sums[i]));
    EXPECT_EQ(to_float(packed[i]), expected) << i;
    squares += static_cast<double>(expected) * expected;
  }
  EXPECT_NEAR(stats.sum_of_squares, squares, 1e-12 * squares);
  EXPECT_EQ(stats.non_finite, 0U);
}

TEST(ScatterRows, AddsInTheOrderOfMicroBatchesAndTokens) {
  expect_sums<float>();
  expect_sums<Bf16>();
}

TEST(ScatterRows, LeavesOutThePadToken) {
  const Gradients of;
  std::vector<float> packed(kRows * kWidth, 7.0F);
  scatter_rows(DType::f32, of.views(), kWidth, std::as_writable_bytes(std::span(packed)), 4);
  const std::vector<float> sums = of.sums();
  for (std::size_t i = 0; i < sums.size(); ++i) {
    EXPECT_EQ(packed[i], i / kWidth == 4 ? 0.0F : sums[i]) << i;
  }
}

TEST(ScatterRows, CountsValuesThatAreNotFinite) {
  Gradients of;
  of.rows[0][0] = std::numeric_limits<float>::infinity();
  of.rows[1][kWidth] = -std::numeric_limits<float>::infinity();  // of the same token: NaN
  of.rows[1][1] = std::numeric_limits<float>::quiet_NaN();
  GradientStats stats;
  const std::vector<float> packed = scattered<float>(of, stats);
  EXPECT_EQ(stats.non_finite, 2U);
  EXPECT_TRUE(std::isnan(packed[4 * kWidth]));
}

}  // namespace
}  // namespace ballast::model::scatter_rows_test
