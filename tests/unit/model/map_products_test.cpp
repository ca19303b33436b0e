// All products of a linear map, which ProductOps makes of views, against sums in double.
#include <cstddef>
#include <vector>

#include <gtest/gtest.h>

#include "src/model/ops/product_ops.h"
#include "tests/unit/model/cuda/host_ops.h"
#include "tests/unit/model/numbers.h"

namespace ballast::model::map_products_test {
namespace {

constexpr std::size_t kRows = 5;
constexpr std::size_t kIn = 8;
constexpr std::size_t kOut = 6;
constexpr std::size_t kStep = kOut + 3;  ///< between rows of results
using Values = std::vector<float>;

class MapProducts : public testing::TestWithParam<bool> {
 protected:
  /// Element of the weight's matrix or its gradient.
  float& at(Values& matrix, std::size_t in, std::size_t out) const {
    return GetParam() ? matrix[out * kIn + in] : matrix[in * kOut + out];
  }
  Linear<float> map() {
    return {.weight = weight_.data(),
            .bias = bias_.data(),
            .weight_gradient = gradient_.data(),
            .in = kIn,
            .out = kOut,
            .flipped = GetParam()};
  }
  double result(std::size_t row, std::size_t out) {
    double sum = bias_[out];
    for (std::size_t i = 0; i < kIn; ++i) {
      sum += static_cast<double>(x_[row * kIn + i]) * static_cast<double>(at(weight_, i, out));
    }
    return sum;
  }
  double input_gradient(std::size_t row, std::size_t in) {
    double sum = 0.0;
    for (std::size_t o = 0; o < kOut; ++o) {
      sum += static_cast<double>(dy_[row * kStep + o]) * static_cast<double>(at(weight_, in, o));
    }
    return sum;
  }

  DeviceOps<float> ops_ = test::host_ops<float>();
  Values weight_ = test::normals<float>(kIn * kOut, 1);
  Values bias_ = test::normals<float>(kOut, 2);
  Values x_ = test::normals<float>(kRows * kIn, 3);
  Values dy_ = test::normals<float>(kRows * kStep, 4);
  Values gradient_ = test::normals<float>(kIn * kOut, 5);
};

TEST_P(MapProducts, ResultsHaveTheBiasInEveryForm) {
  Values rows(kRows * kStep, 7.0F);
  const Values residual = test::normals<float>(kRows * kOut, 6);
  Values onto(residual.size());
  Values part(residual.size());
  ops_.products->linear(map(), x_.data(), rows.data(), kStep, kRows);
  ops_.products->linear_onto(map(), x_.data(), residual.data(), onto.data(), kRows);
  ops_.products->linear_part(map(), x_.data(), part.data(), kRows);
  for (std::size_t r = 0; r < kRows; ++r) {
    for (std::size_t o = 0; o < kOut; ++o) {
      const double expected = result(r, o);
      EXPECT_NEAR(rows[r * kStep + o], expected, 1e-5);
      EXPECT_NEAR(part[r * kOut + o], expected, 1e-5);
      EXPECT_NEAR(onto[r * kOut + o], expected + residual[r * kOut + o], 1e-5);
    }
    EXPECT_EQ(rows[r * kStep + kOut], 7.0F) << "between the rows";
  }
}

TEST_P(MapProducts, GradientsOfInputsAreWrittenOrAdded) {
  Values written(kRows * kIn, 100.0F);
  Values added(kRows * kIn, 100.0F);
  ops_.products->linear_input(map(), dy_.data(), kStep, written.data(), kRows);
  ops_.products->linear_input_part(map(), dy_.data(), kStep, added.data(), kRows, true);
  for (std::size_t r = 0; r < kRows; ++r) {
    for (std::size_t i = 0; i < kIn; ++i) {
      EXPECT_NEAR(written[r * kIn + i], input_gradient(r, i), 1e-5);
      EXPECT_NEAR(added[r * kIn + i], input_gradient(r, i) + 100.0, 1e-4);
    }
  }
}

TEST_P(MapProducts, GradientsOfWeightsAreAddedUnlessTheyAreOverwritten) {
  const Values before = gradient_;
  Linear<float> how = map();
  for (const bool overwrites : {false, true}) {
    gradient_ = before;
    how.overwrites_gradient = overwrites;
    ops_.products->linear_weight(how, x_.data(), dy_.data(), kStep, kRows);
    for (std::size_t i = 0; i < kIn; ++i) {
      for (std::size_t o = 0; o < kOut; ++o) {
        Values copy = before;
        double expected = overwrites ? 0.0 : static_cast<double>(at(copy, i, o));
        for (std::size_t r = 0; r < kRows; ++r) {
          expected +=
              static_cast<double>(x_[r * kIn + i]) * static_cast<double>(dy_[r * kStep + o]);
        }
        EXPECT_NEAR(at(gradient_, i, o), expected, 1e-5);
      }
    }
  }
  gradient_ = before;
  how.weight_gradient = nullptr;
  ops_.products->linear_weight(how, x_.data(), dy_.data(), kStep, kRows);
  EXPECT_EQ(gradient_, before);
}

INSTANTIATE_TEST_SUITE_P(Forms, MapProducts, testing::Bool(),
                         [](const auto& flipped) { return flipped.param ? "OutIn" : "InOut"; });

}  // namespace
}  // namespace ballast::model::map_products_test
