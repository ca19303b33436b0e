#include "src/model/host/products.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <omp.h>

#include "ballast/core/dtype.h"

namespace ballast::model::host::products_test {
namespace {

/// Sets the number of threads of products during its lifetime.
class Threads {
 public:
  explicit Threads(int count) : before_(omp_get_max_threads()) { omp_set_num_threads(count); }
  ~Threads() { omp_set_num_threads(before_); }
  Threads(const Threads&) = delete;
  Threads& operator=(const Threads&) = delete;

 private:
  int before_;
};

template <class T>
std::vector<T> random_values(std::size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<float> values(-1.0F, 1.0F);
  std::vector<T> result(count);
  for (T& value : result) value = from_float<T>(values(random));
  return result;
}

/// A product whose matrices have rows with `gap` unused elements.
struct Case {
  Extents extents;
  bool transposes_a = false;
  bool transposes_b = false;
  bool adds = false;
  bool has_bias = false;
  std::size_t gap = 0;
};

/// T: type of the operands; C: type of the result.
template <class T, class C>
struct Operands {
  explicit Operands(const Case& one)
      : a_row((one.transposes_a ? one.extents.m : one.extents.k) + one.gap),
        b_row((one.transposes_b ? one.extents.k : one.extents.n) + one.gap),
        c_row(one.extents.n + one.gap),
        a(random_values<T>((one.transposes_a ? one.extents.k : one.extents.m) * a_row, 1)),
        b(random_values<T>((one.transposes_b ? one.extents.n : one.extents.k) * b_row, 2)),
        c(random_values<C>(one.extents.m * c_row, 3)),
        bias(random_values<T>(one.extents.n, 4)) {}

