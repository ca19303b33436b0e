#pragma once

#include "src/model/compute/formulas.h"
#include "src/model/host/simd.h"

namespace ballast::model::host::BALLAST_KERNEL_ISA {

/// y = form(x).
template <class T, class Form>
inline void apply(const T* x, T* y, Size size, const Form& form) {
  for_row<Acc<T>>(size, [&](Size i, auto part) { put(y + i, form(get(x + i, part)), part); });
}

/// d *= slope(x); adds the column sums of the result to column_sum.
template <class T, class Slope>
inline void multiply_by_slope(const T* x, T* d, Acc<T>* column_sum, Size rows, Size width,
                              const Slope& slope) {
  using A = Acc<T>;
  for (Size r = 0; r < rows; ++r, x += width, d += width) {
    for_row<A>(width, [&](Size i, auto part) {
      const Vec<A> g = get(d + i, part) * slope(get(x + i, part));
      put(d + i, g, part);
      put(column_sum + i, get(column_sum + i, part) + g, part);
    });
  }
}

template <Activation f, class T>
void activate(const T* x, T* y, Size size) {
  apply(x, y, size, [](const Vec<Acc<T>>& v) { return formulas::activation<f>(v); });
}

template <Activation f, class T>
void activate_backward(const T* x, T* d, Acc<T>* column_sum, Size rows, Size width) {
  multiply_by_slope(x, d, column_sum, rows, width,
                    [](const Vec<Acc<T>>& v) { return formulas::activation_derivative<f>(v); });
}

template <Activation f, class T>
void glu(const T* gate, const T* up, T* y, Size size) {
  using A = Acc<T>;
  for_row<A>(size, [&](Size i, auto part) {
    put(y + i, formulas::activation<f>(get(gate + i, part)) * get(up + i, part), part);
  });
}

template <Activation f, class T>
void glu_backward(T* gate, T* up, const T* dy, Size size) {
  using A = Acc<T>;
  for_row<A>(size, [&](Size i, auto part) {
    const Vec<A> g = get(gate + i, part);
    const Vec<A> u = get(up + i, part);
    const Vec<A> d = get(dy + i, part);
    if constexpr (f == Activation::silu) {
      const Vec<A> s = formulas::sigmoid(g);
      put(gate + i, d * u * formulas::silu_derivative(g, s), part);
      put(up + i, d * g * s, part);
    } else {
      put(gate + i, d * u * formulas::activation_derivative<f>(g), part);
      put(up + i, d * formulas::activation<f>(g), part);
    }
  });
}

/// min(x, limit); NaN stays NaN.
template <class A>
inline Vec<A> at_most(const Vec<A>& x, A limit) {
  return xsimd::select(x > Vec<A>(limit), Vec<A>(limit), x);
}
template <class A>
inline Vec<A> at_least(const Vec<A>& x, A limit) {
  return xsimd::select(x < Vec<A>(limit), Vec<A>(limit), x);
}

template <class T>
void limited_swiglu(const T* gate, const T* up, T* y, Size size, Acc<T> limit, Acc<T> slope) {
  using A = Acc<T>;
  for_row<A>(size, [&](Size i, auto part) {
    const Vec<A> g = at_most(get(gate + i, part), limit);
    const Vec<A> u = at_least(at_most(get(up + i, part), limit), -limit);
    put(y + i, g * formulas::sigmoid(Vec<A>(slope) * g) * (u + Vec<A>(A(1))), part);
  });
}

template <class T>
void limited_swiglu_backward(T* gate, T* up, const T* dy, Size size, Acc<T> limit, Acc<T> slope) {
  using A = Acc<T>;
  for_row<A>(size, [&](Size i, auto part) {
    const Vec<A> gate_here = get(gate + i, part);
    const Vec<A> up_here = get(up + i, part);
    const Vec<A> d = get(dy + i, part);
    const Vec<A> g = at_most(gate_here, limit);
    const Vec<A> u = at_least(at_most(up_here, limit), -limit);
    const Vec<A> x = Vec<A>(slope) * g;
    const Vec<A> s = formulas::sigmoid(x);
    const Vec<A> none(A(0));
    const Vec<A> of_gate = d * (u + Vec<A>(A(1))) * formulas::silu_derivative(x, s);
    put(gate + i, xsimd::select(gate_here <= Vec<A>(limit), of_gate, none), part);
    put(up + i, xsimd::select(xsimd::abs(up_here) <= Vec<A>(limit), d * g * s, none), part);
  });
}

template <class T>
void column_sum(const T* x, Size stride, Acc<T>* sum, Size rows, Size width) {
  using A = Acc<T>;
  for (Size r = 0; r < rows; ++r, x += stride) {
    for_row<A>(width, [&](Size i, auto part) {
      put(sum + i, get(sum + i, part) + get(x + i, part), part);
    });
  }
}

template <class T>
void rope(T* x, Size stride, Size first, Size rows, Size length, const std::int32_t* positions,
          Size heads, Size head_dim, Size half, const Acc<T>* cosine, const Acc<T>* sine,
          Acc<T> direction) {
  using A = Acc<T>;
  for (Size r = 0; r < rows; ++r, x += stride) {
    const Size row = first + r;
    const Size position = positions == nullptr ? row % length : static_cast<Size>(positions[row]);
    const Size angles = position * half;
    for (Size h = 0; h < heads; ++h) {
      T* const a = x + h * head_dim;
      T* const b = a + half;
      for_row<A>(half, [&](Size i, auto part) {
        const Vec<A> c = get(cosine + angles + i, part);
        const Vec<A> s = get(sine + angles + i, part) * Vec<A>(direction);
        const Vec<A> va = get(a + i, part);
        const Vec<A> vb = get(b + i, part);
        put(a + i, formulas::rotate_first(va, vb, c, s), part);
        put(b + i, formulas::rotate_second(va, vb, c, s), part);
      });
    }
  }
}

/// Variant for pairs (x[2i], x[2i + 1]).
template <class T>
void interleaved_rope(T* x, Size stride, Size first, Size rows, Size length,
                      const std::int32_t* positions, Size heads, Size head_dim, Size half,
                      const Acc<T>* cosine, const Acc<T>* sine, Acc<T> direction) {
  using A = Acc<T>;
  constexpr Part one{1};
  for (Size r = 0; r < rows; ++r, x += stride) {
    const Size row = first + r;
    const Size position = positions == nullptr ? row % length : static_cast<Size>(positions[row]);
    const Size angles = position * half;
    for (Size h = 0; h < heads; ++h) {
      for (Size i = 0; i < half; ++i) {
        T* const pair = x + h * head_dim + 2 * i;
        const Vec<A> va = get(pair, one);
        const Vec<A> vb = get(pair + 1, one);
        const Vec<A> c(cosine[angles + i]);
        const Vec<A> s(sine[angles + i] * direction);
        put(pair, formulas::rotate_first(va, vb, c, s), one);
        put(pair + 1, formulas::rotate_second(va, vb, c, s), one);
      }
    }
  }
}

template <class T>
void add(const T* a, const T* b, T* y, Size size) {
  for_row<Acc<T>>(
      size, [&](Size i, auto part) { put(y + i, get(a + i, part) + get(b + i, part), part); });
}

template <class T>
void accumulate(Acc<T>* sum, const T* x, Size size) {
  for_row<Acc<T>>(
      size, [&](Size i, auto part) { put(sum + i, get(sum + i, part) + get(x + i, part), part); });
}

template <class T>
void scale(const T* x, Acc<T> factor, T* y, Size size) {
  using A = Acc<T>;
  for_row<A>(size, [&](Size i, auto part) { put(y + i, get(x + i, part) * Vec<A>(factor), part); });
}

template <class T>
void accumulate_scaled(Acc<T>* sum, const T* x, Acc<T> factor, Size size) {
  using A = Acc<T>;
  for_row<A>(size, [&](Size i, auto part) {
    put(sum + i, get(sum + i, part) + get(x + i, part) * Vec<A>(factor), part);
  });
}

template <class T>
void widen_row(const T* x, Acc<T>* y, Size size) {
  for_row<Acc<T>>(size, [&](Size i, auto part) { put(y + i, get(x + i, part), part); });
}

template <class T>
void convert(const Acc<T>* x, Size x_stride, T* y, Size y_stride, Size rows, Size width) {
  for (Size r = 0; r < rows; ++r, x += x_stride, y += y_stride) {
    for_row<Acc<T>>(width, [&](Size i, auto part) { put(y + i, get(x + i, part), part); });
  }
}

template <class T>
void row_dot(const T* a, Size a_stride, const T* b, Size b_stride, Acc<T>* out, Size rows,
             Size width) {
  using A = Acc<T>;
  for (Size r = 0; r < rows; ++r, a += a_stride, b += b_stride) {
    Vec<A> sum(A(0));
    for_row<A>(width, [&](Size i, auto part) { sum += get(a + i, part) * get(b + i, part); });
    out[r] = sum_lanes(sum);
  }
}

/// float to double, half a vector at a time.
inline Vec<double> widen_half(const float* from) {
  using HalfFloats = float __attribute__((vector_size(2 * kFloats)));
  using Doubles = double __attribute__((vector_size(4 * kFloats)));
  HalfFloats half;
  __builtin_memcpy(&half, from, sizeof half);
  const Doubles doubles = __builtin_convertvector(half, Doubles);
  return Vec<double>(reinterpret_cast<typename Vec<double>::register_type>(doubles));
}

/// Sum of squares in double, and number of values that are not finite.
class Tally {
 public:
  void add(const Vec<float>& values) {
    bad_ -= reinterpret_cast<Words>((words_of(values) & 0x7f800000U) == 0x7f800000U);
    alignas(64) float lanes[kFloats];
    values.store_aligned(lanes);
    const Vec<double> a = widen_half(lanes);
    const Vec<double> b = widen_half(lanes + kFloats / 2);
    low_ += a * a;
    high_ += b * b;
  }
  void add_to(double* sum_of_squares, std::uint64_t* non_finite) const {
    *sum_of_squares += sum_lanes(low_ + high_);
    for (Size i = 0; i < kFloats; ++i) *non_finite += bad_[i];
  }

 private:
  Vec<double> low_ = Vec<double>(0.0);
  Vec<double> high_ = Vec<double>(0.0);
  Words bad_ = {};
};

template <class T>
void pack(const float* gradient, const float* tied, T* packed, Size size, double* sum_of_squares,
          std::uint64_t* non_finite) {
  Tally tally;
  for_row<float>(size, [&](Size i, auto part) {
    load_ahead(gradient + i);
    Vec<float> v = get(gradient + i, part);
    if (tied != nullptr) v += get(tied + i, part);
    put(packed + i, v, part);
    // The statistics are those of the stored (rounded) values.
    tally.add(get(packed + i, part));
  });
  tally.add_to(sum_of_squares, non_finite);
}

template <class T>
void measure(const T* packed, Size size, double* sum_of_squares, std::uint64_t* non_finite) {
  Tally tally;
  for_row<float>(size, [&](Size i, auto part) { tally.add(get(packed + i, part)); });
  tally.add_to(sum_of_squares, non_finite);
}

}  // namespace ballast::model::host::BALLAST_KERNEL_ISA
