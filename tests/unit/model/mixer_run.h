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
    const model::Convolution<T> convolution{taps.data(), gradients[1].data(), positions};
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

}  // namespace ballast::test
