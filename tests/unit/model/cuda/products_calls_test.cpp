// Calls to cuBLASLt and the handling of its refusals, on a fake of cuBLASLt.
#include <cstdint>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/core/error.h"

#include "src/model/cuda/products/products.h"
#include "tests/support/expect_error.h"
#include "tests/support/fake_cublaslt.h"

namespace ballast::model::cuda::products_calls_test {
namespace {

using test::FakeCublasLt;

/// Ends errors that an earlier fault of a kernel may have caused.
const std::string kAdvice =
    "; a kernel of this or another operation failed: to find it, repeat with "
    "ballast.gpu_checks=each";

class ProductsCalls : public testing::Test {
 protected:
  ProductsCalls() : workspace_(Products::kWorkspace + 256) {
    const auto address = reinterpret_cast<std::uintptr_t>(workspace_.data());
    start_ = workspace_.data() + (256 - address % 256) % 256;
  }

  void multiply(Products& products, const Extents& extents, const Extras& extras = {}) {
    products.set_workspace(start_);
    const Matrix any = matrix(values_.data(), 16);
    products.multiply(nullptr, extents, any, any, matrix(out_.data(), 16), extras);
  }

  std::vector<std::byte> workspace_;
  std::byte* start_;
  // Memory from malloc is aligned to 16.
  std::vector<float> values_ = std::vector<float>(256, 0.5F);
  std::vector<float> out_ = std::vector<float>(256);
};

TEST_F(ProductsCalls, AnAlgorithmIsSearchedForOncePerShape) {
  Products products;
  const int before = FakeCublasLt::searches;
  for (int i = 0; i < 3; ++i) multiply(products, {16, 16, 16});
  EXPECT_EQ(FakeCublasLt::searches, before + 1);
  multiply(products, {16, 16, 8});
  EXPECT_EQ(FakeCublasLt::searches, before + 2);
  multiply(products, {16, 16, 16}, {.addend = out_.data()});
  multiply(products, {16, 16, 16}, {.bias = values_.data()});
  EXPECT_EQ(FakeCublasLt::searches, before + 4);
  multiply(products, {16, 16, 16}, {.addend = values_.data()});
  multiply(products, {16, 16, 16}, {.bias = values_.data() + 4});
  EXPECT_EQ(FakeCublasLt::searches, before + 4);
}

TEST_F(ProductsCalls, EveryPropertyOfAProductSelectsAnAlgorithm) {
  const std::vector<float> values(1024);
  std::vector<float> out(1024);
  struct Operands {
    Extents extents;
    Matrix a, b, d;
  };
  const Operands base = {
      {8, 8, 8}, matrix(values.data(), 16), matrix(values.data(), 16), matrix(out.data(), 16)};
  const Operands turned = {{8, 8, 8},
                           transposed(values.data(), 16),
                           transposed(values.data(), 16),
                           matrix(out.data(), 16)};
  std::vector<Operands> all = {base, turned};
  const auto also = [&](Operands operands, auto change) {
    change(operands);
    all.push_back(operands);
  };
  also(base, [](Operands& o) { o.extents.m = 4; });
  also(base, [](Operands& o) { o.extents.n = 4; });
  also(base, [](Operands& o) { o.extents.k = 4; });
  also(base, [](Operands& o) { o.a.row_step = 8; });
  also(base, [](Operands& o) { o.b.row_step = 8; });
  also(base, [](Operands& o) { o.d.row_step = 8; });
  also(base, [](Operands& o) { o.a.type = o.b.type = DType::bf16; });
  also(base, [](Operands& o) { o.a.type = o.b.type = o.d.type = DType::bf16; });
  also(turned, [](Operands& o) { o.a.column_step = 8; });
  also(turned, [](Operands& o) { o.b.column_step = 8; });
  Products products;
  products.set_workspace(start_);
  const int before = FakeCublasLt::searches;
  for (const Operands& o : all) products.multiply(nullptr, o.extents, o.a, o.b, o.d);
  EXPECT_EQ(FakeCublasLt::searches, before + static_cast<int>(all.size()));
  for (const Operands& o : all) products.multiply(nullptr, o.extents, o.a, o.b, o.d);
  EXPECT_EQ(FakeCublasLt::searches, before + static_cast<int>(all.size()));
}

TEST_F(ProductsCalls, OnlySumsOfAFixedOrderAreAllowed) {
  Products products;
  multiply(products, {16, 16, 16});
  EXPECT_EQ(FakeCublasLt::reductions, std::uint32_t{CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE});
  EXPECT_EQ(FakeCublasLt::workspace, Products::kWorkspace);
}

TEST_F(ProductsCalls, AssumeTheAlignmentThatAllRowsHave) {
  const std::vector<Bf16> values(256);
  std::vector<float> sums(256);
  Products products;
  products.set_workspace(start_);
  const auto expect = [&](const Matrix& a, const Matrix& b, const Matrix& d,
                          const std::vector<std::uint32_t>& alignments) {
    products.multiply(nullptr, {4, 4, 4}, a, b, d);
    EXPECT_EQ(std::vector<std::uint32_t>(FakeCublasLt::alignments.begin(),
                                         FakeCublasLt::alignments.end()),
              alignments);
  };
  const auto in = [&](std::size_t step) { return matrix(values.data(), step); };
  const auto out = [&](std::size_t step) { return matrix(sums.data(), step); };
  // cuBLASLt's A is b. Steps are in elements, of 2 bytes in a and b and 4 bytes in d.
  expect(in(8), in(16), out(8), {16, 16, 16, 16});
  expect(in(4), in(8), out(8), {16, 8, 16, 16});
  expect(in(8), in(6), out(5), {4, 16, 4, 4});
  expect(transposed(values.data(), 7), in(8), out(6), {16, 2, 8, 8});
}

TEST_F(ProductsCalls, ATransposedColumnIsARow) {
  std::vector<float> column(16);
  for (std::size_t i = 0; i < column.size(); ++i) column[i] = static_cast<float>(i);
  Products products;
  products.set_workspace(start_);
  products.multiply(nullptr, {16, 16, 1}, matrix(values_.data(), 1), transposed(column.data(), 1),
                    matrix(out_.data(), 16));
  EXPECT_EQ(out_[16 + 5], 2.5F);
}

TEST_F(ProductsCalls, EachBiasIsTheOneOfItsCall) {
  Products products;
  const std::vector<float> ones(16, 1.0F);
  const std::vector<float> twos(16, 2.0F);
  multiply(products, {16, 16, 4}, {.bias = ones.data()});
  EXPECT_EQ(out_[17], 2.0F);
  multiply(products, {16, 16, 4}, {.bias = twos.data()});
  EXPECT_EQ(out_[17], 3.0F);
  multiply(products, {16, 16, 4});
  EXPECT_EQ(out_[17], 1.0F);
}

TEST_F(ProductsCalls, NothingIsLeftBehind) {
  const int before = FakeCublasLt::alive;
  {
    Products products;
    multiply(products, {16, 16, 16});
    multiply(products, {16, 16, 8}, {.bias = values_.data()});
    FakeCublasLt::next_search = CUBLAS_STATUS_NOT_SUPPORTED;
    EXPECT_THROW(multiply(products, {8, 8, 8}), Error);
    EXPECT_GT(FakeCublasLt::alive, before);
  }
  EXPECT_EQ(FakeCublasLt::alive, before);
}

/// Returns the error of the next product.
template <class Call>
std::string error_of(const Call& call) {
  return test::error_of(ErrorCategory::device, call);
}

TEST_F(ProductsCalls, TheNextAlgorithmIsTakenWhenTheLibraryRefusesOne) {
  Products products;
  FakeCublasLt::refused = 2;
  const int before = FakeCublasLt::tried;
  multiply(products, {16, 16, 16});
  EXPECT_EQ(FakeCublasLt::last_algorithm, 2);
  EXPECT_EQ(FakeCublasLt::tried, before + 3);
  EXPECT_EQ(out_[17], 4.0F);
  // Keeps this algorithm even when the others would be accepted.
  FakeCublasLt::refused = 0;
  multiply(products, {16, 16, 16});
  EXPECT_EQ(FakeCublasLt::last_algorithm, 2);
  EXPECT_EQ(FakeCublasLt::tried, before + 4);
}

TEST_F(ProductsCalls, AnAlgorithmThatHasRunIsNotReplaced) {
  Products products;
  multiply(products, {16, 16, 16});
  EXPECT_EQ(FakeCublasLt::last_algorithm, 0);
  FakeCublasLt::refused = 1;
  EXPECT_EQ(error_of([&] {
              multiply(products, {16, 16, 16});
            }),
            "matrix product [16, 16, 16] of f32: cuBLASLt: CUBLAS_STATUS_NOT_SUPPORTED");
  FakeCublasLt::refused = 0;
}

TEST_F(ProductsCalls, OnlyRefusalsAreRetried) {
  Products products;
  const int before = FakeCublasLt::tried;
  FakeCublasLt::next_product = CUBLAS_STATUS_EXECUTION_FAILED;
  EXPECT_EQ(
      error_of([&] {
        multiply(products, {16, 16, 16});
      }),
      "matrix product [16, 16, 16] of f32: cuBLASLt: CUBLAS_STATUS_EXECUTION_FAILED" + kAdvice);
  EXPECT_EQ(FakeCublasLt::tried, before);
}

TEST_F(ProductsCalls, AProductWhoseAlgorithmsAreAllRefusedIsAnError) {
  Products products;
  FakeCublasLt::refused = 3;
  EXPECT_EQ(error_of([&] {
              multiply(products, {16, 16, 16});
            }),
            "matrix product [16, 16, 16] of f32: cuBLASLt: CUBLAS_STATUS_NOT_SUPPORTED");
  FakeCublasLt::refused = 0;
}

TEST_F(ProductsCalls, RefusalsNameTheProduct) {
  Products products;
  FakeCublasLt::next_search = CUBLAS_STATUS_NOT_SUPPORTED;
  EXPECT_EQ(error_of([&] {
              multiply(products, {16, 8, 4});
            }),
            "matrix product [16, 8, 4] of f32: cuBLASLt: CUBLAS_STATUS_NOT_SUPPORTED");
  FakeCublasLt::next_product = CUBLAS_STATUS_EXECUTION_FAILED;
  EXPECT_EQ(error_of([&] {
              multiply(products, {16, 8, 4});
            }),
            "matrix product [16, 8, 4] of f32: cuBLASLt: CUBLAS_STATUS_EXECUTION_FAILED" + kAdvice);
  EXPECT_NO_THROW(multiply(products, {16, 8, 4}));
  // Memory with a smaller alignment than the search assumed.
  EXPECT_EQ(error_of([&] {
              multiply(products, {4, 8, 4}, {.addend = values_.data() + 1});
            }),
            "matrix product [4, 8, 4] of f32: cuBLASLt: CUBLAS_STATUS_EXECUTION_FAILED" + kAdvice);
}

}  // namespace
}  // namespace ballast::model::cuda::products_calls_test
