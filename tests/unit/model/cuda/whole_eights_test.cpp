#include <cstddef>
#include <vector>

#include <gtest/gtest.h>

#include "src/model/cuda/products/products.h"

namespace ballast::model::cuda::whole_eights_test {
namespace {

float element(const Matrix& matrix, std::size_t row, std::size_t column) {
  const std::size_t at = row * matrix.row_step + column * matrix.column_step;
  return matrix.type == DType::f32 ? static_cast<const float*>(matrix.data)[at]
                                   : to_float(static_cast<const Bf16*>(matrix.data)[at]);
}

/// Small whole numbers, so that all sums are exact.
std::vector<Bf16> numbers(std::size_t size, int seed) {
  std::vector<Bf16> out;
  for (std::size_t i = 0; i < size; ++i) {
    out.push_back(to_bf16(static_cast<float>((static_cast<int>(i) * 7 + seed) % 9 - 4)));
  }
  return out;
}

struct Parts {
  std::vector<Extents> extents;
  std::vector<float> d;
};

/// Multiplies by parts; rows of matrices are 160 elements apart.
Parts multiply(const Extents& extents, bool a_by_rows, bool b_by_rows, bool adds) {
  constexpr std::size_t kStep = 160;
  const std::vector<Bf16> left = numbers(kStep * kStep, 1);
  const std::vector<Bf16> right = numbers(kStep * kStep, 2);
  Parts parts;
  parts.d.assign(kStep * kStep, 3.0F);
  const Matrix a = a_by_rows ? matrix(left.data(), kStep) : transposed(left.data(), kStep);
  const Matrix b = b_by_rows ? matrix(right.data(), kStep) : transposed(right.data(), kStep);
  const Matrix d = matrix(parts.d.data(), kStep);
  in_whole_eights(extents, a, b, d, adds,
                  [&](const Extents& e, const Matrix& left_part, const Matrix& right_part,
                      const Matrix& to, bool part_adds) {
                    parts.extents.push_back(e);
                    for (std::size_t r = 0; r < e.m; ++r) {
                      for (std::size_t c = 0; c < e.n; ++c) {
                        float sum = part_adds ? element(to, r, c) : 0.0F;
                        for (std::size_t k = 0; k < e.k; ++k) {
                          sum += element(left_part, r, k) * element(right_part, k, c);
                        }
                        const std::size_t at = r * to.row_step + c;
                        const_cast<float*>(static_cast<const float*>(to.data))[at] = sum;
                      }
                    }
                  });
  for (std::size_t r = 0; r < kStep; ++r) {
    for (std::size_t c = 0; c < kStep; ++c) {
      float sum = 3.0F;
      if (r < extents.m && c < extents.n) {
        if (!adds) sum = 0.0F;
        for (std::size_t k = 0; k < extents.k; ++k) sum += element(a, r, k) * element(b, k, c);
      }
      EXPECT_EQ(parts.d[r * kStep + c], sum) << r << ", " << c;
    }
  }
  return parts;
}

TEST(WholeEights, PartsAreTheWholeProduct) {
  for (const bool a_by_rows : {true, false}) {
    for (const bool b_by_rows : {true, false}) {
      for (const bool adds : {true, false}) {
        const Parts parts = multiply({67, 131, 93}, a_by_rows, b_by_rows, adds);
        // Columns are always cut, rows and the summed extent where elements follow each other.
        EXPECT_EQ(parts.extents.front().n, 128U);
        EXPECT_EQ(parts.extents.front().m, a_by_rows ? 67U : 64U);
        EXPECT_EQ(parts.extents.front().k, a_by_rows || !b_by_rows ? 88U : 93U);
      }
    }
  }
}

TEST(WholeEights, WholeAndSmallExtentsAreOneProduct) {
  EXPECT_EQ(multiply({128, 136, 64}, false, false, true).extents.size(), 1U);
  EXPECT_EQ(multiply({3, 63, 5}, false, true, false).extents.size(), 1U);
}

}  // namespace
}  // namespace ballast::model::cuda::whole_eights_test
