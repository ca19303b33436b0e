// The timed choice of algorithms of products, on fakes of CUDA and cuBLASLt.
#include <array>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/core/error.h"

#include "src/model/cuda/products/products.h"
#include "tests/support/captured_log.h"
#include "tests/support/fake_cublaslt.h"
#include "tests/support/fake_cuda.h"

namespace ballast::model::cuda::product_trials_test {
namespace {

using test::FakeCublasLt;
using test::FakeCuda;

/// Choices in memory.
class Memory final : public ProductChoices {
 public:
  std::size_t choose(const std::string& library, const std::string& product,
                     std::span<const ProductAlgorithm> candidates,
                     const std::function<std::size_t()>& time) override {
    ++asked;
    libraries.insert(library);
    const auto found = kept.find(product);
    for (std::size_t i = 0; found != kept.end() && i < candidates.size(); ++i) {
      if (candidates[i] == found->second) return i;
    }
    const std::size_t chosen = time();
    kept[product] = candidates[chosen];
    return chosen;
  }

  int asked = 0;
  std::set<std::string> libraries;
  std::map<std::string, ProductAlgorithm> kept;
};

class ProductTrials : public testing::Test {
 protected:
  ProductTrials() : workspace_(Products::kWorkspace + 256) {
    const auto address = reinterpret_cast<std::uintptr_t>(workspace_.data());
    start_ = workspace_.data() + (256 - address % 256) % 256;
    for (std::size_t i = 0; i < out_.size(); ++i) out_[i] = static_cast<float>(i);
    set_times({3.0, 1.0, 2.0});
  }
  ~ProductTrials() override {
    FakeCublasLt::refused = 0;
    FakeCublasLt::also_refused = -1;
    FakeCublasLt::found = 3;
    FakeCuda::most_at_once = SIZE_MAX;
    set_times({});
  }

  static void set_times(const std::array<double, 3>& times) {
    for (std::size_t i = 0; i < times.size(); ++i) FakeCublasLt::milliseconds[i] = times[i];
  }
  /// out_ = the product of matrices of 0.5 (+ addend): 4, with 16 terms.
  void multiply(Products& products, const Extras& extras = {}, const Extents& e = {16, 16, 16}) {
    products.set_workspace(start_);
    const Matrix any = matrix(values_.data(), 16);
    products.multiply(nullptr, e, any, any, matrix(out_.data(), 16), extras);
  }

