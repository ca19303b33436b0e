#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ballast/core/units.h"

#include "src/model/host/ops.h"
#include "tests/unit/model/numbers.h"

namespace ballast::test {

inline constexpr double kMixerEpsilon = 1e-6;

/// Extents of a gated delta net, and its documents.
struct MixerCase {
  std::string name;
  model::DeltaShape shape;
  std::vector<std::int32_t> documents;  ///< lengths, of every sequence; empty: one
};

inline std::vector<std::int32_t> positions_of(const MixerCase& c) {
  std::vector<std::int32_t> positions;
  for (std::size_t sequence = 0; sequence < c.shape.sequences; ++sequence) {
    for (const std::int32_t length : c.documents) {
      for (std::int32_t i = 0; i < length; ++i) positions.push_back(i);
    }
  }
  return positions;
}

/// Random inputs of a mixer between the maps of its layer.
struct MixerInputs {
  explicit MixerInputs(const model::DeltaShape& s)
      : x(rounded(normals(s.tokens() * s.row(), 1))),
        taps(rounded(normals(s.channels() * s.taps, 2, 0.4))),
        decay(rounded(normals(s.value_heads, 3, 0.7, -1.5))),
        shift(rounded(normals(s.value_heads, 4))),
        norm(rounded(normals(s.value_width, 5, 0.3, 1.0))) {}
  static std::vector<double> rounded(std::vector<double> values) {
    for (double& value : values) value = static_cast<float>(value);
    return values;
  }
  std::vector<std::vector<double>*> all() { return {&x, &taps, &decay, &shift, &norm}; }

  std::vector<double> x;
  std::vector<double> taps;
  std::vector<double> decay;
  std::vector<double> shift;
  std::vector<double> norm;
};

/// Extents of a gated short convolution, and its documents.
struct ConvolutionCase {
  std::string name;
  model::ConvolutionShape shape;
  std::vector<std::int32_t> positions;  ///< empty: sequences are documents
};
inline std::vector<ConvolutionCase> convolution_cases() {
  const auto packed = [](std::size_t sequences, const std::vector<std::int32_t>& documents) {
    return positions_of({"", {.sequences = sequences}, documents});
  };
  const auto shape = [](std::size_t sequences, std::size_t length, std::size_t channels,
                        std::size_t taps, bool biased = false) {
    return model::ConvolutionShape{sequences, length, channels, taps, 3 * channels, biased};
  };
  // Documents end inside of stretches of rows, at their edges, and after one token.
  return {{"short_sequences", shape(2, 37, 40, 3), {}},
          {"fewer_rows_than_taps", shape(3, 2, 8, 4, true), {}},
          {"one_tap", shape(1, 70, 16, 1, true), {}},
          {"packed", shape(2, 193, 40, 3), packed(2, {30, 34, 65, 1, 63})},
          {"packed_with_biases", shape(1, 300, 152, 8, true), packed(1, {64, 5, 3, 1, 227})}};
}

/// Random inputs of a gated short convolution, and the gradient of its results.
struct ConvolutionInputs {
  explicit ConvolutionInputs(const model::ConvolutionShape& s)
      : x(MixerInputs::rounded(normals(s.tokens() * s.x_step, 1))),
        taps(MixerInputs::rounded(normals(s.channels * s.taps, 2, 0.4))),
        bias(MixerInputs::rounded(normals(s.channels, 3))),
        dy(MixerInputs::rounded(normals(s.tokens() * s.channels, 4))) {}
  std::vector<std::vector<double>*> trained(const model::ConvolutionShape& s) {
    if (!s.biased) return {&x, &taps};
    return {&x, &taps, &bias};
  }

