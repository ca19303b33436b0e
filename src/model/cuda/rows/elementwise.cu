#include <concepts>

#include "src/device/cuda/eight_values.h"
#include "src/device/cuda/kernel_language.h"
#include "src/model/compute/formulas.h"
#include "src/model/cuda/rows/row_threads.h"
#include "src/model/cuda/rows/rows.h"

namespace ballast::model::cuda {
namespace {

using device::Eight;
using device::kEight;
using device::read;
using device::write;

/// A float whose exp and quotients are accurate to a few ulp and need a fraction of the
/// instructions. That is enough for results that are rounded to bf16, where exact instructions
/// would take longer than the memory accesses. Its operators are constexpr, and those that call
/// non-constexpr functions are templates, so that the formulas stay constexpr (formulas.h).
struct Quick {
  float value = 0.0F;
  constexpr __device__ Quick(float from) : value(from) {}                       // NOLINT: a number
  constexpr __device__ Quick(double from) : value(static_cast<float>(from)) {}  // NOLINT: a number
};
constexpr __device__ Quick operator+(Quick a, Quick b) {
  return a.value + b.value;
}
constexpr __device__ Quick operator-(Quick a, Quick b) {
  return a.value - b.value;
}
constexpr __device__ Quick operator-(Quick a) {
  return -a.value;
}
constexpr __device__ Quick operator*(Quick a, Quick b) {
  return a.value * b.value;
}
template <std::same_as<Quick> Q>
constexpr __device__ Q operator/(Q a, Q b) {
  return __fdividef(a.value, b.value);
}
template <std::same_as<Quick> Q>
constexpr __device__ Q exp(Q a) {
  return __expf(a.value);
}
template <std::same_as<Quick> Q>
constexpr __device__ Q fabs(Q a) {
  return fabsf(a.value);
}
template <std::same_as<Quick> Q>
constexpr __device__ Q erf(Q a) {
  return erff(a.value);
}

/// The type for formulas whose results are rounded to T.
template <class T>
struct Number {
  using type = Quick;
};
template <>
struct Number<float> {
  using type = float;
};
__device__ float value_of(Quick x) {
  return x.value;
}
__device__ float value_of(float x) {
  return x;
}

/// Returns the index of the first of this thread's eight elements.
__device__ std::size_t first_of_mine() {
  return (std::size_t{blockIdx.x} * kElementThreads + threadIdx.x) * kEight;
}

template <Activation f, class T>
__global__ void activated(const T* x, T* y, std::size_t size) {
  using N = typename Number<T>::type;
  const std::size_t at = first_of_mine();
  if (at >= size) return;
  float values[kEight];
  read(x + at, values);
  for (float& value : values) value = value_of(formulas::activation<f>(N(value)));
  write(values, y + at);
}

template <Activation f, class T>
__global__ void times_derivative(const T* x, T* d, std::size_t size) {
  using N = typename Number<T>::type;
  const std::size_t at = first_of_mine();
  if (at >= size) return;
  float values[kEight];
  float gradients[kEight];
  read(x + at, values);
  read(d + at, gradients);
  for (unsigned i = 0; i < kEight; ++i)
    gradients[i] *= value_of(formulas::activation_derivative<f>(N(values[i])));
  write(gradients, d + at);
}

/// Returns the position of this thread's eight elements in rows of `width` elements that are `step`
/// apart.
__device__ std::size_t place_in_rows(unsigned width, std::size_t step) {
  const unsigned group = blockIdx.x * kElementThreads + threadIdx.x;
  const unsigned groups = width / kEight;
  return group / groups * step + std::size_t{group % groups} * kEight;
}

/// The gating function f(gate) * up.
template <Activation f>
struct Plain {
  template <class N>
  __device__ float value(float gate, float up) const {
    return up * value_of(formulas::activation<f>(N(gate)));
  }
  /// Replaces gate and up by their gradients, given the gradient of the result.
  template <class N>
  __device__ void differentiate(float& gate, float& up, float d) const {
    const N x(gate);
    if constexpr (f == Activation::silu) {
      const N s = formulas::sigmoid(x);
      gate = d * up * value_of(formulas::silu_derivative(x, s));
      up = d * value_of(x * s);
    } else {
      gate = d * up * value_of(formulas::activation_derivative<f>(x));
      up = d * value_of(formulas::activation<f>(x));
    }
  }
};

/// A gating function with a limit.
struct Limited {
  float limit;
  float slope;