  std::size_t a_row, b_row, c_row;  ///< elements per row
  std::vector<T> a, b;
  std::vector<C> c;  ///< values before the product
  std::vector<T> bias;
};

template <class T, class C>
std::vector<float> multiply(const Case& one, const Operands<T, C>& in, int threads) {
  const Threads guard(threads);
  Products products;
  std::vector<C> c = in.c;
  products.multiply(
      one.extents,
      one.transposes_a ? transposed(in.a.data(), in.a_row) : matrix(in.a.data(), in.a_row),
      one.transposes_b ? transposed(in.b.data(), in.b_row) : matrix(in.b.data(), in.b_row),
      matrix(c.data(), in.c_row), one.adds, one.has_bias ? in.bias.data() : nullptr);
  std::vector<float> values(c.size());
  std::transform(c.begin(), c.end(), values.begin(), [](C value) { return to_float(value); });
  return values;
}

/// Compares some elements with sums in double, and all unused elements with their values before.
template <class T, class C>
void expect_right(const Case& one, const Operands<T, C>& in, const std::vector<float>& c) {
  const auto& [m, n, k] = one.extents;
  for (std::size_t at = 0; at < c.size(); at += at % 97 + 1) {
    const std::size_t row = at / in.c_row;
    const std::size_t column = at % in.c_row;
    double expected = static_cast<double>(to_float(in.c[at]));
    if (column < n) {
      expected = one.adds ? expected : 0.0;
      if (one.has_bias) expected += static_cast<double>(to_float(in.bias[column]));
      for (std::size_t i = 0; i < k; ++i) {
        const T& a = in.a[one.transposes_a ? i * in.a_row + row : row * in.a_row + i];
        const T& b = in.b[one.transposes_b ? column * in.b_row + i : i * in.b_row + column];
        expected += static_cast<double>(to_float(a)) * static_cast<double>(to_float(b));
      }
    }
    const double rounding = std::is_same_v<C, float> ? 0.0 : std::abs(expected) / 128.0;
    ASSERT_NEAR(c[at], expected, rounding + 1e-4 * std::sqrt(static_cast<double>(k)))
        << "row " << row << ", column " << column;
  }
}

template <class T, class C>
void expect_same_bits_on_all_threads(const std::vector<Case>& cases) {
  for (const Case& one : cases) {
    const auto& [m, n, k] = one.extents;
    SCOPED_TRACE(fmt::format("{} x {} x {}{}{}{}{}, gap {}", m, n, k,
                             one.transposes_a ? ", A^T" : "", one.transposes_b ? ", B^T" : "",
                             one.adds ? ", adds" : "", one.has_bias ? ", bias" : "", one.gap));
    const Operands<T, C> in(one);
    const std::vector<float> expected = multiply(one, in, 1);
    ASSERT_NO_FATAL_FAILURE(expect_right(one, in, expected));
    for (const int threads : {2, 3, 13}) {
      ASSERT_EQ(multiply(one, in, threads), expected) << threads << " threads";
    }
  }
}

/// Weight gradients with and without gaps between rows, of which each thread has a tile in bf16.
/// Then other products.
std::vector<Case> cases() {
  std::vector<Case> all;
  for (const bool adds : {false, true}) {
    for (const Extents& e : {Extents{129, 65, 70}, Extents{192, 256, 1023}, Extents{128, 80, 2049},
                             Extents{401, 135, 1536}, Extents{135, 401, 769}}) {
      all.push_back({e, true, false, adds, false, 0});
      all.push_back({e, true, false, adds, false, 15});
      all.push_back({e, false, false, adds, false, 3});
      all.push_back({e, false, true, adds, false, 16});
    }
  }
  all.push_back({{130, 33, 4099}, false, false, false, true, 15});
  all.push_back({{33, 513, 100}, false, true, false, true, 15});
  all.push_back({{1, 515, 64}, false, true, false, true, 13});
  for (const bool transposes_b : {false, true}) {
    for (const bool adds : {false, true}) {
      all.push_back({{531, 65, 70}, false, transposes_b, adds, false, 0});
      all.push_back({{801, 96, 2304}, false, transposes_b, adds, !adds, 0});
    }
  }
  return all;
}

/// Returns a * b in fp32. Rows have `gap` unused elements, and the first is `offset` elements after
/// the start of a cache line.
std::vector<float> product_at(const Extents& e, const Matrix& a, const Matrix& b, std::size_t gap,
                              std::size_t offset) {
  constexpr std::size_t kLine = 16;
  const std::size_t row = e.n + gap;
  std::vector<float> memory(e.m * row + 2 * kLine);
  const auto start = reinterpret_cast<std::uintptr_t>(memory.data()) / sizeof(float);
  float* const c = memory.data() + (kLine - start % kLine) + offset;
  Products().multiply(e, a, b, matrix(c, row));
  std::vector<float> values;
  for (std::size_t i = 0; i < e.m; ++i) values.insert(values.end(), c + i * row, c + i * row + e.n);
  return values;
}

bool depends_on_threads() {
  return describe_arithmetic(2).find("threads") != std::string::npos;
}

TEST(Products, HaveTheSameBitsOnEveryNumberOfThreadsInBf16) {
  if (depends_on_threads()) GTEST_SKIP() << "not on this CPU";
  expect_same_bits_on_all_threads<Bf16, float>(cases());
  expect_same_bits_on_all_threads<Bf16, Bf16>(cases());
}
TEST(Products, HaveTheSameBitsOnEveryNumberOfThreadsInFp32) {
  if (depends_on_threads()) GTEST_SKIP() << "not on this CPU";
  expect_same_bits_on_all_threads<float, float>(cases());
}

// Sums then depend neither on the cut into threads nor on that into layer tiles.
TEST(Products, OfPartsEqualPartsOfTheWholeInBf16) {
  if (!has_own_bf16_products()) GTEST_SKIP() << "not on this CPU";
  const Extents whole = {1100, 1150, 1537};
  const std::vector<Bf16> a = random_values<Bf16>(whole.m * whole.k, 1);
  const std::vector<Bf16> b = random_values<Bf16>(whole.k * whole.n, 2);
  const Matrix rows = matrix(a.data(), whole.k);
  for (const Matrix& columns : {matrix(b.data(), whole.n), transposed(b.data(), whole.k)}) {
    const std::vector<float> expected = product_at(whole, rows, columns, 0, 0);
    for (const std::size_t first : {1U, 517U, 1033U}) {
      const Extents some = {whole.m - first, whole.n - first, whole.k};
      const std::vector<float> got =
          product_at(some, part_of(rows, first, 0), part_of(columns, 0, first), 3, 0);
      for (std::size_t i = 0; i < some.m; ++i) {
        const auto* const from = expected.data() + (first + i) * whole.n + first;
        ASSERT_TRUE(std::equal(from, from + some.n, got.data() + i * some.n)) << "row " << i;
      }
    }
  }
}
TEST(Products, HaveTheSameBitsWhenWrittenPastTheCaches) {
  const Extents e = {1030, 8208, 70};  // 32 MiB
  const std::vector<Bf16> a = random_values<Bf16>(e.m * e.k, 1);
  const std::vector<Bf16> b = random_values<Bf16>(e.k * e.n, 2);
  const Matrix rows = matrix(a.data(), e.k);
  const Matrix columns = matrix(b.data(), e.n);
  EXPECT_EQ(product_at(e, rows, columns, 0, 0), product_at(e, rows, columns, 0, 1));
}

}  // namespace
}  // namespace ballast::model::host::products_test
