#include "src/model/host/link_ops.h"

#include <algorithm>

#include "src/model/host/team.h"

namespace ballast::model::host {
template <class T>
void LinkOps<T>::sum_columns(const T* x, std::size_t step, std::size_t rows, std::size_t width,
                             bool adds, float* sums) const {
  split(KernelGroup::elementwise, rows, 1, [&](Range r) {
    for (std::size_t row = r.begin; row < r.end; ++row) {
      float* const to = sums + row * width;
      if (adds) {
        kernels_.accumulate(to, x + row * step, width);
      } else {
        kernels_.widen(x + row * step, to, width);
      }
    }
  });
}

template <class T>
void LinkOps<T>::add_sums(const float* sums, std::size_t rows, std::size_t width, T* x,
                          std::size_t step) const {
  split(KernelGroup::elementwise, rows, 1, [&](Range r) {
    for (std::size_t row = r.begin; row < r.end; ++row) {
      T* const to = x + row * step;
      for (std::size_t i = 0; i < width; ++i) {
        to[i] = from_float<T>(to_float(to[i]) + sums[row * width + i]);
      }
    }
  });
}

template <class T>
void LinkOps<T>::mix_rows(const TokenRows<const T>& rows, const TokenMix& how, const T* x,
                          std::size_t step, T* y) const {
  split(KernelGroup::elementwise, rows.size, 1, [&](Range r) {
    for (std::size_t row = r.begin; row < r.end; ++row) {
      const T* const a = x + row * step;
      const T* const b = rows.rows + row * rows.width;
      T* const to = y + row * rows.width;
      for (std::size_t i = 0; i < rows.width; ++i) {
        // The product is rounded before it is added, on every instruction set.
        const float scaled = to_float(from_float<T>(to_float(b[i]) * how.scale));
        to[i] = from_float<T>((to_float(a[i]) + scaled) * how.factor);
      }
    }
  });
}

template <class T>
void LinkOps<T>::mix_rows_backward(const TokenRows<const T>& dy, const TokenMix& how,
                                   float* of_rows, T* dx, std::size_t step) const {
  split(KernelGroup::elementwise, dy.size, 1, [&](Range r) {
    for (std::size_t row = r.begin; row < r.end; ++row) {
      const T* const from = dy.rows + row * dy.width;
      if (of_rows != nullptr) {
        float* const to = of_rows + row * dy.width;
        std::fill_n(to, dy.width, 0.0F);
        kernels_.accumulate_scaled(to, from, how.factor * how.scale, dy.width);
      }
      if (dx != nullptr) kernels_.scale(from, how.factor, dx + row * step, dy.width);
    }
  });
}

template class LinkOps<float>;
template class LinkOps<Bf16>;
template class LinkOps<F16>;

}  // namespace ballast::model::host
