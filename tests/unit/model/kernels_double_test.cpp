// The row kernels in double, compared with central differences.
#define BALLAST_KERNEL_ISA in_double

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include <gtest/gtest.h>

#include "src/model/host/elementwise_kernels.h"
#include "src/model/host/reduction_kernels.h"
#include "tests/unit/model/numbers.h"

namespace ballast::model::host::kernels_double_test {
namespace {

using test::central_difference;
using test::dot;
using test::normals;
using Values = std::vector<double>;

constexpr double kTolerance = 1e-6;

/// Checks that every `stride`-th element of `gradient` is the derivative of `loss` by that of `x`.
void expect_gradient(const std::function<double()>& loss, Values& x, const Values& gradient,
                     const char* what, std::size_t stride = 1) {
  ASSERT_EQ(x.size(), gradient.size());
  for (std::size_t i = 0; i < x.size(); i += stride) {
    const double expected = central_difference(loss, x[i]);
    EXPECT_NEAR(gradient[i], expected, kTolerance * std::max(1.0, std::abs(expected)))
        << what << " [" << i << "]";
  }
}

void check_norm(bool centred, double offset = 0.0, bool biased = true) {
  constexpr std::size_t kRows = 3;
  constexpr std::size_t kWidth = 37;
  Values x = normals(kRows * kWidth, 1, 1.5, 0.7);
  Values weight = normals(kWidth, 2, 0.5, 1.0);
  Values bias = normals(kWidth, 3);
  const Values dy = normals(kRows * kWidth, 4);
  const Values residual = normals(kRows * kWidth, 5);
  const double epsilon = 1e-5;
  const auto loss = [&] {
    Values y(x.size());
    in_double::norm<double>(x.data(), weight.data(), centred && biased ? bias.data() : nullptr,
                            offset, epsilon, nullptr, y.data(), kRows, kWidth, centred);
    return dot(y, dy);
  };
  Values dx(x.size());
  Values dweight(kWidth);
  Values dbias(kWidth);
  in_double::norm_backward(x.data(), weight.data(), dy.data(), offset, epsilon, residual.data(),
                           dx.data(), dweight.data(), centred ? dbias.data() : nullptr, kRows,
                           kWidth);
  for (std::size_t i = 0; i < dx.size(); ++i) dx[i] -= residual[i];
  expect_gradient(loss, x, dx, "x");
  expect_gradient(loss, weight, dweight, "weight");
  if (centred && biased) expect_gradient(loss, bias, dbias, "bias");
}

TEST(DoubleKernels, LayerNormsGradientIsItsDerivative) {
  check_norm(true);
}

TEST(DoubleKernels, GradientOfALayerNormWithoutBiasIsItsDerivative) {
  check_norm(true, 0.0, false);
}

TEST(DoubleKernels, RmsNormsGradientIsItsDerivative) {
  check_norm(false);
}

TEST(DoubleKernels, ShiftedRmsNormsGradientIsItsDerivative) {
  check_norm(false, 1.0);
}

TEST(DoubleKernels, NormsHaveTheirMeanAndVariance) {
  constexpr std::size_t kWidth = 41;
  const Values x = normals(kWidth, 1, 3.0, 100.0);
  const Values ones(kWidth, 1.0);
  const Values zeros(kWidth, 0.0);
  Values y(kWidth);
  in_double::norm<double>(x.data(), ones.data(), zeros.data(), 0.0, 0.0, nullptr, y.data(), 1,
                          kWidth);
  EXPECT_NEAR(std::accumulate(y.begin(), y.end(), 0.0), 0.0, 1e-10);
  EXPECT_NEAR(dot(y, y), static_cast<double>(kWidth), 1e-10);
  in_double::norm<double>(x.data(), ones.data(), nullptr, 0.0, 0.0, nullptr, y.data(), 1, kWidth);
  EXPECT_NEAR(dot(y, y), static_cast<double>(kWidth), 1e-10);
  EXPECT_GT(std::accumulate(y.begin(), y.end(), 0.0), 1.0);
  Values more(kWidth);
  in_double::norm<double>(x.data(), ones.data(), nullptr, 0.0, 0.0, x.data(), more.data(), 1,
                          kWidth);
  for (std::size_t i = 0; i < kWidth; ++i) EXPECT_NEAR(more[i], x[i] + y[i], 1e-12);
  in_double::norm<double>(x.data(), zeros.data(), nullptr, 1.0, 0.0, nullptr, more.data(), 1,
                          kWidth);
  EXPECT_EQ(more, y);
}

using Activate = void (*)(const double*, double*, std::size_t);
using ActivateBackward = void (*)(const double*, double*, double*, std::size_t, std::size_t);

void check_activation(Activate activate, ActivateBackward backward, double (*expected)(double)) {
  constexpr std::size_t kRows = 3;
  constexpr std::size_t kWidth = 13;
  Values x = normals(kRows * kWidth, 1, 3.0);
  const Values dy = normals(x.size(), 2);
  Values y(x.size());
  activate(x.data(), y.data(), x.size());
  for (std::size_t i = 0; i < x.size(); ++i) EXPECT_NEAR(y[i], expected(x[i]), 1e-12);
  const auto loss = [&] {
    activate(x.data(), y.data(), x.size());
    return dot(y, dy);
  };
  Values d = dy;
  Values column_sum(kWidth, 1.0);
  backward(x.data(), d.data(), column_sum.data(), kRows, kWidth);
  expect_gradient(loss, x, d, "x");
  for (std::size_t i = 0; i < kWidth; ++i) {
    EXPECT_NEAR(column_sum[i], 1.0 + d[i] + d[kWidth + i] + d[2 * kWidth + i], 1e-12);
  }
}

double tanh_gelu(double x) {
  const double u = std::sqrt(2.0 / 3.14159265358979323846) * (x + 0.044715 * std::pow(x, 3));
  return 0.5 * x * (1.0 + std::tanh(u));
}

TEST(DoubleKernels, GeluIsItsTanhFormAndItsGradientTheDerivative) {
  check_activation(in_double::activate<Activation::gelu_tanh, double>,
                   in_double::activate_backward<Activation::gelu_tanh, double>, tanh_gelu);
}

TEST(DoubleKernels, ExactGeluIsItsFormulaAndItsGradientTheDerivative) {
  check_activation(in_double::activate<Activation::gelu, double>,
                   in_double::activate_backward<Activation::gelu, double>,
                   [](double x) { return 0.5 * x * std::erfc(-x / std::sqrt(2.0)); });
}

using Gate = void (*)(const double*, const double*, double*, std::size_t);
using GateBackward = void (*)(double*, double*, const double*, std::size_t);

void check_gate(Gate apply, GateBackward backward, double (*activation)(double)) {
  constexpr std::size_t kSize = 29;
  Values gate = normals(kSize, 1, 2.0);
  Values up = normals(kSize, 2);
  const Values dy = normals(kSize, 3);
  Values y(kSize);
  const auto loss = [&] {
    apply(gate.data(), up.data(), y.data(), kSize);
    return dot(y, dy);
  };
  loss();
  for (std::size_t i = 0; i < kSize; ++i) EXPECT_NEAR(y[i], activation(gate[i]) * up[i], 1e-12);
  Values dgate = gate;
  Values dup = up;
  backward(dgate.data(), dup.data(), dy.data(), kSize);
  expect_gradient(loss, gate, dgate, "gate");
  expect_gradient(loss, up, dup, "up");
}

TEST(DoubleKernels, SwigluIsItsFormulaAndItsGradientsTheDerivatives) {
  check_gate(in_double::glu<Activation::silu, double>,
             in_double::glu_backward<Activation::silu, double>,
             [](double x) { return x / (1.0 + std::exp(-x)); });
}

TEST(DoubleKernels, GegluIsItsFormulaAndItsGradientsTheDerivatives) {
  check_gate(in_double::glu<Activation::gelu_tanh, double>,
             in_double::glu_backward<Activation::gelu_tanh, double>, tanh_gelu);
}

TEST(DoubleKernels, LimitedSwigluIsItsFormulaAndHasGradientsUpToItsLimits) {
  constexpr double kLimit = 0.75;
  constexpr double kSlope = 1.7;
  const double beyond = std::nextafter(kLimit, 1.0);
  const Values gate = {0.3, kLimit, beyond, -2.0, 5.0, 0.3, 0.3, 0.3, 0.3, -1.0, 0.5};
  const Values up = {0.2, 0.2, 0.2, 0.2, 0.2, kLimit, beyond, -kLimit, -beyond, 4.0, -4.0};
  const std::size_t size = gate.size();
  const auto results = [&](const Values& g, const Values& u) {
    Values y(size);
    in_double::limited_swiglu<double>(g.data(), u.data(), y.data(), size, kLimit, kSlope);
    return y;
  };
  const Values y = results(gate, up);
  const Values dy(size, 2.0);
  Values of_gate = gate;
  Values of_up = up;
  in_double::limited_swiglu_backward<double>(of_gate.data(), of_up.data(), dy.data(), size, kLimit,
                                             kSlope);
  for (std::size_t i = 0; i < size; ++i) {
    const double g = std::min(gate[i], kLimit);
    const double u = std::clamp(up[i], -kLimit, kLimit);
    EXPECT_NEAR(y[i], g / (1.0 + std::exp(-kSlope * g)) * (u + 1.0), 1e-14) << i;
    // Continues the formula on one side of a limit.
    constexpr double kStep = 1e-6;
    const double step = (gate[i] > 0.0 ? -1.0 : 1.0) * kStep;
    const double step_up = (up[i] > 0.0 ? -1.0 : 1.0) * kStep;
    Values moved = gate;
    Values moved_up = up;
    moved[i] += step;
    moved_up[i] += step_up;
    const double slope = gate[i] > kLimit ? 0.0 : (results(moved, up)[i] - y[i]) / step;
    const double slope_up =
        std::abs(up[i]) > kLimit ? 0.0 : (results(gate, moved_up)[i] - y[i]) / step_up;
    EXPECT_NEAR(of_gate[i], 2.0 * slope, 1e-4) << i;
    EXPECT_NEAR(of_up[i], 2.0 * slope_up, 1e-4) << i;
    EXPECT_EQ(of_gate[i] == 0.0, gate[i] > kLimit) << i;
    EXPECT_EQ(of_up[i] == 0.0, std::abs(up[i]) > kLimit) << i;
  }
}

TEST(DoubleKernels, RopeRotatesPairsAndBackwardRotatesBack) {
  constexpr std::size_t kRows = 5;
  constexpr std::size_t kLength = 3;
  constexpr std::size_t kHeads = 2;
  constexpr std::size_t kHead = 10;
  constexpr std::size_t kStride = kHeads * kHead + 3;
  Values cosine(kLength * kHead / 2);
  Values sine(cosine.size());
  for (std::size_t i = 0; i < cosine.size(); ++i) {
    cosine[i] = std::cos(0.37 * static_cast<double>(i));
    sine[i] = std::sin(0.37 * static_cast<double>(i));
  }
  Values x = normals(kRows * kStride, 1);
  const Values dy = normals(x.size(), 2);
  const auto turn = [&](Values values, double direction) {
    in_double::rope(values.data(), kStride, 1, kRows, kLength, nullptr, kHeads, kHead, kHead / 2,
                    cosine.data(), sine.data(), direction);
    return values;
  };
  const Values y = turn(x, 1.0);
  // Row 0 is position 1; Hugging Face: x * cos + rotate_half(x) * sin.
  const double c = cosine[kHead / 2];
  const double s = sine[kHead / 2];
  EXPECT_NEAR(y[0], x[0] * c - x[kHead / 2] * s, 1e-12);
  EXPECT_NEAR(y[kHead / 2], x[kHead / 2] * c + x[0] * s, 1e-12);
  EXPECT_EQ(y[kStride - 1], x[kStride - 1]);
  expect_gradient([&] { return dot(turn(x, 1.0), dy); }, x, turn(dy, -1.0), "x");

  // With positions, row r (here from 1 on) is at positions[r].
  const std::vector<std::int32_t> positions = {9, 1, 0, 1, 2, 0};
  Values packed = x;
  in_double::rope(packed.data(), kStride, 1, kRows, kLength, positions.data(), kHeads, kHead,
                  kHead / 2, cosine.data(), sine.data(), 1.0);
  EXPECT_EQ(packed[0], y[0]);
  EXPECT_EQ(packed[kStride], x[kStride]) << "position 0 does not turn";
  EXPECT_NE(y[kStride], x[kStride]);
}

TEST(DoubleKernels, InterleavedRopeRotatesNeighbours) {
  constexpr std::size_t kHeads = 2;
  constexpr std::size_t kHead = 10;
  constexpr std::size_t kHalf = 3;
  const Values cosine = {0.6, 0.8, 0.0};
  const Values sine = {0.8, 0.6, 1.0};
  const Values x = normals(kHeads * kHead, 1);
  for (const double direction : {1.0, -1.0}) {
    Values y = x;
    in_double::interleaved_rope(y.data(), x.size(), 0, 1, 1, nullptr, kHeads, kHead, kHalf,
                                cosine.data(), sine.data(), direction);
    for (std::size_t i = 0; i < x.size(); i += 2) {
      const std::size_t pair = i % kHead / 2;
      const double c = pair < kHalf ? cosine[pair] : 1.0;
      const double s = pair < kHalf ? direction * sine[pair] : 0.0;
      EXPECT_NEAR(y[i], x[i] * c - x[i + 1] * s, 1e-12);
      EXPECT_NEAR(y[i + 1], x[i + 1] * c + x[i] * s, 1e-12);
    }
  }
}

TEST(DoubleKernels, RotaryPositionsOfAPartOfEachHeadLeaveTheRest) {
  constexpr std::size_t kHeads = 2;
  constexpr std::size_t kHead = 10;
  constexpr std::size_t kHalf = 3;
  const Values cosine = {0.6, 0.8, 0.0};
  const Values sine = {0.8, 0.6, 1.0};
  const Values x = normals(kHeads * kHead, 1);
  Values y = x;
  in_double::rope(y.data(), x.size(), 0, 1, 1, nullptr, kHeads, kHead, kHalf, cosine.data(),
                  sine.data(), 1.0);
  for (std::size_t i = 0; i < x.size(); ++i) {
    const std::size_t column = i % kHead;
    double expected = x[i];
    if (column < kHalf) expected = x[i] * cosine[column] - x[i + kHalf] * sine[column];
    if (column >= kHalf && column < 2 * kHalf) {
      expected = x[i] * cosine[column - kHalf] + x[i - kHalf] * sine[column - kHalf];
    }
    EXPECT_NEAR(y[i], expected, 1e-15) << i;
  }
}

void check_softmax(std::size_t window, double cap = 0.0) {
  constexpr std::size_t kFirst = 4;
  constexpr std::size_t kRows = 7;
  constexpr std::size_t kColumns = kFirst + kRows;
  constexpr std::size_t kStride = 16;
  constexpr double kScale = 0.6;
  const KeyRange keys = {0, kColumns, {.window = window}};
  Values scores = normals(kRows * kStride, 1, 2.0);
  const Values dp = normals(scores.size(), 2);
  Values log_sum(kRows);
  const auto softmax = [&] {
    Values used = scores;
    Values p(scores.size());
    if (cap > 0.0) in_double::soft_cap(used.data(), used.size(), kScale, cap);
    in_double::attention_softmax(used.data(), p.data(), kStride, kFirst, kRows, keys,
                                 cap > 0.0 ? 1.0 : kScale, log_sum.data());
    return p;
  };
  const Values p = softmax();
  Values delta(kRows);
  for (std::size_t r = 0; r < kRows; ++r) {
    double sum = 0.0;
    for (std::size_t i = 0; i < kColumns; ++i) {
      sum += p[r * kStride + i];
      delta[r] += p[r * kStride + i] * dp[r * kStride + i];
      const bool seen = i <= kFirst + r && (window == 0 || i + window > kFirst + r);
      EXPECT_EQ(p[r * kStride + i] != 0.0, seen) << r << ", " << i;
    }
    EXPECT_NEAR(sum, 1.0, 1e-12);
  }
  Values again(scores.size());
  Values dscores(scores.size());
  Values capped = scores;
  if (cap > 0.0) in_double::soft_cap(capped.data(), capped.size(), kScale, cap);
  in_double::attention_softmax_backward(capped.data(), dp.data(), again.data(), dscores.data(),
                                        kStride, kFirst, kRows, keys, kScale, cap, log_sum.data(),
                                        delta.data());
  for (std::size_t i = 0; i < p.size(); ++i) EXPECT_NEAR(again[i], p[i], 1e-12);
  expect_gradient([&] { return dot(softmax(), dp); }, scores, dscores, "scores");
}

TEST(DoubleKernels, CausalSoftmaxsGradientIsItsDerivative) {
  check_softmax(0);
}
TEST(DoubleKernels, SoftmaxIgnoresKeysOutsideTheWindow) {
  check_softmax(1);
  check_softmax(5);
  check_softmax(100);
}

TEST(DoubleKernels, GradientOfCappedScoresIsTheDerivative) {
  check_softmax(0, 1.5);
  check_softmax(5, 0.7);
}

/// Sums in parts of `part` logits.
RowSum<double> sum_of(const Values& logits, std::size_t target, std::size_t part) {
  RowSum<double> sum;
  for (std::size_t at = 0; at < logits.size(); at += part) {
    RowSum<double> own;
    in_double::sum_logits(logits.data() + at, std::min(part, logits.size() - at), target - at,
                          &own);
    sum = merged(sum, own);
  }
  return sum;
}

TEST(DoubleKernels, CrossEntropysGradientIsItsDerivativeTimesTheScale) {
  // More than one part of partial sums, and an odd end; in one part and in several.
  for (const std::size_t size : {std::size_t{1}, std::size_t{53}, std::size_t{4999}}) {
    for (const std::size_t part : {size, size / 3 + 1}) {
      constexpr double kScale = 0.25;
      Values logits = normals(size, 1, 3.0);
      const std::size_t target = size / 2;
      const auto loss = [&] {
        const RowSum<double> row = sum_of(logits, target, part);
        return kScale * (std::log(row.total) + row.largest - row.wanted);
      };
      double sum = 0.0;
      for (const double logit : logits) sum += std::exp(logit);
      EXPECT_NEAR(loss(), kScale * (std::log(sum) - logits[target]), 1e-10);
      const RowSum<double> row = sum_of(logits, target, part);
      Values in_place = logits;
      for (std::size_t at = 0; at < size; at += part) {
        double* const some = in_place.data() + at;
        in_double::logit_gradients<double>(some, std::min(part, size - at), target - at, &row,
                                           kScale, 0.0, some);
      }
      expect_gradient(loss, logits, in_place, "logits", size / 100 + 1);
    }
  }
}

TEST(DoubleKernels, GradientOfCappedLogitsIsTheDerivative) {
  constexpr std::size_t kSize = 53;
  constexpr double kScale = 0.25;
  constexpr double kCap = 2.5;
  Values logits = normals(kSize, 1, 3.0);
  const auto capped = [&] {
    Values values = logits;
    in_double::soft_cap(values.data(), values.size(), 1.0, kCap);
    return values;
  };
  EXPECT_NEAR(capped()[7], kCap * std::tanh(logits[7] / kCap), 1e-14);
  for (const std::size_t target : {std::size_t{0}, std::size_t{20}}) {
    const auto loss = [&] {
      const RowSum<double> row = sum_of(capped(), target, kSize);
      return kScale * (std::log(row.total) + row.largest - row.wanted);
    };
    Values in_place = capped();
    const RowSum<double> row = sum_of(in_place, target, kSize);
    in_double::logit_gradients<double>(in_place.data(), kSize, target, &row, kScale, kCap,
                                       in_place.data());
    expect_gradient(loss, logits, in_place, "logits");
  }
}

TEST(DoubleKernels, PartsOfARowCountAsTheirLogitsDo) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const auto loss = [](const Values& logits, std::size_t part) {
    const RowSum<double> row = sum_of(logits, 3, part);
    return std::log(row.total) + row.largest - row.wanted;
  };
  // A part of which all logits are -infinity counts as nothing, wherever it is.
  const Values rest = {1.0, -2.0, 0.5, 3.0};
  for (const std::size_t at : {std::size_t{0}, std::size_t{4}}) {
    Values logits = rest;
    logits.insert(logits.begin() + static_cast<std::ptrdiff_t>(at), 4, -kInfinity);
    const RowSum<double> row = sum_of(logits, 3, 4);
    const RowSum<double> expected = sum_of(rest, 3, 4);
    EXPECT_EQ(row.total, expected.total);
    EXPECT_EQ(row.largest, expected.largest);
  }
  EXPECT_TRUE(std::isnan(loss(Values(8, -kInfinity), 4)));
  // A logit that is NaN or infinite makes the loss NaN, wherever it is.
  for (const double wrong : {kInfinity, std::numeric_limits<double>::quiet_NaN()}) {
    for (const std::size_t at : {1U, 3U, 6U}) {
      Values logits = {1.0, -2.0, 0.5, 3.0, 2.0, -1.0, 0.0, 4.0};
      logits[at] = wrong;
      EXPECT_TRUE(std::isnan(loss(logits, 4))) << wrong << " at " << at;
    }
  }
}

TEST(DoubleKernels, SumsOfTilesAreMergedInTheirOrder) {
  // Two places with two tiles of three rows each, and a gap between the places.
  constexpr std::size_t kRows = 3;
  constexpr std::size_t kStep = 8;
  std::vector<RowSum<float>> sums(2 * kStep);
  for (std::size_t i = 0; i < sums.size(); ++i) {
    const auto value = static_cast<float>(i * i % 7);
    sums[i] = {value, i < kRows ? value : std::numeric_limits<float>::quiet_NaN(), 1.1 + value};
  }
  const RowSumsOfTiles tiles = {sums.data(), 2, 2, kRows, kStep};
  for (std::size_t row = 0; row < kRows; ++row) {
    RowSum<float> expected;
    for (const std::size_t at : {0U, 3U, 8U, 11U}) expected = merged(expected, sums[at + row]);
    const RowSum<float> found = tiles.merged_row(row);
    EXPECT_EQ(found.total, expected.total);
    EXPECT_EQ(found.largest, expected.largest);
    EXPECT_EQ(found.wanted, sums[row].wanted);
  }
}

TEST(DoubleKernels, SmallKernelsMatchTheirFormulas) {
  constexpr std::size_t kRows = 3;
  constexpr std::size_t kWidth = 11;
  const Values a = normals(kRows * kWidth, 1);
  const Values b = normals(kRows * kWidth, 2);
  Values y(a.size());
  in_double::add(a.data(), b.data(), y.data(), y.size());
  Values sum = b;
  in_double::accumulate(sum.data(), a.data(), sum.size());
  Values columns(kWidth, 2.0);
  in_double::column_sum(a.data(), kWidth, columns.data(), kRows, kWidth);
  Values dots(kRows);
  in_double::row_dot(a.data(), kWidth, b.data(), kWidth, dots.data(), kRows, kWidth);
  Values copy(a.size());
  in_double::convert<double>(a.data(), kWidth, copy.data(), kWidth, kRows, kWidth);
  EXPECT_EQ(copy, a);
  EXPECT_EQ(y, sum);
  for (std::size_t i = 0; i < y.size(); ++i) EXPECT_EQ(y[i], a[i] + b[i]);
  for (std::size_t i = 0; i < kWidth; ++i) {
    EXPECT_NEAR(columns[i], 2.0 + a[i] + a[kWidth + i] + a[2 * kWidth + i], 1e-12);
  }
  for (std::size_t r = 0; r < kRows; ++r) {
    double expected = 0.0;
    for (std::size_t i = 0; i < kWidth; ++i) expected += a[r * kWidth + i] * b[r * kWidth + i];
    EXPECT_NEAR(dots[r], expected, 1e-12);
  }
}

}  // namespace
}  // namespace ballast::model::host::kernels_double_test
