#pragma once

#include <cmath>

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
      if constexpr (kCentred) {
        if (bias != nullptr) n += get(bias + i, part);
      }
      if (residual != nullptr) n += get(residual + r * width + i, part);
      put(y + i, n, part);
    });
  }
}

template <class T>
void norm(const T* x, const T* weight, const T* bias, Acc<T> offset, Acc<T> epsilon,
          const T* residual, T* y, Size rows, Size width, bool centred = false) {
  const auto kernel = centred || bias != nullptr ? norm_rows<NormKind::centred, T>
                      : offset == Acc<T>(0)      ? norm_rows<NormKind::plain, T>
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

/// Largest of x[0..size).
template <class A>
inline A row_max(const A* x, Size size) {
  // Lanes after the end must not be the maximum, so they get an element of the row.
  Vec<A> best(x[0]);
  for_row<A>(size, [&](Size i, auto part) {
    load_ahead(x + i);
    best = xsimd::max(best, get(x + i, part, x[0]));
  });
  return max_lanes(best);
}

/// Writes zero to x[begin..end).
template <class T>
inline void clear(T* x, Size begin, Size end) {
  if (end > begin) __builtin_memset(static_cast<void*>(x + begin), 0, (end - begin) * sizeof(T));
}

/// The range of keys that a query sees: [begin, end).
struct VisibleKeys {
  Size begin;
  Size end;
  VisibleKeys(Size query, const AttentionMask& mask)
      : begin(mask.first_key(query)), end(query + 1) {}
};

/// Writes zero to the keys of a row that its query does not see.
template <class T>
inline void clear_unseen(T* row, const VisibleKeys& seen, const KeyRange& keys) {
  clear(row, keys.begin, seen.begin);
  clear(row, seen.end, keys.end);
}

template <class T>
void attention_softmax(Acc<T>* scores, T* probabilities, Size stride, Size first, Size rows,
                       const KeyRange& keys, Acc<T> scale, Acc<T>* log_sum) {
  using A = Acc<T>;
  for (Size r = 0; r < rows; ++r, scores += stride, probabilities += stride) {
    const VisibleKeys seen(first + r, keys.mask);
    const Size count = seen.end - seen.begin;
    A* const row = scores + seen.begin;
    T* const out = probabilities + seen.begin;
    const A largest = row_max(row, count) * scale;
    Vec<A> sum(A(0));
    for_row<A>(count, [&](Size i, auto part) {
      // Lanes after the end: exp(-inf) = 0.
      const Vec<A> s = get(row + i, part, -static_cast<A>(HUGE_VAL));
      const Vec<A> e = formulas::probability(s, Vec<A>(scale), Vec<A>(largest));
      put(row + i, e, part);
      sum += e;
    });
    const A total = sum_lanes(sum);
    const Vec<A> inverse(A(1) / total);
    for_row<A>(count, [&](Size i, auto part) { put(out + i, get(row + i, part) * inverse, part); });
    clear_unseen(probabilities, seen, keys);
    log_sum[r] = largest + static_cast<A>(::log(static_cast<double>(total)));
  }
}

template <class A>
void soft_cap(A* x, Size size, A scale, A cap) {
  for_row<A>(size, [&](Size i, auto part) {
    put(x + i, formulas::soft_cap(get(x + i, part) * Vec<A>(scale), Vec<A>(cap)), part);
  });
}

/// Slope of soft_cap() at its results; 1 without a cap.
template <class A>
inline Vec<A> slope_of_cap(const Vec<A>& capped, A cap) {
  return cap > A(0) ? formulas::soft_cap_derivative(capped, Vec<A>(cap)) : Vec<A>(A(1));
}

template <class T>
void attention_softmax_backward(const Acc<T>* scores, const Acc<T>* dp, T* probabilities,
                                T* dscores, Size stride, Size first, Size rows,
                                const KeyRange& keys, Acc<T> scale, Acc<T> cap,
                                const Acc<T>* log_sum, const Acc<T>* delta) {
  using A = Acc<T>;
  const Vec<A> factor(cap > A(0) ? A(1) : scale);
  for (Size r = 0; r < rows; ++r) {
    const VisibleKeys seen(first + r, keys.mask);
    const Size row = r * stride + seen.begin;
    const Vec<A> sum(log_sum[r]);
    const Vec<A> mean(delta[r]);
    for_row<A>(seen.end - seen.begin, [&](Size i, auto part) {
      const Vec<A> s = get(scores + row + i, part);
      const Vec<A> p = formulas::probability(s, factor, sum);
      put(probabilities + row + i, p, part);
      const Vec<A> slope = cap > A(0) ? Vec<A>(scale) * slope_of_cap(s, cap) : Vec<A>(scale);
      put(dscores + row + i, formulas::softmax_derivative(p, get(dp + row + i, part), mean, slope),
          part);
    });
    clear_unseen(probabilities + r * stride, seen, keys);
    clear_unseen(dscores + r * stride, seen, keys);
  }
}

/// exp(logit - largest) of a vector; 0 for lanes after the end.
template <class A>
inline auto exponential(const A* logits, auto part, A largest) {
  return formulas::probability(get(logits, part, -static_cast<A>(HUGE_VAL)), Vec<A>(A(1)),
                               Vec<A>(largest));
}

/// Sum of exp(logit - largest); partial sums of a few thousand elements are added in double.
template <class A>
inline double sum_of_exponentials(const A* logits, Size size, A largest) {
  constexpr Size kStretch = 4096;
  double total = 0.0;
  for (Size begin = 0; begin < size; begin += kStretch) {
    const Size count = size - begin < kStretch ? size - begin : kStretch;
    Vec<A> sum(A(0));
    for_row<A>(count,
               [&](Size i, auto part) { sum += exponential(logits + begin + i, part, largest); });
    total += static_cast<double>(sum_lanes(sum));
  }
  return total;
}

template <class A>
void sum_logits(const A* logits, Size size, Size target, RowSum<A>* row) {
  *row = {};
  const A largest = row_max(logits, size);
  if (!(row->largest >= largest)) row->largest = largest;
  row->total = sum_of_exponentials(logits, size, row->largest);
  if (target < size) row->wanted = logits[target];
}

template <class T>
void logit_gradients(const Acc<T>* logits, Size size, Size target, const RowSum<Acc<T>>* row,
                     Acc<T> scale, Acc<T> cap, T* gradient) {
  using A = Acc<T>;
  const Vec<A> factor(static_cast<A>(static_cast<double>(scale) / row->total));
  A wanted(0);
  Vec<A> slope(A(1));
  if (target < size) {
    put(&wanted, exponential(logits + target, Part{1}, row->largest), Part{1});
    slope = slope_of_cap(get(logits + target, Part{1}), cap);
  }
  if (cap > A(0)) {
    for_row<A>(size, [&](Size i, auto part) {
      const Vec<A> slopes = slope_of_cap(get(logits + i, part), cap);
      put(gradient + i, exponential(logits + i, part, row->largest) * factor * slopes, part);
    });
  } else {
    for_row<A>(size, [&](Size i, auto part) {
      load_ahead(logits + i);
      put(gradient + i, exponential(logits + i, part, row->largest) * factor, part);
    });
  }
  if (target >= size) return;
  // The one-hot is subtracted before rounding, so that p - 1 keeps its precision near p = 1. exp -
  // total is the same number without the common factor.
  const Vec<A> rest(static_cast<A>(static_cast<double>(wanted) - row->total));
  put(gradient + target, rest * factor * slope, Part{1});
}

}  // namespace ballast::model::host::BALLAST_KERNEL_ISA
