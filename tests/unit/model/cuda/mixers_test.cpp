// Gated delta nets, short convolutions and gated attention on a GPU, compared with the host
// device's, which are compared with the plain recurrence.
#include "src/model/cuda/mixers/mixers.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/core/dtype.h"

#include "tests/support/device_array.h"
#include "tests/support/in_every_order.h"
#include "tests/support/tags.h"
#include "tests/unit/model/mixer_run.h"
#include "tests/unit/model/numbers.h"

namespace ballast::model::cuda::mixers_test {
namespace {

using test::DeviceArray;
using test::in_every_order;
using test::MixerCase;
using test::MixerInputs;
using test::normals;
using test::relative_error;

/// Arrays of a mixer in device memory, and what the passes write there. Their content before must
/// not matter.
template <class T>
class Mixer {
 public:
  using Host = test::HostMixer<T>;
  Mixer(const DeltaShape& shape, const std::vector<std::int32_t>& positions, const MixerInputs& in,
        const std::vector<double>& dy)
      : s_(shape),
        x_(Host::narrow(in.x)),
        taps_(Host::narrow(in.taps)),
        decay_(Host::narrow(in.decay)),
        shift_(Host::narrow(in.shift)),
        norm_(Host::narrow(in.norm)),
        positions_(positions),
        dy_(Host::narrow(dy)) {}

  /// Results, and gradients of x, taps, decay, shift and norm.
  using Results = std::tuple<std::vector<T>, std::vector<T>, std::vector<float>, std::vector<float>,
                             std::vector<float>, std::vector<float>>;
  [[nodiscard]] Results run() const {
    const std::size_t bytes =
        std::max({delta_scratch_bytes(s_), convolution_scratch_bytes(s_.convolution()),
                  gated_norm_partials(s_) * sizeof(float)});
    const DeviceArray<std::byte> scratch(bytes, std::byte{0xff});
    const DeviceArray<T> channels(s_.tokens() * s_.channels(), nan());
    const DeviceArray<T> recurred(s_.tokens() * s_.values(), nan());
    const DeviceArray<T> out(recurred.size(), nan());
    const DeviceArray<float> states(s_.states(), NAN);
    const DeviceArray<T> dx(x_.size(), nan());
    const DeviceArray<float> dtaps(taps_.size());
    const DeviceArray<float> ddecay(decay_.size());
    const DeviceArray<float> dshift(shift_.size());
    const DeviceArray<float> dnorm(norm_.size());
    const std::int32_t* const positions = positions_.size() == 0 ? nullptr : positions_.data();
    const Convolution<T> convolution{taps_.data(), dtaps.data(), positions, s_.convolution()};
    const DeltaInputs<T> in{channels.data(), x_.data() + s_.betas_at(),
                            s_.row(),        decay_.data(),
                            shift_.data(),   positions};
    const GatedNorm<T> norm{norm_.data(), dnorm.data(), static_cast<float>(test::kMixerEpsilon)};
    const T* const gates = x_.data() + s_.gates_at();
    expect(convolve(nullptr, convolution, x_.data(), channels.data()));
    expect(recur(nullptr, s_, in, recurred.data(), states.data(), scratch.data()));
    expect(gated_norm(nullptr, s_, norm, recurred.data(), gates, out.data()));

    const DeviceArray<T> d(dy_);
    T* const to = dx.data();
    expect(gated_norm_backward(nullptr, s_, norm, recurred.data(), gates, d.data(),
                               to + s_.gates_at(), reinterpret_cast<float*>(scratch.data())));
    expect(recur_backward<T>(nullptr, s_, in, states.data(), d.data(),
                             {to, to + s_.betas_at(), s_.row(), ddecay.data(), dshift.data()},
                             scratch.data()));
    expect(convolve_backward(nullptr, convolution, x_.data(), to, scratch.data()));
    return {out.get(), dx.get(), dtaps.get(), ddecay.get(), dshift.get(), dnorm.get()};
  }

 private:
  static T nan() { return from_float<T>(NAN); }
  static void expect(cudaError_t code) { EXPECT_EQ(code, cudaSuccess); }

