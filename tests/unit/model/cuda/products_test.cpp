// Matrix products of the CUDA device: through cuBLASLt on a GPU, otherwise through its fake; and by
// the plain kernel.
#include "src/model/cuda/products/products.h"

#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/core/error.h"

#include "tests/support/device_array.h"
#include "tests/support/in_every_order.h"
#include "tests/support/tags.h"

namespace ballast::model::cuda::products_test {
namespace {

using test::DeviceArray;
using test::same_bits;

constexpr std::size_t padded(std::size_t size) {
  return (size + 7) / 8 * 8;
}

/// Whether rows (or columns) begin at multiples of 8 elements or follow each other without gaps.
enum class Rows { aligned, dense };

/// A matrix with its numbers, in memory of `type` whose gaps hold NaN.
class Numbers {
 public:
  Numbers(DType type, std::size_t rows, std::size_t columns, bool by_rows, std::uint32_t seed,
          std::size_t gap = 0, Rows spacing = Rows::aligned)
      : type_(type),
        rows_(rows),
        columns_(columns),
        row_step_(by_rows ? step_of(columns, spacing) + gap : 1),
        column_step_(by_rows ? 1 : step_of(rows, spacing) + gap) {
    std::vector<float> values(by_rows ? rows * row_step_ : columns * column_step_, NAN);
    std::mt19937 random(seed);
    for (std::size_t r = 0; r < rows; ++r) {
      for (std::size_t c = 0; c < columns; ++c) {
        values[at(r, c)] = static_cast<float>(static_cast<double>(random()) * 0x1p-31 - 1.0);
      }
    }
    set(values);
  }

  [[nodiscard]] double value(std::size_t r, std::size_t c) const { return values_[at(r, c)]; }
  [[nodiscard]] Matrix matrix() const {
    return {type_ == DType::f32 ? static_cast<const void*>(wide_->data()) : narrow_->data(), type_,
            row_step_, column_step_};
  }
  [[nodiscard]] std::size_t rows() const { return rows_; }
  [[nodiscard]] std::size_t columns() const { return columns_; }

  /// Reads the current content of the device's memory.
  void fetch() {
    if (type_ == DType::f32) {
      values_ = wide_->get();
    } else {
      const std::vector<Bf16> narrow = narrow_->get();
      for (std::size_t i = 0; i < narrow.size(); ++i) values_[i] = to_float(narrow[i]);
    }
  }
  [[nodiscard]] const std::vector<float>& all() const { return values_; }
  /// Whether the gaps between rows are unchanged.
  [[nodiscard]] bool has_its_gaps() const {
    for (std::size_t i = 0; i < values_.size(); ++i) {
      if (i % row_step_ >= columns_ && !std::isnan(values_[i])) return false;
    }
    return true;
  }

 private:
  static std::size_t step_of(std::size_t size, Rows spacing) {
    return spacing == Rows::aligned ? padded(size) : size;
  }
  [[nodiscard]] std::size_t at(std::size_t r, std::size_t c) const {
    return r * row_step_ + c * column_step_;
  }
  void set(const std::vector<float>& values) {
    values_ = values;
    if (type_ == DType::f32) {
      wide_ = std::make_unique<DeviceArray<float>>(values);
      return;
    }
    std::vector<Bf16> narrow(values.size());
    for (std::size_t i = 0; i < values.size(); ++i) {
      narrow[i] = to_bf16(values[i]);
      values_[i] = to_float(narrow[i]);
    }
    narrow_ = std::make_unique<DeviceArray<Bf16>>(narrow);
  }

  DType type_;
  std::size_t rows_;
  std::size_t columns_;
  std::size_t row_step_;
  std::size_t column_step_;
  std::vector<float> values_;
  std::unique_ptr<DeviceArray<float>> wide_;
  std::unique_ptr<DeviceArray<Bf16>> narrow_;
};

enum class Addend { none, itself, other };

struct Case {
  Extents extents;
  DType type = DType::f32;
  DType out = DType::f32;
  bool a_by_rows = true;
  bool b_by_rows = true;
  Addend addend = Addend::none;
  bool bias = false;
  std::size_t gap = 0;  ///< additional elements between the rows of d, beyond padding
  Rows spacing = Rows::aligned;
};

std::string name_of(const Case& test) {
  return testing::PrintToString(test.extents.m) + " x " + testing::PrintToString(test.extents.n) +
         " x " + testing::PrintToString(test.extents.k) + ", " + std::string(to_string(test.type)) +
         " to " + std::string(to_string(test.out)) + ", a by " +
         (test.a_by_rows ? "rows" : "columns") + ", b by " + (test.b_by_rows ? "rows" : "columns") +
         ", addend " + testing::PrintToString(static_cast<int>(test.addend)) + ", bias " +
         testing::PrintToString(test.bias);
}

class CudaProducts : public test::Kernels {
 protected:
  void SetUp() override {
    test::Kernels::SetUp();
    if (IsSkipped()) return;
    workspace_.emplace(Products::kWorkspace + 256);
    make_products(nullptr);
  }