  /// Gate and up after clamping; NaN stays NaN.
  struct Between {
    float gate;
    float up;
    __device__ Between(float g, float u, float limit)
        : gate(g > limit ? limit : g), up(u > limit ? limit : (u < -limit ? -limit : u)) {}
  };
  template <class N>
  __device__ float value(float gate, float up) const {
    const Between in(gate, up, limit);
    return in.gate * value_of(formulas::sigmoid(N(slope * in.gate))) * (in.up + 1.0F);
  }
  template <class N>
  __device__ void differentiate(float& gate, float& up, float d) const {
    const Between in(gate, up, limit);
    const N x(slope * in.gate);
    const N s = formulas::sigmoid(x);
    const float of_gate = d * (in.up + 1.0F) * value_of(formulas::silu_derivative(x, s));
    gate = gate <= limit ? of_gate : 0.0F;
    up = fabsf(up) <= limit ? d * in.gate * value_of(s) : 0.0F;
  }
};

template <class Formula, class T>
__global__ void gated(Formula formula, const T* gate, const T* up, std::size_t step, T* y,
                      std::size_t size, unsigned width) {
  using N = typename Number<T>::type;
  const std::size_t at = first_of_mine();
  if (at >= size) return;
  const std::size_t from = place_in_rows(width, step);
  float g[kEight];
  float u[kEight];
  read(gate + from, g);
  read(up + from, u);
  for (unsigned i = 0; i < kEight; ++i) u[i] = formula.template value<N>(g[i], u[i]);
  write(u, y + at);
}

template <class Formula, class T>
__global__ void gate_gradients(Formula formula, T* gate, T* up, std::size_t step, const T* dy,
                               std::size_t size, unsigned width) {
  using N = typename Number<T>::type;
  const std::size_t at = first_of_mine();
  if (at >= size) return;
  const std::size_t from = place_in_rows(width, step);
  float g[kEight];
  float u[kEight];
  float d[kEight];
  read(gate + from, g);
  read(up + from, u);
  read(dy + at, d);
  for (unsigned i = 0; i < kEight; ++i) formula.template differentiate<N>(g[i], u[i], d[i]);
  write(g, gate + from);
  write(u, up + from);
}

template <class T>
__global__ void widened(const T* x, float* y, std::size_t size) {
  const std::size_t at = first_of_mine();
  if (at >= size) return;
  float values[kEight];
  read(x + at, values);
  write(values, y + at);
}

__global__ void accumulated(const float* x, float* y, std::size_t size) {
  const std::size_t at = first_of_mine();
  if (at >= size) return;
  float values[kEight];
  float sums[kEight];
  read(x + at, values);
  read(y + at, sums);
  for (unsigned i = 0; i < kEight; ++i) sums[i] += values[i];
  write(sums, y + at);
}

/// Launches one thread per eight elements.
device::LaunchConfig over(cudaStream_t stream, std::size_t size) {
  constexpr std::size_t kTogether = std::size_t{kElementThreads} * kEight;
  return {.stream = stream,
          .blocks = static_cast<unsigned>((size + kTogether - 1) / kTogether),
          .threads = kElementThreads};
}

}  // namespace

template <class T>
cudaError_t activate(cudaStream_t stream, Activation f, const T* x, T* y, std::size_t size) {
  if (size == 0) return cudaSuccess;
  return formulas::with_activation(f, [&](auto is) {
    return device::launch(over(stream, size), &activated<is(), T>, x, y, size);
  });
}

template <class T>
cudaError_t activate_backward(cudaStream_t stream, Activation f, const T* x, T* d,
                              std::size_t size) {
  if (size == 0) return cudaSuccess;
  return formulas::with_activation(f, [&](auto is) {
    return device::launch(over(stream, size), &times_derivative<is(), T>, x, d, size);
  });
}

/// Returns launch(formula) for the formula that `how` selects.
template <class Work>
cudaError_t with_formula(const Gating& how, const Work& launch) {
  if (how.limit > 0.0F) return launch(Limited{how.limit, how.slope});
  return formulas::with_activation(how.activation, [&](auto is) { return launch(Plain<is()>()); });
}

template <class T>
cudaError_t glu(cudaStream_t stream, const Gating& how, const T* gate, const T* up,
                std::size_t step, T* y, Rows rows) {
  const std::size_t size = rows.count * rows.width;
  if (size == 0) return cudaSuccess;
  return with_formula(how, [&](auto formula) {
    return device::launch(over(stream, size), &gated<decltype(formula), T>, formula, gate, up, step,
                          y, size, static_cast<unsigned>(rows.width));
  });
}

template <class T>
cudaError_t glu_backward(cudaStream_t stream, const Gating& how, T* gate, T* up, std::size_t step,
                         const T* dy, Rows rows) {
  const std::size_t size = rows.count * rows.width;
  if (size == 0) return cudaSuccess;
  return with_formula(how, [&](auto formula) {
    return device::launch(over(stream, size), &gate_gradients<decltype(formula), T>, formula, gate,
                          up, step, dy, size, static_cast<unsigned>(rows.width));
  });
}

template <class T>
cudaError_t widen(cudaStream_t stream, const T* x, float* y, std::size_t size) {
  if (size == 0) return cudaSuccess;
  return device::launch(over(stream, size), &widened<T>, x, y, size);
}

cudaError_t accumulate(cudaStream_t stream, const float* x, float* y, std::size_t size) {
  if (size == 0) return cudaSuccess;
  return device::launch(over(stream, size), &accumulated, x, y, size);
}

template cudaError_t activate(cudaStream_t, Activation, const float*, float*, std::size_t);
template cudaError_t activate(cudaStream_t, Activation, const Bf16*, Bf16*, std::size_t);
template cudaError_t activate(cudaStream_t, Activation, const F16*, F16*, std::size_t);
template cudaError_t activate_backward(cudaStream_t, Activation, const float*, float*, std::size_t);
template cudaError_t activate_backward(cudaStream_t, Activation, const Bf16*, Bf16*, std::size_t);
template cudaError_t activate_backward(cudaStream_t, Activation, const F16*, F16*, std::size_t);
template cudaError_t glu(cudaStream_t, const Gating&, const float*, const float*, std::size_t,
                         float*, Rows);
template cudaError_t glu(cudaStream_t, const Gating&, const Bf16*, const Bf16*, std::size_t, Bf16*,
                         Rows);
template cudaError_t glu(cudaStream_t, const Gating&, const F16*, const F16*, std::size_t, F16*,
                         Rows);
template cudaError_t glu_backward(cudaStream_t, const Gating&, float*, float*, std::size_t,
                                  const float*, Rows);
template cudaError_t glu_backward(cudaStream_t, const Gating&, Bf16*, Bf16*, std::size_t,
                                  const Bf16*, Rows);
template cudaError_t glu_backward(cudaStream_t, const Gating&, F16*, F16*, std::size_t, const F16*,
                                  Rows);
template cudaError_t widen(cudaStream_t, const float*, float*, std::size_t);
template cudaError_t widen(cudaStream_t, const Bf16*, float*, std::size_t);
template cudaError_t widen(cudaStream_t, const F16*, float*, std::size_t);

}  // namespace ballast::model::cuda