  std::vector<double> x;
  std::vector<double> taps;
  std::vector<double> bias;
  std::vector<double> dy;
};

/// Operations of mixers on the host device. `kernels`: of any instruction set.
template <class T>
model::DeviceOps<T> mixer_ops(const model::DeltaShape& shape,
                              const model::host::TypeKernels<T>& kernels, std::size_t threads) {
  model::DeviceOps<T> ops;
  const model::KernelExtents extents = {
      .heads = {{}}, .delta = shape, .epsilon = static_cast<float>(kMixerEpsilon)};
  model::host::add_attention_ops(
      std::make_shared<model::host::SharedState<T>>(extents, threads, kernels), ops);
  return ops;
}

/// Results and gradients of the host device, in the order of MixerInputs::all().
template <class T>
struct HostMixer {
  HostMixer(const model::DeltaShape& s, const model::host::TypeKernels<T>& kernels,
            const std::vector<std::int32_t>& documents, const MixerInputs& in,
            const std::vector<double>& dy, std::size_t threads)
      : out(s.tokens() * s.values()) {
    const model::DeviceOps<T> made = mixer_ops(s, kernels, threads);
    model::MixerOps<T>& ops = *made.mixers;
    std::vector<std::byte> scratch(ops.scratch_bytes() + kCacheLine);
    const std::vector<T> x = narrow(in.x);
    const std::vector<T> taps = narrow(in.taps);
    const std::vector<T> decay = narrow(in.decay);
    const std::vector<T> shift = narrow(in.shift);
    const std::vector<T> norm = narrow(in.norm);
    for (const std::vector<double>* values : {&in.x, &in.taps, &in.decay, &in.shift, &in.norm}) {
      gradients.emplace_back(values->size());
    }
    const std::int32_t* const positions = documents.empty() ? nullptr : documents.data();
    std::vector<T> channels(s.tokens() * s.channels());
    std::vector<T> results(out.size());
    std::vector<float> states(s.states());
    const model::Convolution<T> convolution{taps.data(), gradients[1].data(), positions,
                                            s.convolution()};
    const model::DeltaInputs<T> inputs{
        channels.data(), x.data() + s.betas_at(), s.row(), decay.data(), shift.data(), positions};
    const model::Norm<T> about = {.weight = norm.data(), .weight_gradient = gradients[4].data()};
    ops.convolve(convolution, x.data(), channels.data(), scratch.data());
    ops.recur(inputs, results.data(), states.data(), scratch.data());
    ops.gated_norm(about, results.data(), x.data() + s.gates_at(), out.data());

    std::vector<T> dx(x.size());
    std::vector<T> d = narrow(dy);
    ops.gated_norm_backward(about, results.data(), x.data() + s.gates_at(), d.data(),
                            dx.data() + s.gates_at(), scratch.data());
    ops.recur_backward(
        inputs, states.data(), d.data(),
        {dx.data(), dx.data() + s.betas_at(), s.row(), gradients[2].data(), gradients[3].data()},
        scratch.data());
    ops.convolve_backward(convolution, x.data(), dx.data(), scratch.data());
    for (std::size_t i = 0; i < dx.size(); ++i) gradients[0][i] = to_float(dx[i]);
  }
  static std::vector<T> narrow(const std::vector<double>& values) {
    std::vector<T> out;
    for (const double value : values) out.push_back(from_float<T>(static_cast<float>(value)));
    return out;
  }

  std::vector<T> out;
  std::vector<std::vector<float>> gradients;
};

/// Results and gradients of a gated short convolution on the host device: of x, taps and biases.
template <class T>
struct HostConvolution {
  HostConvolution(const ConvolutionCase& of, const ConvolutionInputs& in,
                  const model::host::TypeKernels<T>& kernels, std::size_t threads)
      : out(of.shape.tokens() * of.shape.channels) {
    const model::DeviceOps<T> made = mixer_ops({}, kernels, threads);
    model::MixerOps<T>& ops = *made.mixers;
    std::vector<std::byte> scratch(ops.convolution_scratch_bytes(of.shape) + kCacheLine);
    const std::vector<T> x = HostMixer<T>::narrow(in.x);
    const std::vector<T> taps = HostMixer<T>::narrow(in.taps);
    const std::vector<T> bias = HostMixer<T>::narrow(in.bias);
    const std::vector<T> dy = HostMixer<T>::narrow(in.dy);
    for (const auto* values : {&in.x, &in.taps, &in.bias}) gradients.emplace_back(values->size());
    const model::Convolution<T> how = {
        taps.data(), gradients[1].data(), of.positions.empty() ? nullptr : of.positions.data(),
        of.shape,    bias.data(),         gradients[2].data()};
    ops.gated_convolve(how, x.data(), out.data(), scratch.data());
    std::vector<T> dx(x.size());
    ops.gated_convolve_backward(how, x.data(), dy.data(), dx.data(), scratch.data());
    for (std::size_t i = 0; i < dx.size(); ++i) gradients[0][i] = to_float(dx[i]);
  }

  std::vector<T> out;
  std::vector<std::vector<float>> gradients;
};

}  // namespace ballast::test