  DeltaShape s_;
  DeviceArray<T> x_;
  DeviceArray<T> taps_;
  DeviceArray<T> decay_;
  DeviceArray<T> shift_;
  DeviceArray<T> norm_;
  DeviceArray<std::int32_t> positions_;
  std::vector<T> dy_;
};

template <class T>
std::vector<double> widened(const std::vector<T>& values) {
  std::vector<double> out;
  for (const T value : values) out.push_back(static_cast<double>(to_float(value)));
  return out;
}

class CudaMixers : public testing::TestWithParam<MixerCase> {};

/// Errors of each array relative to the host's. In bf16, both round the same steps.
template <class T>
void expect_the_hosts(const MixerCase& of, const host::TypeKernels<T>& kernels, double most) {
  const DeltaShape& shape = of.shape;
  const std::vector<std::int32_t> positions = positions_of(of);
  const MixerInputs in(shape);
  const auto dy = MixerInputs::rounded(normals(shape.tokens() * shape.values(), 6));
  const test::HostMixer<T> expected(shape, kernels, positions, in, dy, 2);
  const Mixer<T> mixer(shape, positions, in, dy);
  const auto [out, dx, taps, decay, shift, norm] = in_every_order([&] { return mixer.run(); });
  EXPECT_LT(relative_error(widened(out), widened(expected.out)), most);
  EXPECT_LT(relative_error(widened(dx), expected.gradients[0]), most) << "x";
  EXPECT_LT(relative_error(taps, expected.gradients[1]), most) << "taps";
  EXPECT_LT(relative_error(decay, expected.gradients[2]), most) << "decay";
  EXPECT_LT(relative_error(shift, expected.gradients[3]), most) << "shift";
  EXPECT_LT(relative_error(norm, expected.gradients[4]), most) << "norm";
  // Parts of a row have gradients of unlike size.
  const auto part = [&](const std::vector<double>& rows, std::size_t begin, std::size_t end) {
    std::vector<double> some;
    for (std::size_t at = 0; at < rows.size(); ++at) {
      if (at % shape.row() >= begin && at % shape.row() < end) some.push_back(rows[at]);
    }
    return some;
  };
  const std::vector<double> theirs(expected.gradients[0].begin(), expected.gradients[0].end());
  const std::size_t bounds[] = {0,
                                shape.keys(),
                                2 * shape.keys(),
                                shape.channels(),
                                shape.betas_at(),
                                shape.betas_at() + shape.value_heads,
                                shape.row()};
  for (std::size_t i = 0; i + 1 < std::size(bounds); ++i) {
    EXPECT_LT(relative_error(part(widened(dx), bounds[i], bounds[i + 1]),
                             part(theirs, bounds[i], bounds[i + 1])),
              2.0 * most)
        << "columns from " << bounds[i];
  }
}

TEST_P(CudaMixers, AreTheHosts) {
  const host::KernelTable& kernels = *host::kernel_tables().back();
  expect_the_hosts<float>(GetParam(), kernels.f32, 1e-5);
  if (GetParam().name == "packed") expect_the_hosts<Bf16>(GetParam(), kernels.bf16, 1e-2);
}

TAG_TESTS("small_shapes", "*CudaMixers*short*:*CudaMixers*wide*:*CudaMixers*many*");
// Documents end inside a chunk, at its edge, and one row after it; the last chunk is not full. Ten
// chunks need two kept states. Values have more columns than a block.
INSTANTIATE_TEST_SUITE_P(
    All, CudaMixers,
    testing::Values(MixerCase{"short_sequence", {2, 37, 1, 4, 8, 8, 3}, {}},
                    MixerCase{"packed", {2, 193, 2, 4, 16, 8, 4}, {30, 34, 65, 1, 63}},
                    MixerCase{"negative_eigenvalues", {2, 130, 2, 4, 8, 8, 4, 2.0F}, {67, 63}},
                    MixerCase{"wide_values", {1, 66, 1, 4, 8, 40, 4}, {}},
                    MixerCase{"wide_keys", {1, 65, 4, 4, 72, 8, 2}, {64, 1}},
                    MixerCase{"many_chunks", {1, 577, 1, 4, 8, 8, 4}, {300, 277}}),
    [](const auto& one) { return one.param.name; });

/// Results and gradients of a gated short convolution on the GPU.
template <class T>
auto run_convolution(const test::ConvolutionCase& of, const test::ConvolutionInputs& in) {
  using Host = test::HostMixer<T>;
  const DeviceArray<std::byte> scratch(convolution_scratch_bytes(of.shape), std::byte{0xff});
  const DeviceArray<T> x(Host::narrow(in.x));
  const DeviceArray<T> taps(Host::narrow(in.taps));
  const DeviceArray<T> bias(Host::narrow(in.bias));
  const DeviceArray<T> dy(Host::narrow(in.dy));
  const DeviceArray<std::int32_t> positions(of.positions);
  const DeviceArray<T> out(dy.size(), from_float<T>(NAN));
  const DeviceArray<T> dx(x.size(), from_float<T>(NAN));
  const DeviceArray<float> dtaps(taps.size());
  const DeviceArray<float> dbias(bias.size());
  const Convolution<T> how = {
      taps.data(), dtaps.data(), of.positions.empty() ? nullptr : positions.data(),
      of.shape,    bias.data(),  dbias.data()};
  EXPECT_EQ(gated_convolve(nullptr, how, x.data(), out.data()), cudaSuccess);
  EXPECT_EQ(gated_convolve_backward(nullptr, how, x.data(), dy.data(), dx.data(), scratch.data()),
            cudaSuccess);
  return std::tuple(out.get(), dx.get(), dtaps.get(), dbias.get());
}

class CudaShortConvolution : public testing::TestWithParam<test::ConvolutionCase> {};

/// Compares with the host's results, which are compared with the formula.
template <class T>
void expect_convolution(const test::ConvolutionCase& of, const host::TypeKernels<T>& kernels,
                        double most) {
  const test::ConvolutionInputs in(of.shape);
  const test::HostConvolution<T> expected(of, in, kernels, 2);
  const auto [out, dx, taps, bias] = in_every_order([&] { return run_convolution<T>(of, in); });
  EXPECT_LT(relative_error(widened(out), widened(expected.out)), most);
  EXPECT_LT(relative_error(widened(dx), expected.gradients[0]), most) << "x";
  EXPECT_LT(relative_error(taps, expected.gradients[1]), most) << "taps";
  if (!of.shape.biased) return;
  EXPECT_LT(relative_error(bias, expected.gradients[2]), most) << "biases";
}

TAG_TESTS("small_shapes", "*CudaShortConvolution.*");
TEST_P(CudaShortConvolution, IsThatOfTheHostInFp32) {
  expect_convolution<float>(GetParam(), host::kernel_tables().back()->f32, 1e-6);
}
TEST_P(CudaShortConvolution, IsThatOfTheHostInBf16) {
  expect_convolution<Bf16>(GetParam(), host::kernel_tables().back()->bf16, 1e-4);
}

INSTANTIATE_TEST_SUITE_P(All, CudaShortConvolution, testing::ValuesIn(test::convolution_cases()),
                         [](const auto& one) { return one.param.name; });

TAG_TESTS("small_shapes", "CudaAttentionGate.MultipliesBySigmoid");
TEST(CudaAttentionGate, MultipliesBySigmoid) {
  constexpr std::size_t kRows = 3;
  constexpr GatedRows kShape = {kRows, 24, 40};
  const auto x = normals<float>(kRows * kShape.width, 1);
  const auto gate = normals<float>(kRows * kShape.gate_step, 2);
  const auto dy = normals<float>(x.size(), 3);
  const DeviceArray<float> x_there(x);
  const auto [y, dx, dgate] = in_every_order([&] {
    const DeviceArray<float> gates(gate);
    const DeviceArray<float> results(x.size(), NAN);
    const DeviceArray<float> d(dy);
    EXPECT_EQ(sigmoid_gate(nullptr, kShape, x_there.data(), gates.data(), results.data()),
              cudaSuccess);
    EXPECT_EQ(sigmoid_gate_backward(nullptr, kShape, x_there.data(), gates.data(), d.data()),
              cudaSuccess);
    return std::tuple(results.get(), d.get(), gates.get());
  });
  for (std::size_t at = 0; at < gate.size(); ++at) {
    const std::size_t column = at % kShape.gate_step;
    if (column >= kShape.width) {
      EXPECT_EQ(dgate[at], gate[at]) << "between the gates";
      continue;
    }
    const std::size_t i = at / kShape.gate_step * kShape.width + column;
    const double s = 1.0 / (1.0 + std::exp(-static_cast<double>(gate[at])));
    EXPECT_NEAR(y[i], x[i] * s, 1e-6);
    EXPECT_NEAR(dx[i], dy[i] * s, 1e-6);
    EXPECT_NEAR(dgate[at], dy[i] * x[i] * s * (1.0 - s), 1e-6);
  }
}

}  // namespace
}  // namespace ballast::model::cuda::mixers_test
