#pragma once

#include "src/model/compute/formulas.h"
#include "src/model/host/simd.h"

namespace ballast::model::host::BALLAST_KERNEL_ISA {

/// LayerNorm, RMSNorm, and RMSNorm with an offset added to the weight.
enum class NormKind { centred, plain, shifted };

template <NormKind kind, class T, class Tag>
inline Vec<Acc<T>> get_weight(const T* weight, Tag part, Acc<T> offset) {
  const Vec<Acc<T>> stored = get(weight, part);
  if constexpr (kind == NormKind::shifted) return stored + Vec<Acc<T>>(offset);
  return stored;
}

template <class A>
struct RowStatistics {
  A mean;
  A factor;
};

/// Mean (LayerNorm only) and inverse deviation of a row, in two passes, so that a large mean does
/// not cancel the variance.
template <bool kCentred, class T>
inline RowStatistics<Acc<T>> row_statistics(const T* x, Size width, Acc<T> epsilon) {
  using A = Acc<T>;
  const A count = static_cast<A>(width);
  A mean = 0;
  if constexpr (kCentred) {
    Vec<A> sum(A(0));
    for_row<A>(width, [&](Size i, auto part) { sum += get(x + i, part); });
    mean = sum_lanes(sum) / count;
  }
  Vec<A> squares(A(0));
  for_row<A>(width, [&](Size i, auto part) {
    const Vec<A> d = get(x + i, part, mean) - Vec<A>(mean);
    squares += d * d;
  });
  const Vec<A> factor =
      formulas::inverse_deviation(Vec<A>(sum_lanes(squares) / count), Vec<A>(epsilon));
  return {mean, factor.get(0)};
}

template <NormKind kind, class T>
void norm_rows(const T* x, const T* weight, const T* bias, Acc<T> offset, Acc<T> epsilon,
               const T* residual, T* y, Size rows, Size width) {
  using A = Acc<T>;
  constexpr bool kCentred = kind == NormKind::centred;
  for (Size r = 0; r < rows; ++r, x += width, y += width) {
    const auto row = row_statistics<kCentred>(x, width, epsilon);
    for_row<A>(width, [&](Size i, auto part) {
      Vec<A> n = (get(x + i, part) - Vec<A>(row.mean)) * Vec<A>(row.factor) *
                 get_weight<kind>(weight + i, part, offset);
      if constexpr (kCentred) n += get(bias + i, part);
      if (residual != nullptr) n += get(residual + r * width + i, part);
      put(y + i, n, part);
    });
  }
}

template <class T>
void norm(const T* x, const T* weight, const T* bias, Acc<T> offset, Acc<T> epsilon,
          const T* residual, T* y, Size rows, Size width) {
  const auto kernel = bias != nullptr       ? norm_rows<NormKind::centred, T>
                      : offset == Acc<T>(0) ? norm_rows<NormKind::plain, T>
                                            : norm_rows<NormKind::shifted, T>;
  kernel(x, weight, bias, offset, epsilon, residual, y, rows, width);
}

template <NormKind kind, class T>
void norm_backward_rows(const T* x, const T* weight, const T* dy, Acc<T> offset, Acc<T> epsilon,
                        const T* residual, T* dx, Acc<T>* weight_sum, Acc<T>* bias_sum, Size rows,
                        Size width) {
  using A = Acc<T>;
  constexpr bool kCentred = kind == NormKind::centred;
  const A count = static_cast<A>(width);
  for (Size r = 0; r < rows; ++r, x += width, dy += width, dx += width) {
    const auto row = row_statistics<kCentred>(x, width, epsilon);
    const Vec<A> mean(row.mean);
    const Vec<A> factor(row.factor);
    Vec<A> sum_g(A(0));
    Vec<A> sum_gn(A(0));
    for_row<A>(width, [&](Size i, auto part) {
      const Vec<A> n = (get(x + i, part) - mean) * factor;
      const Vec<A> d = get(dy + i, part);
      const Vec<A> g = d * get_weight<kind>(weight + i, part, offset);
      put(weight_sum + i, get(weight_sum + i, part) + d * n, part);
      if constexpr (kCentred) {
        put(bias_sum + i, get(bias_sum + i, part) + d, part);
        sum_g += g;
      }
      sum_gn += g * n;
    });
    const Vec<A> mean_g(sum_lanes(sum_g) / count);
    const Vec<A> mean_gn(sum_lanes(sum_gn) / count);
    for_row<A>(width, [&](Size i, auto part) {
      const Vec<A> n = (get(x + i, part) - mean) * factor;
      const Vec<A> g = get(dy + i, part) * get_weight<kind>(weight + i, part, offset);
      Vec<A> d = formulas::norm_derivative(g, n, mean_g, mean_gn, factor);
      if (residual != nullptr) d += get(residual + r * width + i, part);
      put(dx + i, d, part);
    });
  }
}

template <class T>
void norm_backward(const T* x, const T* weight, const T* dy, Acc<T> offset, Acc<T> epsilon,
                   const T* residual, T* dx, Acc<T>* weight_sum, Acc<T>* bias_sum, Size rows,
                   Size width) {
  const auto kernel = bias_sum != nullptr   ? norm_backward_rows<NormKind::centred, T>
                      : offset == Acc<T>(0) ? norm_backward_rows<NormKind::plain, T>
                                            : norm_backward_rows<NormKind::shifted, T>;
  kernel(x, weight, dy, offset, epsilon, residual, dx, weight_sum, bias_sum, rows, width);
}

}  // namespace ballast::model::host::BALLAST_KERNEL_ISA