  void make_products(std::shared_ptr<ProductChoices> choices) {
    const auto address = reinterpret_cast<std::uintptr_t>(workspace_->data());
    products_.emplace(std::move(choices));
    products_->set_workspace(workspace_->data() + (256 - address % 256) % 256);
    plain_.emplace(nullptr, KernelSet::plain);
  }

  struct Operands {
    Numbers a, b, d, other, bias;
    explicit Operands(const Case& test)
        : a(test.type, test.extents.m, test.extents.k, test.a_by_rows, 1, 0, test.spacing),
          b(test.type, test.extents.k, test.extents.n, test.b_by_rows, 2, 0, test.spacing),
          d(test.out, test.extents.m, test.extents.n, true, 3, test.gap, test.spacing),
          other(test.out, test.extents.m, test.extents.n, true, 4, test.gap, test.spacing),
          bias(test.type, 1, test.extents.n, true, 5) {}
    [[nodiscard]] Extras extras(const Case& test) const {
      Extras extras;
      if (test.addend == Addend::itself) extras.addend = d.matrix().data;
      if (test.addend == Addend::other) extras.addend = other.matrix().data;
      if (test.bias) extras.bias = bias.matrix().data;
      return extras;
    }
  };

  /// The result d of the product.
  static Numbers product(Products& products, const Case& test) {
    Operands in(test);
    products.multiply(nullptr, test.extents, in.a.matrix(), in.b.matrix(), in.d.matrix(),
                      in.extras(test));
    in.d.fetch();
    return std::move(in.d);
  }

  void expect_product(const Case& test) {
    expect_product(*products_, test);
    SCOPED_TRACE("plain");
    expect_product(*plain_, test);
  }
  static void expect_product(Products& products, const Case& test) {
    SCOPED_TRACE(name_of(test));
    const Operands in(test);
    const Numbers d = product(products, test);
    EXPECT_TRUE(d.has_its_gaps());
    const double rounding = test.out == DType::f32 ? 0.0 : 0x1p-8;
    for (std::size_t r = 0; r < test.extents.m; ++r) {
      for (std::size_t c = 0; c < test.extents.n; ++c) {
        double sum = 0.0;
        double sizes = 1.0;
        for (std::size_t k = 0; k < test.extents.k; ++k) {
          const double term = in.a.value(r, k) * in.b.value(k, c);
          sum += term;
          sizes += std::abs(term);
        }
        // On Hopper, a 16-bit product is rounded before an addend is added.
        const double rounded_before = test.addend == Addend::none ? 0.0 : std::abs(sum) * rounding;
        if (test.addend == Addend::itself) sum += in.d.value(r, c);
        if (test.addend == Addend::other) sum += in.other.value(r, c);
        if (test.bias) sum += in.bias.value(0, c);
        // TF32 would have an error of 2^-12 of each term.
        const double bound = std::abs(sum) * rounding + rounded_before + 1e-6 * sizes;
        ASSERT_NEAR(d.value(r, c), sum, bound) << r << ", " << c;
      }
    }
    EXPECT_TRUE(same_bits(product(products, test).all(), d.all())) << "equal calls, other bits";
  }

