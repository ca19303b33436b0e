#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/core/units.h"

#include "tests/unit/model/mixer_run.h"
#include "tests/unit/model/numbers.h"

// Gated delta nets and short convolutions on the host device, compared with plain formulas in
// double.

namespace ballast::model::host::mixer_test {
namespace {

using test::central_difference;
using test::dot;
using test::kMixerEpsilon;
using test::MixerCase;
using test::normals;
using test::positions_of;
using test::relative_error;
using Inputs = test::MixerInputs;
template <class T>
using Ours = test::HostMixer<T>;
using Values = std::vector<double>;

double sigmoid(double x) {
  return 1.0 / (1.0 + std::exp(-x));
}

Values unit(const double* x, std::size_t width, double factor) {
  double squares = 1e-6;
  for (std::size_t i = 0; i < width; ++i) squares += x[i] * x[i];
  Values out;
  for (std::size_t i = 0; i < width; ++i) out.push_back(x[i] * factor / std::sqrt(squares));
  return out;
}

/// The plain recurrence, one row after the other.
class Plain {
 public:
  Plain(const DeltaShape& shape, const std::vector<std::int32_t>& positions)
      : s_(shape), positions_(positions) {}

  [[nodiscard]] Values run(const Inputs& in) const {
    Values out(s_.tokens() * s_.values());
    std::vector<Values> states(s_.value_heads);
    for (std::size_t row = 0; row < s_.tokens(); ++row) {
      if (position(row) == 0) states.assign(s_.value_heads, Values(s_.state()));
      const Values channels = convolved(in, row);
      for (std::size_t head = 0; head < s_.value_heads; ++head) {
        step(in, row, channels, head, states[head],
             &out[(row * s_.value_heads + head) * s_.value_width]);
      }
    }
    return out;
  }

 private:
  [[nodiscard]] std::size_t position(std::size_t row) const {
    return positions_.empty() ? row % s_.length : static_cast<std::size_t>(positions_[row]);
  }
  [[nodiscard]] Values convolved(const Inputs& in, std::size_t row) const {
    Values out(s_.channels());
    for (std::size_t c = 0; c < s_.channels(); ++c) {
      double sum = 0.0;
      for (std::size_t back = 0; back < s_.taps && back <= position(row); ++back) {
        sum += in.taps[c * s_.taps + s_.taps - 1 - back] * in.x[(row - back) * s_.row() + c];
      }
      out[c] = sum * sigmoid(sum);
    }
    return out;
  }
  void step(const Inputs& in, std::size_t row, const Values& channels, std::size_t head,
            Values& state, double* out) const {
    const std::size_t dk = s_.key_width;
    const std::size_t dv = s_.value_width;
    const std::size_t key_head = head / (s_.value_heads / s_.key_heads);
    const Values q = unit(&channels[key_head * dk], dk, 1.0 / std::sqrt(static_cast<double>(dk)));
    const Values k = unit(&channels[s_.keys() + key_head * dk], dk, 1.0);
    const double* const v = &channels[2 * s_.keys() + head * dv];
    const double* const gates = &in.x[row * s_.row() + s_.betas_at()];
    const double beta = static_cast<double>(s_.beta_factor) * sigmoid(gates[head]);
    const double g = -std::exp(in.decay[head]) *
                     std::log1p(std::exp(gates[s_.value_heads + head] + in.shift[head]));
    for (double& value : state) value *= std::exp(g);
    for (std::size_t j = 0; j < dv; ++j) {
      double read = 0.0;
      for (std::size_t i = 0; i < dk; ++i) read += state[i * dv + j] * k[i];
      for (std::size_t i = 0; i < dk; ++i) state[i * dv + j] += k[i] * beta * (v[j] - read);
      out[j] = 0.0;
      for (std::size_t i = 0; i < dk; ++i) out[j] += state[i * dv + j] * q[i];
    }
    double squares = 0.0;
    for (std::size_t j = 0; j < dv; ++j) squares += out[j] * out[j];
    const double factor = 1.0 / std::sqrt(squares / static_cast<double>(dv) + kMixerEpsilon);
    const double* const z = &in.x[row * s_.row() + s_.gates_at() + head * dv];
    for (std::size_t j = 0; j < dv; ++j) out[j] *= factor * in.norm[j] * z[j] * sigmoid(z[j]);
  }