  std::vector<std::byte> workspace_;
  std::byte* start_;
  std::vector<float> values_ = std::vector<float>(256, 0.5F);
  std::vector<float> out_ = std::vector<float>(256);
  std::shared_ptr<Memory> memory_ = std::make_shared<Memory>();
};

TEST_F(ProductTrials, TheFastestIsTakenAndNotTimedAgain) {
  Products products(memory_);
  multiply(products);
  EXPECT_EQ(FakeCublasLt::last_algorithm, 1);
  EXPECT_EQ(out_[17], 4.0F);
  EXPECT_EQ(memory_->kept.size(), 1U);
  const int before = FakeCublasLt::tried;
  set_times({1.0, 2.0, 3.0});
  multiply(products);
  EXPECT_EQ(FakeCublasLt::last_algorithm, 1);
  EXPECT_EQ(FakeCublasLt::tried, before + 1);
  EXPECT_EQ(memory_->asked, 1);
}

TEST_F(ProductTrials, OfEquallyFastOnesTheLibrarysBestIsTaken) {
  set_times({2.0, 1.0, 1.0});
  Products products(memory_);
  multiply(products);
  EXPECT_EQ(FakeCublasLt::last_algorithm, 1);
}

TEST_F(ProductTrials, WithoutChoicesNothingIsTimed) {
  Products products;
  const int before = FakeCublasLt::tried;
  multiply(products);
  EXPECT_EQ(FakeCublasLt::last_algorithm, 0);
  EXPECT_EQ(FakeCublasLt::tried, before + 1);
}

TEST_F(ProductTrials, TrialsDoNotAddToTheResult) {
  Products products(memory_);
  multiply(products, {.addend = out_.data()});
  EXPECT_EQ(FakeCublasLt::last_algorithm, 1);
  for (std::size_t i = 0; i < out_.size(); ++i) {
    ASSERT_EQ(out_[i], static_cast<float>(i) + 4.0F) << i;
  }
}

TEST_F(ProductTrials, TrialsLeaveAnotherAddendAlone) {
  std::vector<float> addend(256, 2.0F);
  Products products(memory_);
  multiply(products, {.addend = addend.data()});
  EXPECT_EQ(out_, std::vector<float>(256, 6.0F));
  EXPECT_EQ(addend, std::vector<float>(256, 2.0F));
}

TEST_F(ProductTrials, WithoutMemoryForTrialsTheLibrarysBestIsTaken) {
  FakeCuda::most_at_once = 1023;  // the result has 1024 bytes
  Products products(memory_);
  const test::CapturedLog log;
  multiply(products, {.addend = out_.data()});
  EXPECT_EQ(FakeCublasLt::last_algorithm, 0);
  EXPECT_EQ(out_[17], 17.0F + 4.0F);
  EXPECT_EQ(log.text(),
            "products: [16, 16, 16] of f32 rows 16 apart, f32 rows 16 apart, into f32 rows 16 "
            "apart, with an addend is not timed, because that needs 1.00 KiB of device memory in "
            "addition to ballast.device_bytes; using the library's choice\n");
  // Other products need no such memory.
  multiply(products);
  EXPECT_EQ(FakeCublasLt::last_algorithm, 1);
}

TEST_F(ProductTrials, RefusedAlgorithmsAreLeftOut) {
  set_times({1.0, 2.0, 3.0});
  FakeCublasLt::refused = 1;
  Products products(memory_);
  multiply(products);
  EXPECT_EQ(FakeCublasLt::last_algorithm, 1);
  EXPECT_EQ(out_[17], 4.0F);
}

TEST_F(ProductTrials, IfAllAreRefusedNothingIsKept) {
  FakeCublasLt::refused = 3;
  Products products(memory_);
  try {
    multiply(products);
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.category(), ErrorCategory::device);
    EXPECT_STREQ(error.what(),
                 "matrix product [16, 16, 16] of f32: cuBLASLt: CUBLAS_STATUS_NOT_SUPPORTED");
  }
  EXPECT_TRUE(memory_->kept.empty());
}

TEST_F(ProductTrials, KeptChoicesAreUsedUntimed) {
  {
    Products first(memory_);
    multiply(first);
  }
  set_times({1.0, 3.0, 2.0});
  Products later(memory_);
  const int before = FakeCublasLt::tried;
  multiply(later);
  EXPECT_EQ(FakeCublasLt::last_algorithm, 1);
  EXPECT_EQ(FakeCublasLt::tried, before + 1);
}

TEST_F(ProductTrials, AKeptChoiceThatIsRefusedIsReplacedByAnother) {
  set_times({3.0, 2.0, 1.0});
  {
    Products first(memory_);
    multiply(first);
    EXPECT_EQ(FakeCublasLt::last_algorithm, 2);
  }
  FakeCublasLt::also_refused = 2;
  Products later(memory_);
  multiply(later);
  EXPECT_NE(FakeCublasLt::last_algorithm, 2);
  EXPECT_EQ(out_[17], 4.0F);
}

TEST_F(ProductTrials, ASingleAlgorithmIsNotTimed) {
  FakeCublasLt::found = 1;
  Products products(memory_);
  const int before = FakeCublasLt::tried;
  multiply(products);
  EXPECT_EQ(FakeCublasLt::tried, before + 1);
  EXPECT_TRUE(memory_->kept.empty());
}

TEST_F(ProductTrials, ChoicesAreForOneGpuVersionAndProduct) {
  const std::vector<float> values(1024);
  std::vector<float> out(1024);
  Products products(memory_);
  products.set_workspace(start_);
  const Matrix straight = matrix(values.data(), 16);
  const Matrix turned = transposed(values.data(), 16);
  const Matrix to = matrix(out.data(), 16);
  const Matrix narrow = matrix(values.data(), 8);
  Matrix half = straight;
  half.type = DType::bf16;
  Matrix half_to = to;
  half_to.type = DType::bf16;
  const Matrix narrow_to = matrix(out.data(), 8);
  products.multiply(nullptr, {8, 8, 8}, straight, straight, to);
  products.multiply(nullptr, {4, 8, 8}, straight, straight, to);
  products.multiply(nullptr, {8, 4, 8}, straight, straight, to);
  products.multiply(nullptr, {8, 8, 4}, straight, straight, to);
  products.multiply(nullptr, {8, 8, 8}, turned, straight, to);
  products.multiply(nullptr, {8, 8, 8}, straight, turned, to);
  products.multiply(nullptr, {8, 8, 8}, narrow, straight, to);
  products.multiply(nullptr, {8, 8, 8}, straight, narrow, to);
  products.multiply(nullptr, {8, 8, 8}, straight, straight, narrow_to);
  products.multiply(nullptr, {8, 8, 8}, half, half, to);
  products.multiply(nullptr, {8, 8, 8}, half, half, half_to);
  products.multiply(nullptr, {8, 8, 8}, straight, straight, to, {.addend = values.data()});
  products.multiply(nullptr, {8, 8, 8}, straight, straight, to, {.bias = values.data()});
  EXPECT_EQ(memory_->kept.size(), 13U);
  EXPECT_EQ(memory_->libraries,
            std::set<std::string>{"Fake GPU; cuBLASLt " + std::to_string(CUBLAS_VERSION)});
}

}  // namespace
}  // namespace ballast::model::cuda::product_trials_test
