// The norms on a GPU, compared with those of the host in double, which have their own test.
#define BALLAST_KERNEL_ISA in_double

#include <limits>
#include <string>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>

#include "src/model/cuda/rows/rows.h"
#include "src/model/host/reduction_kernels.h"
#include "tests/support/device_array.h"
#include "tests/support/in_every_order.h"
#include "tests/support/tags.h"
#include "tests/unit/model/cuda/values.h"

namespace ballast::model::cuda::norm_test {
namespace {

namespace in_double = host::in_double;
using test::DeviceArray;
using test::exact;
using test::expect_close;
using test::in_every_order;
using test::must;
using test::normals_of;
using test::rounded;

constexpr float kEpsilon = 1e-5F;
/// Values after all outputs, which must not change.
constexpr std::size_t kBehind = 8;

struct Case {
  Rows rows;
  bool centred;
  float offset = 0.0F;  ///< offset of the weight
  bool biased = true;   ///< whether a LayerNorm has a bias
};
void trace(const Case& c, std::string& text) {
  text = std::to_string(c.rows.count) + " rows of " + std::to_string(c.rows.width) +
         (c.centred ? ", LayerNorm" : ", RMSNorm") + (c.offset == 0.0F ? "" : " with an offset");
}

/// Widths on both sides of the limits between kernels: a warp per row, a block that holds a row
/// with one, two or four groups of eight per thread, and rows that no block holds. Numbers of rows
/// that do not fill a block of warps.
std::vector<Rows> shapes() {
  return {{1, 8},    {9, 8},    {17, 264}, {8, 768},  {3, 1024},  {5, 1032},
          {2, 4096}, {2, 4104}, {2, 8192}, {2, 8200}, {2, 16384}, {2, 16392}};
}

template <class T>
struct Inputs {
  explicit Inputs(const Case& c, double deviation = 1.5, double mean = 0.7)
      : x(normals_of<T>(c.rows.count * c.rows.width, 1, deviation, mean)),
        weight(normals_of<T>(c.rows.width, 2, 0.5, 1.0)),
        bias(normals_of<T>(c.rows.width, 3)),
        dy(normals_of<T>(x.size(), 4)),
        residual(normals_of<T>(x.size(), 5)) {}
  std::vector<T> x;
  std::vector<T> weight;
  std::vector<T> bias;
  std::vector<T> dy;
  std::vector<T> residual;
};

template <class T>
std::vector<T> with_more_behind(std::vector<T> values) {
  values.insert(values.end(), kBehind, rounded<T>(7.0));
  return values;
}
template <class T>
std::vector<T> without_those_behind(std::vector<T> values) {
  for (std::size_t i = 0; i < kBehind; ++i) {
    EXPECT_EQ(values.back(), rounded<T>(7.0));
    values.pop_back();
  }
  return values;
}

template <class T>
std::vector<T> normed(const Inputs<T>& in, const Case& c, bool onto_residual = false) {
  const DeviceArray<T> x(in.x);
  const DeviceArray<T> weight(in.weight);
  const DeviceArray<T> bias(in.bias);
  const DeviceArray<T> residual(in.residual);
  const T* const addend = onto_residual ? residual.data() : nullptr;
  const std::vector<T> empty(in.x.size(), rounded<T>(-1.0));
  return in_every_order([&] {
    const DeviceArray<T> y(with_more_behind(empty));
    must(norm<T>(nullptr, x.data(), weight.data(), c.centred && c.biased ? bias.data() : nullptr,
                 kEpsilon, addend, y.data(), c.rows, {}, c.offset, c.centred));
    return without_those_behind(y.get());
  });
}

template <class T>
std::vector<double> expected_norm(const Inputs<T>& in, const Case& c, bool onto_residual = false) {
  std::vector<double> y(in.x.size());
  const std::vector<double> bias = exact(in.bias);
  const std::vector<double> residual = exact(in.residual);
  in_double::norm(exact(in.x).data(), exact(in.weight).data(),
                  c.centred && c.biased ? bias.data() : nullptr, static_cast<double>(c.offset),
                  static_cast<double>(kEpsilon), onto_residual ? residual.data() : nullptr,
                  y.data(), c.rows.count, c.rows.width, c.centred);
  return y;
}

class CudaNorm : public test::Kernels {};

template <class T>
void check_norms() {
  for (const Rows& rows : shapes()) {
    for (const bool centred : {false, true}) {
      const Case c = {rows, centred};
      std::string text;
      trace(c, text);
      SCOPED_TRACE(text);
      const Inputs<T> in(c);
      expect_close(normed(in, c), expected_norm(in, c), 5e-6);
      expect_close(normed(in, c, true), expected_norm(in, c, true), 5e-6);
    }
  }
}
TAG_TESTS("small_shapes", "CudaNorm.IsTheHostsInFp32");
TEST_F(CudaNorm, IsTheHostsInFp32) {
  check_norms<float>();
}
TAG_TESTS("small_shapes", "CudaNorm.IsTheHostsInBf16");
TEST_F(CudaNorm, IsTheHostsInBf16) {
  check_norms<Bf16>();
}

TEST_F(CudaNorm, SurvivesALargeMean) {
  for (const std::size_t width : {264U, 1032U}) {
    const Case c = {{2, width}, true};
    const Inputs<float> in(c, 1.0, 1000.0);
    // The mean itself has an error of about 1000 * 2^-24.
    expect_close(normed(in, c), expected_norm(in, c), 5e-4);
  }
}

TEST_F(CudaNorm, OfZerosIsTheBias) {
  for (const std::size_t width : {264U, 1032U}) {
    const Case c = {{2, width}, true};
    Inputs<Bf16> in(c);
    in.x.assign(in.x.size(), Bf16{});
    const std::vector<Bf16> y = normed(in, c);
    for (std::size_t i = 0; i < y.size(); ++i) ASSERT_EQ(y[i], in.bias[i % width]);
    for (const Bf16 value : normed(in, {c.rows, false})) ASSERT_EQ(exact(value), 0.0);
  }
}

TEST_F(CudaNorm, OfANanIsNanInItsRowAlone) {
  for (const std::size_t width : {264U, 1032U}) {
    const Case c = {{3, width}, false};
    Inputs<float> in(c);
    in.x[2 * width - 1] = std::numeric_limits<float>::quiet_NaN();
    const std::vector<float> y = normed(in, c);
    for (std::size_t i = 0; i < y.size(); ++i) ASSERT_EQ(std::isnan(y[i]), i / width == 1) << i;
  }
}

/// The arguments `residual` and `dx` of norm_backward.
enum class Place { apart, without_residual, in_residual, in_dy, in_both };

/// Number of threads: runs with many rows take seconds if they are emulated.
enum class Orders { all, one };

template <class T>
using Gradients = std::tuple<std::vector<T>, std::vector<float>, std::vector<float>>;

/// dx, and the gradients of the weights added to `before`.
template <class T>
Gradients<T> gradients(const Inputs<T>& in, const Case& c, Place place,
                       const std::vector<float>& before, Orders orders) {
  const DeviceArray<T> x(in.x);
  const DeviceArray<T> weight(in.weight);
  const DeviceArray<float> partials(partial_floats(c.rows), -1.0F);
  const auto run = [&] {
    const DeviceArray<T> dy(with_more_behind(in.dy));
    const DeviceArray<T> residual(with_more_behind(place == Place::in_both ? in.dy : in.residual));
    const DeviceArray<T> apart(with_more_behind(in.x));
    const DeviceArray<float> weight_gradient(with_more_behind(before));
    const DeviceArray<float> bias_gradient(with_more_behind(before));
    const DeviceArray<T>& dx = place == Place::in_residual                        ? residual
                               : place == Place::in_dy || place == Place::in_both ? dy
                                                                                  : apart;
    const T* const addend = place == Place::without_residual ? nullptr
                            : place == Place::in_both        ? dy.data()
                                                             : residual.data();
    must(norm_backward<T>(nullptr, x.data(), weight.data(), dy.data(), kEpsilon, addend, dx.data(),
                          weight_gradient.data(),
                          c.centred && c.biased ? bias_gradient.data() : nullptr, partials.data(),
                          c.rows, {}, c.offset, c.centred));
    return Gradients<T>{without_those_behind(dx.get()), without_those_behind(weight_gradient.get()),
                        without_those_behind(bias_gradient.get())};
  };
  return orders == Orders::all ? in_every_order(run) : run();
}

template <class T>
void check_backward(const Inputs<T>& in, const Case& c, Place place, Orders orders = Orders::all) {
  std::string text;
  trace(c, text);
  SCOPED_TRACE(text);
  std::vector<double> dx(in.x.size());
  std::vector<double> weight_gradient(c.rows.width, 100.0);
  std::vector<double> bias_gradient(c.rows.width, 100.0);
  const std::vector<double> residual = exact(place == Place::in_both ? in.dy : in.residual);
  in_double::norm_backward(exact(in.x).data(), exact(in.weight).data(), exact(in.dy).data(),
                           static_cast<double>(c.offset), static_cast<double>(kEpsilon),
                           place == Place::without_residual ? nullptr : residual.data(), dx.data(),
                           weight_gradient.data(), c.centred ? bias_gradient.data() : nullptr,
                           c.rows.count, c.rows.width);
  if (!c.biased) bias_gradient.assign(c.rows.width, 100.0);
  const auto found = gradients(in, c, place, std::vector<float>(c.rows.width, 100.0F), orders);
  expect_close(std::get<0>(found), dx, 1e-5);
  expect_close(std::get<1>(found), weight_gradient, 1e-4);
  expect_close(std::get<2>(found), bias_gradient, 1e-4);
}

template <class T>
void check_backwards(const std::vector<Case>& cases) {
  for (const Case& c : cases) check_backward(Inputs<T>(c), c, Place::apart);
}
// The widths of shapes() that have their own kernels in that type.
TEST_F(CudaNorm, GradientsAreTheHostsInFp32) {
  check_backwards<float>({{{1, 8}, false},
                          {{9, 8}, true},
                          {{17, 264}, false},
                          {{3, 1024}, true},
                          {{3, 1024}, false},
                          {{3, 1032}, true},
                          {{3, 1032}, false},
                          {{2, 4104}, true},
                          {{1, 4104}, false},
                          {{2, 8192}, false},
                          {{1, 8200}, true}});
}
TEST_F(CudaNorm, OfRowsWithoutBiasIsTheHosts) {
  for (const Rows& rows : {Rows{9, 264}, Rows{3, 1032}}) {
    const Case c = {rows, true, 0.0F, false};
    const Inputs<Bf16> in(c);
    expect_close(normed(in, c), expected_norm(in, c), 5e-6);
    check_backward(in, c, Place::apart);
  }
}
TEST_F(CudaNorm, GradientsAreTheHostsInBf16) {
  check_backwards<Bf16>({{{1, 8}, true},
                         {{9, 8}, false},
                         {{17, 264}, true},
                         {{3, 1024}, false},
                         {{3, 1032}, true},
                         {{3, 1032}, false},
                         {{2, 4096}, false},
                         {{2, 4104}, true},
                         {{1, 8200}, true},
                         {{1, 16392}, true}});
}

/// Gradients of frozen tensors are null. The others and dx are the same.
TEST_F(CudaNorm, GradientsThatAreNotWantedAreLeftOut) {
  for (const Rows& rows : {Rows{20, 264}, Rows{3, 1032}, Rows{2, 8200}}) {
    const Case c = {rows, true};
    const Inputs<Bf16> in(c);
    const DeviceArray<Bf16> x(in.x);
    const DeviceArray<Bf16> weight(in.weight);
    const DeviceArray<Bf16> dy(in.dy);
    const DeviceArray<float> partials(partial_floats(rows), -1.0F);
    const auto run = [&](bool of_weight, bool of_bias) {
      const DeviceArray<Bf16> dx(in.x);
      const DeviceArray<float> weight_gradient(std::vector<float>(rows.width, 100.0F));
      const DeviceArray<float> bias_gradient(std::vector<float>(rows.width, 100.0F));
      must(norm_backward<Bf16>(nullptr, x.data(), weight.data(), dy.data(), kEpsilon, nullptr,
                               dx.data(), of_weight ? weight_gradient.data() : nullptr,
                               of_bias ? bias_gradient.data() : nullptr, partials.data(), rows, {},
                               c.offset, true));
      return Gradients<Bf16>{dx.get(), weight_gradient.get(), bias_gradient.get()};
    };
    const auto all = run(true, true);
    const std::vector<float> untouched(rows.width, 100.0F);
    for (const auto& [of_weight, of_bias] :
         {std::pair{true, false}, std::pair{false, true}, std::pair{false, false}}) {
      const auto some = run(of_weight, of_bias);
      EXPECT_TRUE(std::get<0>(some) == std::get<0>(all));
      EXPECT_EQ(std::get<1>(some), of_weight ? std::get<1>(all) : untouched);
      EXPECT_EQ(std::get<2>(some), of_bias ? std::get<2>(all) : untouched);
    }
  }
}

TEST_F(CudaNorm, GradientsMayOverwriteTheirInputs) {
  // Several rows per group, for the kernels that hold a row.
  for (const Rows& rows : {Rows{20, 264}, Rows{3, 1032}}) {
    for (const Place place :
         {Place::without_residual, Place::in_residual, Place::in_dy, Place::in_both}) {
      const Case c = {rows, true};
      check_backward(Inputs<Bf16>(c), c, place);
    }
  }
  const Case beyond = {{2, 8200}, false};
  check_backward(Inputs<float>(beyond), beyond, Place::in_both);
}

TEST_F(CudaNorm, GradientsOfMoreRowsThanGroups) {
  // 2048 rows with a warp each, or 256 with a block each, are one row per group.
  const Case of_warps = {{2100, 8}, true};
  check_backward(Inputs<Bf16>(of_warps), of_warps, Place::apart, Orders::one);
  const Case of_blocks = {{258, 1032}, true};
  check_backward(Inputs<Bf16>(of_blocks), of_blocks, Place::in_residual);
  const Case beyond = {{257, 8200}, false};
  check_backward(Inputs<float>(beyond), beyond, Place::apart, Orders::one);
}

/// Two tokens with three heads each, in rows with other values around them.
template <class T>
void check_groups(std::size_t width) {
  SCOPED_TRACE(testing::Message() << "groups of " << width);
  constexpr std::size_t kTokens = 2;
  constexpr std::size_t kGroups = 3;
  const NormRows places = {kGroups, kGroups * width + 16, kGroups * width + 8};
  const Case packed = {{kTokens * kGroups, width}, false};
  Inputs<T> in(packed);
  const auto spread = [&](const std::vector<T>& values, std::size_t step) {
    std::vector<T> rows(kTokens * step, rounded<T>(7.0));
    for (std::size_t i = 0; i < values.size(); ++i) {
      rows[i / (kGroups * width) * step + i % (kGroups * width)] = values[i];
    }
    return rows;
  };
  const DeviceArray<T> x(spread(in.x, places.x_step));
  const DeviceArray<T> weight(in.weight);
  const DeviceArray<T> y(kTokens * places.y_step, rounded<T>(7.0));
  must(norm<T>(nullptr, x.data(), weight.data(), nullptr, kEpsilon, nullptr, y.data(), packed.rows,
               places));
  EXPECT_EQ(y.get(), spread(normed(in, packed), places.y_step));

  const std::vector<float> zeros(width);
  const auto [dx, weight_gradient, unused] =
      gradients(in, packed, Place::without_residual, zeros, Orders::one);
  const DeviceArray<T> dy(spread(in.dy, places.y_step));
  const DeviceArray<float> partials(partial_floats(packed.rows));
  const DeviceArray<float> sums(zeros);
  must(norm_backward<T>(nullptr, x.data(), weight.data(), dy.data(), kEpsilon, nullptr, dy.data(),
                        sums.data(), nullptr, partials.data(), packed.rows, places));
  EXPECT_EQ(dy.get(), spread(dx, places.y_step));
  EXPECT_EQ(sums.get(), weight_gradient);
}
TAG_TESTS("small_shapes", "CudaNorm.GroupsOfLongerRowsAreTheSameAsRows");
TEST_F(CudaNorm, GroupsOfLongerRowsAreTheSameAsRows) {
  for (const std::size_t width : {8U, 128U, 1032U}) {
    check_groups<Bf16>(width);
    check_groups<float>(width);
  }
}

/// The kernels for a warp and for a block, and those that read a part of a row twice.
template <class T>
void check_offset() {
  for (const std::size_t width : {24U, 1032U, 8200U}) {
    const Case c = {{3, width}, false, 1.0F};
    const Inputs<T> in(c);
    expect_close(normed(in, c, true), expected_norm(in, c, true), 5e-6);
    check_backward(in, c, Place::apart, Orders::one);
  }
}
TEST_F(CudaNorm, OffsetsAreTheHosts) {
  check_offset<float>();
  check_offset<Bf16>();
}

TEST_F(CudaNorm, EmptyInputsAreAccepted) {
  EXPECT_EQ(norm<float>(nullptr, nullptr, nullptr, nullptr, kEpsilon, nullptr, nullptr, {0, 8}),
            cudaSuccess);
  EXPECT_EQ(norm_backward<float>(nullptr, nullptr, nullptr, nullptr, kEpsilon, nullptr, nullptr,
                                 nullptr, nullptr, nullptr, {0, 8}),
            cudaSuccess);
}

}  // namespace
}  // namespace ballast::model::cuda::norm_test