  std::optional<DeviceArray<std::byte>> workspace_;
  std::optional<Products> products_;
  std::optional<Products> plain_;
};

/// All types: fp32 results of fp32 and bf16 operands, and bf16 results of bf16 operands.
std::vector<Case> of_all_types(const Extents& extents) {
  return {{.extents = extents, .type = DType::f32, .out = DType::f32},
          {.extents = extents, .type = DType::bf16, .out = DType::bf16},
          {.extents = extents, .type = DType::bf16, .out = DType::f32}};
}

TEST_F(CudaProducts, AreRightForEveryLayoutOfBothOperands) {
  for (Case test : of_all_types({24, 40, 56})) {
    for (const bool a_by_rows : {true, false}) {
      for (const bool b_by_rows : {true, false}) {
        test.a_by_rows = a_by_rows;
        test.b_by_rows = b_by_rows;
        expect_product(test);
      }
    }
  }
}

TEST_F(CudaProducts, OddExtents) {
  for (const Extents& extents : {Extents{5, 131, 24}, Extents{131, 7, 24}, Extents{24, 32, 131},
                                 Extents{1, 1, 1}, Extents{33, 35, 37}}) {
    for (Case test : of_all_types(extents)) {
      for (const bool a_by_rows : {true, false}) {
        for (const bool b_by_rows : {true, false}) {
          test.a_by_rows = a_by_rows;
          test.b_by_rows = b_by_rows;
          expect_product(test);
        }
      }
    }
  }
}

/// Adapters of rank 4, and the gate of an expert of all rows: rows of 8 and 2 bytes without gaps.
TEST_F(CudaProducts, NarrowRowsWithoutGaps) {
  for (const Extents& extents : {Extents{48, 4, 64}, Extents{48, 64, 4}, Extents{4, 64, 48},
                                 Extents{48, 1, 64}, Extents{48, 64, 1}, Extents{1, 64, 48}}) {
    for (Case test : of_all_types(extents)) {
      test.spacing = Rows::dense;
      expect_product(test);
      test.b_by_rows = false;
      expect_product(test);
      test.a_by_rows = false;
      test.addend = Addend::itself;
      expect_product(test);
    }
  }
}

TEST_F(CudaProducts, LongSumsInSteps) {
  for (Case test : of_all_types({8, 16, 5003})) {
    expect_product(test);
    test.a_by_rows = false;
    test.addend = Addend::itself;
    expect_product(test);
  }
}

TEST_F(CudaProducts, AddendsAndRowsFarApart) {
  for (Case test : of_all_types({16, 43, 24})) {
    for (const Addend addend : {Addend::itself, Addend::other}) {
      test.addend = addend;
      for (const std::size_t gap : {0U, 24U}) {
        test.gap = gap;
        expect_product(test);
      }
    }
  }
}

TEST_F(CudaProducts, BiasesAreAddedToEachRow) {
  for (Case test : of_all_types({16, 43, 24})) {
    if (test.out != test.type) continue;
    test.bias = true;
    for (const Addend addend : {Addend::none, Addend::itself, Addend::other}) {
      test.addend = addend;
      expect_product(test);
    }
  }
}

/// Choices that keep nothing.
class AlwaysTimed final : public ProductChoices {
 public:
  std::size_t choose(const std::string&, const std::string&, std::span<const ProductAlgorithm> all,
                     const std::function<std::size_t()>& time) override {
    const std::size_t chosen = time();
    EXPECT_LT(chosen, all.size());
    ++calls;
    return chosen;
  }
  int calls = 0;
};

TEST_F(CudaProducts, TimedAlgorithmsAreCorrect) {
  const auto choices = std::make_shared<AlwaysTimed>();
  make_products(choices);
  for (Case test : of_all_types({120, 48, 264})) {
    for (const Addend addend : {Addend::none, Addend::itself, Addend::other}) {
      test.addend = addend;
      for (const std::size_t gap : {0U, 24U}) {
        test.gap = gap;
        expect_product(*products_, test);
      }
    }
  }
  EXPECT_GT(choices->calls, 0);
}

TAG_TESTS("small_shapes", "CudaProducts.PlainOnesHaveTheSameBitsInEveryOrderOfThreads");
TEST_F(CudaProducts, PlainOnesHaveTheSameBitsInEveryOrderOfThreads) {
  for (Case test : of_all_types({70, 75, 41})) {
    test.a_by_rows = false;
    test.addend = Addend::other;
    test.bias = test.out == test.type;
    test::in_every_order([&] { return product(*plain_, test).all(); });
  }
}

TEST_F(CudaProducts, NothingIsDoneWithoutRowsOrColumns) {
  const Numbers any(DType::f32, 8, 8, true, 1);
  EXPECT_NO_THROW(products_->multiply(nullptr, {0, 8, 8}, any.matrix(), any.matrix(), {}));
  EXPECT_NO_THROW(products_->multiply(nullptr, {8, 0, 8}, any.matrix(), any.matrix(), {}));
}

TEST_F(CudaProducts, UnsupportedProductsAreRefused) {
  const Numbers wide(DType::f32, 8, 8, true, 1);
  const Numbers narrow(DType::bf16, 8, 8, true, 1);
  const Numbers across(DType::f32, 8, 8, false, 1);
  const Extents extents = {8, 8, 8};
  const auto refused = [&](Products& products, const Extents& shape, const Numbers& a,
                           const Numbers& b, const Numbers& d, const Extras& extras = {}) {
    try {
      products.multiply(nullptr, shape, a.matrix(), b.matrix(), d.matrix(), extras);
      ADD_FAILURE() << "nothing was thrown";
    } catch (const Error& error) {
      EXPECT_EQ(error.category(), ErrorCategory::state) << error.what();
    }
  };
  refused(*products_, extents, wide, narrow, wide);
  refused(*products_, extents, wide, wide, narrow);
  refused(*products_, extents, wide, wide, across);
  refused(*products_, extents, narrow, narrow, wide, {.bias = narrow.matrix().data});
  refused(*products_, {8, 8, 0}, wide, wide, wide);
  refused(*plain_, extents, wide, narrow, wide);
  refused(*plain_, extents, wide, wide, across);
  Products without_workspace;
  refused(without_workspace, extents, wide, wide, wide);
}

}  // namespace
}  // namespace ballast::model::cuda::products_test