  DeltaShape s_;
  const std::vector<std::int32_t>& positions_;
};

/// Compares gradients with derivatives of `loss` along random directions and of some elements.
void expect_derivatives(const std::vector<Values*>& inputs, const std::function<double()>& loss,
                        const std::vector<std::vector<float>>& gradients) {
  std::size_t number = 0;
  for (Values* values : inputs) {
    const std::vector<float>& gradient = gradients[number];
    const Values direction = normals(values->size(), 7 + number);
    const Values before = *values;
    double step = 0.0;
    const std::function<double()> along = [&] {
      for (std::size_t i = 0; i < before.size(); ++i)
        (*values)[i] = before[i] + step * direction[i];
      return loss();
    };
    const double derivative = central_difference(along, step);
    *values = before;
    double sum = 0.0;
    double squares = 0.0;
    for (std::size_t i = 0; i < gradient.size(); ++i) {
      const auto value = static_cast<double>(gradient[i]);
      sum += value * direction[i];
      squares += value * value;
    }
    EXPECT_NEAR(sum, derivative, 5e-5 * std::sqrt(squares)) << "inputs " << number;
    const double typical = std::sqrt(squares / static_cast<double>(gradient.size()));
    const std::size_t stride = gradient.size() / 4 + 1;
    for (std::size_t i = number; i < gradient.size(); i += stride) {
      EXPECT_NEAR(gradient[i], central_difference<double>(loss, (*values)[i]), 1e-4 * typical)
          << "inputs " << number << " [" << i << "]";
    }
    ++number;
  }
}

class Mixer : public testing::TestWithParam<MixerCase> {};

TEST_P(Mixer, AgreesWithThePlainRecurrenceAndItsDerivatives) {
  const DeltaShape& shape = GetParam().shape;
  const std::vector<std::int32_t> positions = positions_of(GetParam());
  const Plain plain(shape, positions);
  Inputs in(shape);
  const Values dy = Inputs::rounded(normals(shape.tokens() * shape.values(), 6));
  const Values expected = plain.run(in);
  const Ours<float> ours(shape, kernel_tables().back()->f32, positions, in, dy, 2);
  EXPECT_LT(relative_error(ours.out, expected), 2e-6);
  expect_derivatives(
      in.all(), [&] { return dot(plain.run(in), dy); }, ours.gradients);
}

TEST_P(Mixer, BitsDoNotDependOnThreads) {
  const DeltaShape& shape = GetParam().shape;
  const std::vector<std::int32_t> positions = positions_of(GetParam());
  const Inputs in(shape);
  const Values dy = normals(shape.tokens() * shape.values(), 6);
  const auto& kernels = kernel_tables().back()->bf16;
  const Ours<Bf16> one(shape, kernels, positions, in, dy, 1);
  const Ours<Bf16> three(shape, kernels, positions, in, dy, 3);
  EXPECT_EQ(0, std::memcmp(one.out.data(), three.out.data(), one.out.size() * sizeof(Bf16)));
  EXPECT_EQ(one.gradients, three.gradients);
}

/// The formula of a gated short convolution.
Values convolve_plainly(const test::ConvolutionCase& of, const test::ConvolutionInputs& in) {
  const ConvolutionShape& s = of.shape;
  Values out;
  for (std::size_t row = 0; row < s.tokens(); ++row) {
    const std::size_t position = of.positions.empty() ? row % s.length : of.positions[row];
    for (std::size_t c = 0; c < s.channels; ++c) {
      double sum = s.biased ? in.bias[c] : 0.0;
      for (std::size_t back = 0; back < s.taps && back <= position; ++back) {
        const double* const from = &in.x[(row - back) * s.x_step + c];
        sum += in.taps[(c + 1) * s.taps - 1 - back] * from[0] * from[2 * s.channels];
      }
      out.push_back(sum * in.x[row * s.x_step + s.channels + c]);
    }
  }
  return out;
}

class ShortConvolution : public testing::TestWithParam<test::ConvolutionCase> {};

TEST_P(ShortConvolution, AgreesWithTheFormulaAndItsDerivatives) {
  test::ConvolutionInputs in(GetParam().shape);
  const test::HostConvolution<float> ours(GetParam(), in, kernel_tables().back()->f32, 2);
  EXPECT_LT(relative_error(ours.out, convolve_plainly(GetParam(), in)), 1e-6);
  expect_derivatives(
      in.trained(GetParam().shape), [&] { return dot(convolve_plainly(GetParam(), in), in.dy); },
      ours.gradients);
}

TEST_P(ShortConvolution, BitsDoNotDependOnThreads) {
  const test::ConvolutionInputs in(GetParam().shape);
  const auto& kernels = kernel_tables().back()->bf16;
  const test::HostConvolution<Bf16> one(GetParam(), in, kernels, 1);
  const test::HostConvolution<Bf16> three(GetParam(), in, kernels, 3);
  EXPECT_EQ(0, std::memcmp(one.out.data(), three.out.data(), one.out.size() * sizeof(Bf16)));
  EXPECT_EQ(one.gradients, three.gradients);
}

INSTANTIATE_TEST_SUITE_P(All, ShortConvolution, testing::ValuesIn(test::convolution_cases()),
                         [](const auto& one) { return one.param.name; });

TEST(MixerGate, MultipliesBySigmoid) {
  constexpr std::size_t kWidth = 19;
  const Values x = Inputs::rounded(normals(2 * kWidth, 1));
  const Values gate = Inputs::rounded(normals(2 * kWidth, 2));
  const DeviceOps<float> ops = test::mixer_ops({}, kernel_tables().back()->f32, 1);
  const std::vector<float> attention(x.begin(), x.end());
  std::vector<float> gates(gate.begin(), gate.end());
  std::vector<float> d(x.size(), 1.0F);
  std::vector<float> y(x.size());
  ops.mixers->output_gate(attention.data(), gates.data(), kWidth, y.data(), 2, kWidth);
  ops.mixers->output_gate_backward(attention.data(), gates.data(), kWidth, d.data(), 2, kWidth);
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double s = sigmoid(gate[i]);
    EXPECT_NEAR(y[i], x[i] * s, 1e-6);
    EXPECT_NEAR(d[i], s, 1e-6);
    EXPECT_NEAR(gates[i], x[i] * s * (1.0 - s), 1e-6);
  }
}

// Documents end inside a chunk, at its edge, and one row after it; the last chunk is not full. Ten
// chunks need two kept states.
INSTANTIATE_TEST_SUITE_P(
    All, Mixer,
    testing::Values(MixerCase{"short_sequence", {2, 37, 1, 2, 5, 9, 3}, {}},
                    MixerCase{"two_chunks", {1, 128, 2, 2, 8, 8, 4}, {}},
                    MixerCase{"packed", {2, 193, 3, 6, 10, 7, 4}, {30, 34, 65, 1, 63}},
                    MixerCase{"negative_eigenvalues", {2, 193, 2, 4, 6, 5, 4, 2.0F}, {130, 63}},
                    MixerCase{"many_chunks", {1, 577, 1, 3, 6, 11, 4}, {300, 277}}),
    [](const auto& one) { return one.param.name; });

}  // namespace
}  // namespace ballast::model::host::mixer_test
