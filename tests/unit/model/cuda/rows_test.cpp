// Elementwise kernels and sums of columns on a GPU, compared with those of the host in
// double, which have their own test.
#define BALLAST_KERNEL_ISA in_double

#include "src/model/cuda/rows/rows.h"

#include <cmath>
#include <limits>
#include <tuple>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "src/model/host/elementwise_kernels.h"
#include "tests/support/device_array.h"
#include "tests/support/in_every_order.h"
#include "tests/support/tags.h"
#include "tests/unit/model/cuda/host_ops.h"
#include "tests/unit/model/cuda/values.h"

namespace ballast::model::cuda::rows_test {
namespace {

namespace in_double = host::in_double;
using test::DeviceArray;
using test::exact;
using test::expect_close;
using test::host_ops;
using test::in_every_order;
using test::must;
using test::normals_of;
using test::rounded;

class CudaRows : public test::Kernels {};

/// Sizes below, at and above a block of threads.
constexpr std::size_t kSizes[] = {8, 2040, 2048, 2056, 5000};
/// Includes numbers for which exp overflows or underflows.
constexpr double kDeviation = 20.0;

template <class T>
void check_activation(Activation f, std::size_t size) {
  const std::vector<T> x = normals_of<T>(size, 1, kDeviation);
  const std::vector<T> dy = normals_of<T>(size + 8, 2);
  const DeviceArray<T> x_there(x);
  const auto found = in_every_order([&] {
    const DeviceArray<T> y(dy);
    const DeviceArray<T> d(dy);
    must(activate<T>(nullptr, f, x_there.data(), y.data(), size));
    must(activate_backward<T>(nullptr, f, x_there.data(), d.data(), size));
    return std::tuple{y.get(), d.get()};
  });
  std::vector<double> y = exact(dy);
  std::vector<double> d = exact(dy);
  std::vector<double> columns(size);
  formulas::with_activation(f, [&](auto is) {
    in_double::activate<is(), double>(exact(x).data(), y.data(), size);
    in_double::activate_backward<is(), double>(exact(x).data(), d.data(), columns.data(), 1, size);
  });
  expect_close(std::get<0>(found), y, 1e-6);
  expect_close(std::get<1>(found), d, 1e-5);
}
TAG_TESTS("small_shapes", "CudaRows.*");
std::vector<Activation> all_activations() {
  std::vector<Activation> all;
  for (int f = 0; f <= static_cast<int>(Activation::last); ++f) {
    all.push_back(static_cast<Activation>(f));
  }
  return all;
}
TEST_F(CudaRows, ActivationsAreTheHosts) {
  for (const std::size_t size : kSizes) {
    for (const Activation f : all_activations()) {
      check_activation<float>(f, size);
      check_activation<Bf16>(f, size);
      check_activation<F16>(f, size);
    }
  }
}

template <class T>
void check_regrouping(Regrouping how) {
  const std::size_t size = how.rows() * how.width();
  const std::vector<T> x = normals_of<T>(size, 1);
  for (const auto& [from, to] : {std::pair{RowOrder::local, RowOrder::by_slice},
                                 {RowOrder::by_slice, RowOrder::local},
                                 {RowOrder::by_slice, RowOrder::by_heads},
                                 {RowOrder::by_heads, RowOrder::by_slice}}) {
    how.from = from;
    how.to = to;
    const DeviceArray<T> x_there(x);
    const auto found = in_every_order([&] {
      const DeviceArray<T> y(size);
      must(regroup<T>(nullptr, how, x_there.data(), y.data()));
      return y.get();
    });
    std::vector<T> expected(size);
    host_ops<T>().heads->regroup(how, x.data(), expected.data());
    EXPECT_EQ(exact(found), exact(expected));
  }
}
TEST_F(CudaRows, OrdersOfHeadsAreTheHosts) {
  for (const Regrouping& how :
       {Regrouping{.slices = 2, .sequences = 3, .length = 5, .first = 16, .others = 8},
        Regrouping{.slices = 3, .sequences = 1, .length = 2, .first = 1040, .others = 0}}) {
    check_regrouping<float>(how);
    check_regrouping<Bf16>(how);
    check_regrouping<F16>(how);
  }
}

template <class T>
void check_gate(const Gating& how, Rows rows, bool joined) {
  const std::size_t size = rows.count * rows.width;
  const std::size_t up = joined ? rows.width : size;
  const std::size_t step = joined ? 2 * rows.width : rows.width;
  const std::vector<T> gate_up = normals_of<T>(2 * size + 8, 1, kDeviation);
  const std::vector<T> dy = normals_of<T>(size + 8, 3);
  const DeviceArray<T> dy_there(dy);
  const auto found = in_every_order([&] {
    const DeviceArray<T> there(gate_up);
    const DeviceArray<T> y(dy);
    T* const first = there.data();
    must(glu<T>(nullptr, how, first, first + up, step, y.data(), rows));
    must(glu_backward<T>(nullptr, how, first, first + up, step, dy_there.data(), rows));
    return std::tuple{y.get(), there.get()};
  });
  std::vector<double> gradients = exact(gate_up);
  std::vector<double> y = exact(dy);
  const std::vector<double> exact_dy = exact(dy);
  for (std::size_t row = 0; row < rows.count; ++row) {
    double* const first = gradients.data() + row * step;
    const std::size_t at = row * rows.width;
    if (how.limit > 0.0F) {
      in_double::limited_swiglu<double>(first, first + up, y.data() + at, rows.width, how.limit,
                                        how.slope);
      in_double::limited_swiglu_backward<double>(first, first + up, exact_dy.data() + at,
                                                 rows.width, how.limit, how.slope);
      continue;
    }
    formulas::with_activation(how.activation, [&](auto is) {
      in_double::glu<is(), double>(first, first + up, y.data() + at, rows.width);
      in_double::glu_backward<is(), double>(first, first + up, exact_dy.data() + at, rows.width);
    });
  }
  // Far below zero, the exact GELU is a difference of numbers near 1.
  const double tail = how.activation == Activation::gelu ? 1e-4 : 0.0;
  expect_close(std::get<0>(found), y, 3e-6 + tail);
  expect_close(std::get<1>(found), gradients, 1e-5 + tail);
}
TEST_F(CudaRows, GatesAreTheHosts) {
  for (const Rows rows : {Rows{1, 8}, Rows{3, 2056}, Rows{5, 24}, Rows{2, 2048}, Rows{300, 8}}) {
    for (const bool joined : {false, true}) {
      std::vector<Gating> gates = {Gating{Activation::silu, 7.0F, 1.75F}};
      for (const Activation f : all_activations()) gates.push_back({f});
      for (const Gating& how : gates) {
        check_gate<float>(how, rows, joined);
        check_gate<Bf16>(how, rows, joined);
      }
    }
  }
}

TEST_F(CudaRows, GatesHaveAGradientAtTheirLimitsAndNoneBeyond) {
  constexpr float kLimit = 0.5F;
  const float above = std::nextafter(kLimit, 1.0F);
  const DeviceArray<float> of_gate(
      std::vector<float>{kLimit, above, -above, 0.25F, 0.25F, 0.25F, 0.25F, 0.25F});
  const DeviceArray<float> of_up(
      std::vector<float>{0.0F, 0.0F, 0.0F, 0.0F, kLimit, above, -kLimit, -above});
  const DeviceArray<float> dy(8, 1.0F);
  must(glu_backward<float>(nullptr, {Activation::silu, kLimit, 1.0F}, of_gate.data(), of_up.data(),
                           8, dy.data(), {1, 8}));
  for (std::size_t i = 0; i < 8; ++i) {
    EXPECT_EQ(of_gate.get()[i] == 0.0F, i == 1) << i;
    EXPECT_EQ(of_up.get()[i] == 0.0F, i == 5 || i == 7) << i;
  }
}

template <class T>
void check_extremes(Activation f) {
  const double infinity = std::numeric_limits<double>::infinity();
  const std::vector<double> x = {infinity, 1e30, 300.0, -300.0,
                                 -1e30,    0.0,  -0.0,  std::numeric_limits<double>::quiet_NaN()};
  std::vector<T> values;
  for (const double value : x) values.push_back(rounded<T>(value));
  const DeviceArray<T> there(values);
  const DeviceArray<T> y(values);
  must(activate<T>(nullptr, f, there.data(), y.data(), 8));
  const std::vector<double> found = exact(y.get());
  EXPECT_EQ(found[0], infinity);
  EXPECT_NEAR(found[1], 1e30, 1e28);
  EXPECT_NEAR(found[2], 300.0, 1.0);
  for (const std::size_t i : {3, 4, 5, 6}) EXPECT_EQ(found[i], 0.0) << i;
  EXPECT_TRUE(std::isnan(found[7]));
}
TEST_F(CudaRows, GeluOfExtremes) {
  for (const Activation f : {Activation::gelu, Activation::gelu_tanh}) {
    check_extremes<float>(f);
    check_extremes<Bf16>(f);
  }
}

template <class T>
void check_dropout(std::size_t size) {
  const std::vector<T> x = normals_of<T>(size, 1);
  const std::vector<T> y = normals_of<T>(size, 2);
  const DropoutMask mask = DropoutMask::of(0.3, 5, 6, 16);
  const DeviceArray<T> x_there(x);
  for (const bool adds : {false, true}) {
    const auto found = in_every_order([&] {
      const DeviceArray<T> out(y);
      must(drop(nullptr, mask, x_there.data(), out.data(), size, adds));
      must(scale(nullptr, out.data(), 0.75F, size - 3));
      return out.get();
    });
    std::vector<T> expected = y;
    const DeviceOps<T> host = host_ops<T>();
    host.elementwise->drop(mask, x.data(), expected.data(), size, adds);
    host.elementwise->scale(expected.data(), 0.75F, size - 3);
    expect_close(found, exact(expected), 1e-6);
  }
}
TEST_F(CudaRows, DropoutAndScaleEqualTheHosts) {
  for (const std::size_t size : kSizes) {
    check_dropout<float>(size);
    check_dropout<Bf16>(size);
  }
}

template <class T>
void check_widening(std::size_t size) {
  const std::vector<T> x = normals_of<T>(size, 1);
  const DeviceArray<T> there(x);
  const DeviceArray<float> y(std::vector<float>(size + 8, 3.0F));
  must(widen<T>(nullptr, there.data(), y.data(), size));
  std::vector<double> expected = exact(x);
  expected.resize(size + 8, 3.0);
  const std::vector<float> found = y.get();
  EXPECT_EQ(std::vector<double>(found.begin(), found.end()), expected);
}
TEST_F(CudaRows, WideningIsExact) {
  for (const std::size_t size : kSizes) {
    check_widening<float>(size);
    check_widening<Bf16>(size);
  }
}

TEST_F(CudaRows, AccumulatingAddsOnce) {
  for (const std::size_t size : kSizes) {
    const std::vector<float> part = normals_of<float>(size, 1);
    std::vector<float> expected = normals_of<float>(size + 8, 2);
    const DeviceArray<float> x(part);
    const DeviceArray<float> y(expected);
    must(accumulate(nullptr, x.data(), y.data(), size));
    for (std::size_t i = 0; i < size; ++i) expected[i] += part[i];
    EXPECT_EQ(y.get(), expected);
  }
}

/// Numbers of rows on both sides of one group, of all threads of a column, and of the largest
/// number of groups; numbers of columns on both sides of a block.
constexpr Rows kColumnShapes[] = {{1, 8},   {7, 248},  {9, 256},  {64, 264},
                                  {65, 16}, {130, 24}, {16640, 8}};

template <class T>
void check_columns(Rows rows, std::size_t stride) {
  SCOPED_TRACE(testing::Message() << rows.count << " rows of " << rows.width);
  const std::vector<T> x = normals_of<T>(rows.count * stride, 1, 1.0, 0.3);
  std::vector<double> expected(rows.width, 50.0);
  for (std::size_t i = 0; i < x.size(); ++i) {
    if (i % stride < rows.width) expected[i % stride] += exact(x[i]);
  }
  const DeviceArray<T> there(x);
  const DeviceArray<float> partials(partial_floats(rows), -1.0F);
  const std::vector<float> found = in_every_order([&] {
    const DeviceArray<float> gradient(rows.width, 50.0F);
    must(add_column_sums<T>(nullptr, there.data(), stride, gradient.data(), partials.data(), rows));
    return gradient.get();
  });
  expect_close(found, expected, 1e-4);
}
TEST_F(CudaRows, ColumnsAreAddedUp) {
  for (const Rows& rows : kColumnShapes) {
    check_columns<float>(rows, rows.width);
    check_columns<Bf16>(rows, rows.width + 16);
  }
}

TEST_F(CudaRows, ANanAffectsOnlyItsColumn) {
  std::vector<float> x(70 * 16, 1.0F);
  x[69 * 16 + 5] = std::numeric_limits<float>::infinity();
  const DeviceArray<float> there(x);
  const DeviceArray<float> partials(partial_floats({70, 16}));
  const DeviceArray<float> gradient(16, 1.0F);
  must(add_column_sums<float>(nullptr, there.data(), 16, gradient.data(), partials.data(),
                              {70, 16}));
  const std::vector<float> found = gradient.get();
  for (std::size_t i = 0; i < 16; ++i) EXPECT_EQ(found[i], i == 5 ? x[69 * 16 + 5] : 71.0F);
}

template <class T>
void check_gains(bool flipped, std::size_t in, std::size_t out) {
  constexpr std::size_t kRank = 3;
  const std::vector<T> w = normals_of<T>(in * out, 1);
  const std::vector<T> b = normals_of<T>(out * kRank, 2);
  const std::vector<T> m = normals_of<T>(out, 3);
  const std::vector<float> cross = normals_of<float>(out * kRank, 4);
  const std::vector<float> gram = {2.0F, 0.1F, 0.2F, 0.1F, 1.0F, 0.3F, 0.2F, 0.3F, 1.5F};
  const auto rows = [&](const T* at_w, const T* at_b, const T* at_m, const float* at_cross,
                        const float* at_gram) {
    Linear<T> map = {.weight = at_w, .in = in, .out = out, .flipped = flipped};
    return AdaptedRows<T>{map, at_b, at_m, at_cross, at_gram, kRank, 0.5F};
  };
  std::vector<float> expected(2 * out);
  host_ops<T>().adapters->compute_dora_scales(
      rows(w.data(), b.data(), m.data(), cross.data(), gram.data()), expected.data(),
      expected.data() + out);
  const DeviceArray<T> w_there(w);
  const DeviceArray<T> b_there(b);
  const DeviceArray<T> m_there(m);
  const DeviceArray<float> cross_there(cross);
  const DeviceArray<float> gram_there(gram);
  const std::vector<float> found = in_every_order([&] {
    const DeviceArray<float> scales(2 * out);
    must(compute_dora_scales(
        nullptr,
        rows(w_there.data(), b_there.data(), m_there.data(), cross_there.data(), gram_there.data()),
        scales.data(), scales.data() + out));
    return scales.get();
  });
  expect_close(found, exact(expected), 1e-5);
}
TEST_F(CudaRows, GainsAreTheHosts) {
  check_gains<float>(true, 264, 24);
  check_gains<Bf16>(true, 40, 8);
  check_gains<float>(false, 24, 264);
  check_gains<Bf16>(false, 40, 8);
}

/// Columns [8, 24) of rows of 32.
template <class T>
void check_scaled_columns(bool scales, bool bias, bool residual) {
  constexpr std::size_t kRows = 5;
  const std::vector<T> x = normals_of<T>(kRows * 32, 1);
  const std::vector<T> others = normals_of<T>(kRows * 32, 2);
  const std::vector<float> factors = normals_of<float>(16, 3);
  const auto columns = [&](const T* from, const T* other, const float* factor, T* to) {
    return ScaledColumns<T>{
        scales ? factor : nullptr,     from + 8, 32, to + 8, 32, kRows, 16, bias ? other : nullptr,
        residual ? other + 8 : nullptr};
  };
  std::vector<T> expected = x;
  host_ops<T>().adapters->scale_columns(
      columns(x.data(), others.data(), factors.data(), expected.data()));
  const DeviceArray<T> others_there(others);
  const DeviceArray<float> factors_there(factors);
  const std::vector<T> found = in_every_order([&] {
    const DeviceArray<T> there(x);
    must(scale_columns(
        nullptr, columns(there.data(), others_there.data(), factors_there.data(), there.data())));
    return there.get();
  });
  EXPECT_EQ(exact(found), exact(expected));
  EXPECT_EQ(scales || bias || residual, exact(expected) != exact(x));
}
TEST_F(CudaRows, ScaledColumnsAreTheHosts) {
  check_scaled_columns<float>(true, true, true);
  check_scaled_columns<Bf16>(true, true, true);
  check_scaled_columns<Bf16>(true, false, false);
  check_scaled_columns<Bf16>(false, false, true);
}

template <class T>
void check_column_products(Rows rows) {
  const std::size_t step = rows.width + 8;
  const std::vector<T> x = normals_of<T>(rows.count * step, 1);
  const std::vector<T> y = normals_of<T>(rows.count * rows.width, 2);
  const std::vector<float> factors = normals_of<float>(rows.width, 3);
  std::vector<float> expected(rows.width, 2.0F);
  host_ops<T>().adapters->add_column_products(
      {x.data(), step, y.data(), rows.width, factors.data(), rows.count, rows.width},
      expected.data());
  const DeviceArray<T> x_there(x);
  const DeviceArray<T> y_there(y);
  const DeviceArray<float> factors_there(factors);
  const DeviceArray<float> partials(partial_floats(rows), -1.0F);
  const std::vector<float> found = in_every_order([&] {
    const DeviceArray<float> gradient(rows.width, 2.0F);
    must(add_column_products<T>(nullptr,
                                {x_there.data(), step, y_there.data(), rows.width,
                                 factors_there.data(), rows.count, rows.width},
                                gradient.data(), partials.data()));
    return gradient.get();
  });
  expect_close(found, exact(expected), 1e-4);
}
TEST_F(CudaRows, ProductsOfColumnsAreTheHosts) {
  check_column_products<float>({70, 264});
  check_column_products<Bf16>({9, 16});
}

TEST_F(CudaRows, EmptyInputsAreAccepted) {
  const auto f = Activation::gelu_tanh;
  EXPECT_EQ(activate<float>(nullptr, f, nullptr, nullptr, 0), cudaSuccess);
  EXPECT_EQ(activate_backward<float>(nullptr, f, nullptr, nullptr, 0), cudaSuccess);
  EXPECT_EQ(glu<float>(nullptr, {f}, nullptr, nullptr, 8, nullptr, {0, 8}), cudaSuccess);
  EXPECT_EQ(glu_backward<float>(nullptr, {f}, nullptr, nullptr, 8, nullptr, {0, 8}), cudaSuccess);
  EXPECT_EQ(add_column_sums<float>(nullptr, nullptr, 8, nullptr, nullptr, {0, 8}), cudaSuccess);
  EXPECT_EQ(widen<float>(nullptr, nullptr, nullptr, 0), cudaSuccess);
  EXPECT_EQ(accumulate(nullptr, nullptr, nullptr, 0), cudaSuccess);
}

}  // namespace
}  // namespace ballast::model::cuda::rows_test
