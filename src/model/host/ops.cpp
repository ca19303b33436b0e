#include "src/model/host/ops.h"

#include <cstring>

#include "ballast/core/units.h"

namespace ballast::model::host {
namespace {

/// Elements that a thread takes at a time: whole cache lines of any type.
constexpr std::size_t kStep = 64;

}  // namespace

template <class T>
Ops<T>::Ops(const RowKernels<T>& kernels, std::size_t hidden, std::size_t widest,
            std::size_t threads, float epsilon)
    : kernels_(kernels),
      hidden_(hidden),
      sum_row_(round_up(widest, 16)),
      threads_(threads),
      epsilon_(epsilon) {}

template <class T>
void Ops<T>::copy(const T* from, T* to, std::size_t size) const {
  split(size, kStep,
        [&](Range r) { std::memcpy(to + r.begin, from + r.begin, r.size() * sizeof(T)); });
}

template <class T>
void Ops<T>::clear_sums(std::size_t part, std::size_t width) const {
  std::memset(sum(part, 0), 0, width * sizeof(float));
  std::memset(sum(part, 1), 0, width * sizeof(float));
}

template <class T>
void Ops<T>::add_sums(std::size_t which, float* gradient, std::size_t width) const {
  for (std::size_t part = 0; part < threads_; ++part) {
    const float* const from = sum(part, which);
    for (std::size_t i = 0; i < width; ++i) gradient[i] += from[i];
  }
}

template <class T>
void Ops<T>::norm(const Norm<T>& weights, const T* x, T* y, std::size_t rows) const {
  split(rows, 1, [&](Range r) {
    const std::size_t at = r.begin * hidden_;
    kernels_.norm(x + at, weights.weight, weights.bias, epsilon_, y + at, r.size(), hidden_);
  });
}

template <class T>
void Ops<T>::norm_backward(const Norm<T>& weights, const T* x, const T* dy, const T* residual,
                           T* dx, std::size_t rows) const {
  const bool centred = weights.bias != nullptr;
  on_team(threads_, [&](std::size_t part) {
    const Range r = range_of(rows, threads_, part);
    const std::size_t at = r.begin * hidden_;
    clear_sums(part, hidden_);
    kernels_.norm_backward(x + at, weights.weight, dy + at, epsilon_,
                           residual == nullptr ? nullptr : residual + at, dx + at, sum(part, 0),
                           centred ? sum(part, 1) : nullptr, r.size(), hidden_);
  });
  add_sums(0, weights.weight_gradient, hidden_);
  if (centred) add_sums(1, weights.bias_gradient, hidden_);
}

template <class T>
void Ops<T>::gelu(const T* x, T* y, std::size_t size) const {
  split(size, kStep, [&](Range r) { kernels_.gelu(x + r.begin, y + r.begin, r.size()); });
}

template <class T>
void Ops<T>::gelu_backward(const T* x, T* d, float* bias_gradient, std::size_t rows,
                           std::size_t width) const {
  on_team(threads_, [&](std::size_t part) {
    const Range r = range_of(rows, threads_, part);
    clear_sums(part, width);
    kernels_.gelu_backward(x + r.begin * width, d + r.begin * width, sum(part, 0), r.size(), width);
  });
  add_sums(0, bias_gradient, width);
}

template <class T>
void Ops<T>::swiglu(const T* gate, const T* up, T* y, std::size_t size) const {
  split(size, kStep,
        [&](Range r) { kernels_.swiglu(gate + r.begin, up + r.begin, y + r.begin, r.size()); });
}

template <class T>
void Ops<T>::swiglu_backward(T* gate, T* up, const T* dy, std::size_t size) const {
  split(size, kStep, [&](Range r) {
    kernels_.swiglu_backward(gate + r.begin, up + r.begin, dy + r.begin, r.size());
  });
}

template <class T>
void Ops<T>::add_column_sums(const T* x, float* gradient, std::size_t rows,
                             std::size_t width) const {
  on_team(threads_, [&](std::size_t part) {
    const Range r = range_of(rows, threads_, part);
    clear_sums(part, width);
    kernels_.column_sum(x + r.begin * width, sum(part, 0), r.size(), width);
  });
  add_sums(0, gradient, width);
}

template <class T>
void Ops<T>::linear(const Linear<T>& layer, const T* x, T* y, std::size_t y_row, std::size_t rows,
                    bool add_to_y) {
  const Matrix weight =
      layer.flipped ? transposed(layer.weight, layer.in) : matrix(layer.weight, layer.out);
  products_.multiply({rows, layer.out, layer.in}, matrix(x, layer.in), weight, matrix(y, y_row),
                     add_to_y, layer.bias);
}

template <class T>
void Ops<T>::linear_input(const Linear<T>& layer, const T* dy, std::size_t dy_row, T* dx,
                          std::size_t rows, bool add_to_dx) {
  const Matrix weight =
      layer.flipped ? matrix(layer.weight, layer.in) : transposed(layer.weight, layer.out);
  products_.multiply({rows, layer.in, layer.out}, matrix(dy, dy_row), weight, matrix(dx, layer.in),
                     add_to_dx);
}

template <class T>
void Ops<T>::linear_weight(const Linear<T>& layer, const T* x, const T* dy, std::size_t dy_row,
                           std::size_t rows) {
  if (layer.flipped) {
    products_.multiply({layer.out, layer.in, rows}, transposed(dy, dy_row), matrix(x, layer.in),
                       matrix(layer.weight_gradient, layer.in), true);
  } else {
    products_.multiply({layer.in, layer.out, rows}, transposed(x, layer.in), matrix(dy, dy_row),
                       matrix(layer.weight_gradient, layer.out), true);
  }
}

template class Ops<float>;
template class Ops<Bf16>;

}  // namespace ballast::model::host
