#include "src/model/host/mixer_ops.h"

#include <algorithm>

#include "ballast/core/bump.h"

#include "src/model/host/team.h"

namespace ballast::model::host {
namespace {

/// Number of parts of a sum over rows.
constexpr std::size_t kParts = 32;
/// Channels per thread: multiples of a cache line of any type.
constexpr std::size_t kChannels = 32;

}  // namespace

template <class T>
MixerOps<T>::MixerOps(const DeltaShape& shape, const TypeKernels<T>& kernels, std::size_t threads,
                      float epsilon)
    : shape_(shape), kernels_(kernels.mixers), epsilon_(epsilon), rule_(shape, kernels, threads) {}

template <class T>
auto MixerOps<T>::take_scratch(Bump& bump) const -> Scratch {
  const std::size_t taps = shape_.taps * shape_.channels();
  return {bump.take<float>(taps), bump.take<float>(std::max(taps, kParts * shape_.value_width))};
}

template <class T>
auto MixerOps<T>::scratch_of(std::byte* scratch) const -> Scratch {
  Bump bump(scratch);
  return take_scratch(bump);
}

template <class T>
std::size_t MixerOps<T>::scratch_bytes() const {
  Bump counting;
  take_scratch(counting);
  return std::max<std::size_t>(counting.used(), rule_.scratch_bytes());
}

template <class T>
void MixerOps<T>::load_taps(const Convolution<T>& how, float* weights) const {
  const std::size_t channels = shape_.channels();
  split(channels, kChannels, [&](Range here) {
    for (std::size_t c = here.begin; c < here.end; ++c) {
      for (std::size_t tap = 0; tap < shape_.taps; ++tap) {
        weights[tap * channels + c] = to_float(how.weight[c * shape_.taps + tap]);
      }
    }
  });
}

template <class T>
void MixerOps<T>::convolve(const Convolution<T>& how, const T* x, T* y, std::byte* scratch) const {
  const KernelClock clock(KernelGroup::delta_rule);
  const Scratch s = scratch_of(scratch);
  load_taps(how, s.weights);
  split(shape_.tokens(), 1, [&](Range r) {
    kernels_.convolve(rows_of(how, r.begin, r.end), x, shape_.row(), s.weights, y,
                      shape_.channels());
  });
}

template <class T>
void MixerOps<T>::convolve_backward(const Convolution<T>& how, const T* x, T* dy,
                                    std::byte* scratch) const {
  const KernelClock clock(KernelGroup::delta_rule);
  const Scratch s = scratch_of(scratch);
  load_taps(how, s.weights);
  const std::size_t channels = shape_.channels();
  std::fill_n(s.sums, shape_.taps * channels, 0.0F);
  split(channels, kChannels, [&](Range here) {
    for (std::size_t sequence = 0; sequence < shape_.sequences; ++sequence) {
      const std::size_t first = sequence * shape_.length;
      kernels_.convolve_backward(rows_of(how, first, first + shape_.length), x + here.begin,
                                 shape_.row(), s.weights + here.begin, dy + here.begin,
                                 shape_.row(), s.sums + here.begin, channels, here.size());
    }
    if (how.weight_gradient == nullptr) return;
    for (std::size_t c = here.begin; c < here.end; ++c) {
      for (std::size_t tap = 0; tap < shape_.taps; ++tap) {
        how.weight_gradient[c * shape_.taps + tap] += s.sums[tap * channels + c];
      }
    }
  });
}

template <class T>
void MixerOps<T>::gated_norm(const Norm<T>& weights, const T* x, const T* gate, T* y) const {
  const KernelClock clock(KernelGroup::delta_rule);
  const std::size_t wide = shape_.values();
  split(shape_.tokens(), 1, [&](Range r) {
    for (std::size_t row = r.begin; row < r.end; ++row) {
      kernels_.gated_norm(x + row * wide, gate + row * shape_.row(), weights.weight,
                          weights.epsilon_or(epsilon_), y + row * wide, shape_.value_heads,
                          shape_.value_width);
    }
  });
}

template <class T>
void MixerOps<T>::gated_norm_backward(const Norm<T>& weights, const T* x, const T* gate, T* dy,
                                      T* dgate, std::byte* scratch) const {
  const KernelClock clock(KernelGroup::delta_rule);
  float* const sums = scratch_of(scratch).sums;
  const std::size_t wide = shape_.values();
  const std::size_t width = shape_.value_width;
  const std::size_t parts = std::min(shape_.tokens(), kParts);
  split(parts, 1, [&](Range own) {
    for (std::size_t part = own.begin; part < own.end; ++part) {
      std::fill_n(sums + part * width, width, 0.0F);
      const Range rows = range_of(shape_.tokens(), parts, part);
      for (std::size_t row = rows.begin; row < rows.end; ++row) {
        const std::size_t step = row * shape_.row();
        kernels_.gated_norm_backward(x + row * wide, gate + step, weights.weight,
                                     weights.epsilon_or(epsilon_), dy + row * wide, dgate + step,
                                     sums + part * width, shape_.value_heads, width);
      }
    }
  });
  for (std::size_t part = 0; part < parts && weights.weight_gradient != nullptr; ++part) {
    for (std::size_t i = 0; i < width; ++i) {
      weights.weight_gradient[i] += sums[part * width + i];
    }
  }
}

template <class T>
void MixerOps<T>::gate(const T* x, const T* gate, std::size_t gate_step, T* y, std::size_t rows,
                       std::size_t width) const {
  const KernelClock clock(KernelGroup::activation);
  split(rows, 1, [&](Range r) {
    for (std::size_t row = r.begin; row < r.end; ++row) {
      kernels_.sigmoid_gate(x + row * width, gate + row * gate_step, y + row * width, width);
    }
  });
}

template <class T>
void MixerOps<T>::gate_backward(const T* x, T* gate, std::size_t gate_step, T* dy, std::size_t rows,
                                std::size_t width) const {
  const KernelClock clock(KernelGroup::activation);
  split(rows, 1, [&](Range r) {
    for (std::size_t row = r.begin; row < r.end; ++row) {
      kernels_.sigmoid_gate_backward(x + row * width, gate + row * gate_step, dy + row * width,
                                     width);
    }
  });
}

template class MixerOps<float>;
template class MixerOps<Bf16>;
template class MixerOps<F16>;

}  // namespace ballast::model::host
