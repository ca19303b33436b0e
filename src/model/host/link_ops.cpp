#include "src/model/host/link_ops.h"

#include "src/model/host/team.h"

namespace ballast::model::host {
namespace {

/// Columns of a table per thread: a cache line of fp32.
constexpr std::size_t kTableColumns = 16;

}  // namespace

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
void LinkOps<T>::mix_rows_backward(const TokenRows<float>& table, const TokenMix& how,
                                   const std::int32_t* tokens, std::size_t rows, const T* dy, T* dx,
                                   std::size_t step) const {
  const std::size_t width = table.width;
  split(KernelGroup::elementwise, width, kTableColumns, [&](Range columns) {
    for (std::size_t row = 0; row < rows; ++row) {
      const T* const from = dy + row * width + columns.begin;
      if (table.rows != nullptr) {
        float* const sums =
            table.rows + static_cast<std::size_t>(tokens[row]) * width + columns.begin;
        kernels_.accumulate_scaled(sums, from, how.factor * how.scale, columns.size());
      }
      if (dx == nullptr) continue;
      kernels_.scale(from, how.factor, dx + row * step + columns.begin, columns.size());
    }
  });
}

template class LinkOps<float>;
template class LinkOps<Bf16>;
template class LinkOps<F16>;

}  // namespace ballast::model::host
