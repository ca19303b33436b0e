#pragma once

#include "src/model/compute/formulas.h"
#include "src/model/host/reduction_kernels.h"
#include "src/model/host/simd.h"

namespace ballast::model::host::BALLAST_KERNEL_ISA {

inline constexpr Size kTaps = 8;  ///< kMaxTaps

/// Number of rows that the convolution reads for `row`.
inline Size taps_of_row(const ConvolvedRows& rows, Size row) {
  const Size position =
      rows.positions == nullptr ? row % rows.length : static_cast<Size>(rows.positions[row]);
  return position + 1 < rows.taps ? position + 1 : rows.taps;
}

template <class T>
void convolve(const ConvolvedRows& rows, const T* x, Size x_step, const Acc<T>* weights, T* y,
              Size width) {
  using A = Acc<T>;
  for (Size row = rows.begin; row < rows.end; ++row) {
    const Size taps = taps_of_row(rows, row);
    const T* const from = x + row * x_step;
    for_row<A>(width, [&](Size i, auto part) {
      Vec<A> sum(A(0));
      for (Size back = 0; back < taps; ++back) {
        sum += get(weights + (rows.taps - 1 - back) * width + i, part) *
               get(from - back * x_step + i, part);
      }
      put(y + row * width + i, formulas::silu(sum), part);
    });
  }
}

/// The backward pass for the channels of one vector.
template <class A>
struct ConvolvedColumn {
  Size taps;
  Vec<A> weight[kTaps];
  Vec<A> sum[kTaps];     ///< gradients of the weights
  Vec<A> before[kTaps];  ///< x of the row and of those before it
  Vec<A> open[kTaps];    ///< gradients of these rows

  template <class Tag>
  ConvolvedColumn(Size count, const A* weights, Size width, Tag part) : taps(count) {
    for (Size k = 0; k < taps; ++k) {
      weight[k] = get(weights + (taps - 1 - k) * width, part);
      sum[k] = before[k] = open[k] = Vec<A>(A(0));
    }
  }
  void next(const Vec<A>& x) {
    for (Size k = taps - 1; k > 0; --k) {
      before[k] = before[k - 1];
      open[k] = open[k - 1];
    }
    before[0] = x;
    open[0] = Vec<A>(A(0));
  }
  /// Returns `z` plus the products of `used` rows.
  [[nodiscard]] Vec<A> value(Vec<A> z, Size used) const {
    for (Size k = 0; k < used; ++k) z += weight[k] * before[k];
    return z;
  }
  void add(const Vec<A>& dz, Size used) {
    for (Size k = 0; k < used; ++k) {
      sum[k] += dz * before[k];
      open[k] += dz * weight[k];
    }
  }
  /// Calls finish(row, gradient) for the last rows of a sequence.
  template <class Finish>
  void last_rows(const ConvolvedRows& rows, const Finish& finish) const {
    for (Size k = 0; k + 1 < taps && k < rows.end - rows.begin; ++k) {
      finish(rows.end - 1 - k, open[k]);
    }
  }
  template <class Tag>
  void add_sums(A* sums, Size width, Tag part) const {
    for (Size k = 0; k < taps; ++k) {
      A* const to = sums + (taps - 1 - k) * width;
      put(to, get(to, part) + sum[k], part);
    }
  }
};

template <class T, class Tag>
inline void convolve_column_backward(const ConvolvedRows& rows, const T* x, Size x_step,
                                     const Acc<T>* weights, T* dy, Size dy_step, Acc<T>* sums,
                                     Size width, Tag part) {
  using A = Acc<T>;
  const Size taps = rows.taps;
  ConvolvedColumn<A> column(taps, weights, width, part);
  const auto finish = [&](Size row, const Vec<A>& d) { put(dy + row * dy_step, d, part); };
  for (Size row = rows.begin; row < rows.end; ++row) {
    column.next(get(x + row * x_step, part));
    const Size used = taps_of_row(rows, row);
    const Vec<A> z = column.value(Vec<A>(A(0)), used);
    column.add(get(dy + row * dy_step, part) * formulas::silu_derivative(z, formulas::sigmoid(z)),
               used);
    if (row - rows.begin >= taps - 1) finish(row + 1 - taps, column.open[taps - 1]);
  }
  column.last_rows(rows, finish);
  column.add_sums(sums, width, part);
}

template <class T>
void convolve_backward(const ConvolvedRows& rows, const T* x, Size x_step, const Acc<T>* weights,
                       T* dy, Size dy_step, Acc<T>* sums, Size width, Size columns) {
  for_row<Acc<T>>(columns, [&](Size i, auto part) {
    convolve_column_backward(rows, x + i, x_step, weights + i, dy + i, dy_step, sums + i, width,
                             part);
  });
}

template <class T>
void gated_convolve(const ConvolvedRows& rows, const T* x, Size x_step, const Acc<T>* weights, T* y,
                    Size width) {
  using A = Acc<T>;
  for (Size row = rows.begin; row < rows.end; ++row) {
    const Size taps = taps_of_row(rows, row);
    const T* const from = x + row * x_step;
    for_row<A>(width, [&](Size i, auto part) {
      Vec<A> sum(A(0));
      if (rows.biased) sum = get(weights + rows.taps * width + i, part);
      for (Size back = 0; back < taps; ++back) {
        const T* const at = from - back * x_step + i;
        sum += get(weights + (rows.taps - 1 - back) * width + i, part) *
               (get(at, part) * get(at + 2 * width, part));
      }
      put(y + row * width + i, get(from + width + i, part) * sum, part);
    });
  }
}

template <class T, class Tag>
inline void gated_column_backward(const ConvolvedRows& rows, const T* x, Size x_step,
                                  const Acc<T>* weights, const T* dy, T* dx, Acc<T>* sums,
                                  Size width, Tag part) {
  using A = Acc<T>;
  const Size taps = rows.taps;
  ConvolvedColumn<A> column(taps, weights, width, part);
  Vec<A> bias(A(0));
  Vec<A> bias_sum(A(0));
  if (rows.biased) bias = get(weights + taps * width, part);
  const auto finish = [&](Size row, const Vec<A>& d) {
    const T* const at = x + row * x_step;
    T* const to = dx + row * x_step;
    put(to, d * get(at + 2 * width, part), part);
    put(to + 2 * width, d * get(at, part), part);
  };
  for (Size row = rows.begin; row < rows.end; ++row) {
    const T* const at = x + row * x_step;
    column.next(get(at, part) * get(at + 2 * width, part));
    const Size used = taps_of_row(rows, row);
    const Vec<A> d = get(dy + row * width, part);
    put(dx + row * x_step + width, d * column.value(bias, used), part);
    const Vec<A> dz = d * get(at + width, part);
    column.add(dz, used);
    bias_sum += dz;
    if (row - rows.begin >= taps - 1) finish(row + 1 - taps, column.open[taps - 1]);
  }
  column.last_rows(rows, finish);
  column.add_sums(sums, width, part);
  if (!rows.biased) return;
  A* const to = sums + taps * width;
  put(to, get(to, part) + bias_sum, part);
}

template <class T>
void gated_convolve_backward(const ConvolvedRows& rows, const T* x, Size x_step,
                             const Acc<T>* weights, const T* dy, T* dx, Acc<T>* sums, Size width,
                             Size columns) {
  for_row<Acc<T>>(columns, [&](Size i, auto part) {
    gated_column_backward(rows, x + i, x_step, weights + i, dy + i, dx + i, sums + i, width, part);
  });
}

template <class T>
void gated_norm(const T* x, const T* gate, const T* weight, Acc<T> epsilon, T* y, Size heads,
                Size width) {
  using A = Acc<T>;
  for (Size h = 0; h < heads; ++h, x += width, gate += width, y += width) {
    const A factor = row_statistics<false>(x, width, epsilon).factor;
    for_row<A>(width, [&](Size i, auto part) {
      const Vec<A> n = get(x + i, part) * Vec<A>(factor) * get(weight + i, part);
      put(y + i, n * formulas::silu(get(gate + i, part)), part);
    });
  }
}

template <class T>
void gated_norm_backward(const T* x, const T* gate, const T* weight, Acc<T> epsilon, T* dy,
                         T* dgate, Acc<T>* weight_sum, Size heads, Size width) {
  using A = Acc<T>;
  for (Size h = 0; h < heads; ++h, x += width, gate += width, dy += width, dgate += width) {
    const Vec<A> factor(row_statistics<false>(x, width, epsilon).factor);
    Vec<A> sum(A(0));
    for_row<A>(width, [&](Size i, auto part) {
      const Vec<A> n = get(x + i, part) * factor;
      const Vec<A> z = get(gate + i, part);
      const Vec<A> s = formulas::sigmoid(z);
      const Vec<A> w = get(weight + i, part);
      const Vec<A> d = get(dy + i, part);
      const Vec<A> dn = d * z * s;
      put(dgate + i, d * n * w * formulas::silu_derivative(z, s), part);
      put(weight_sum + i, get(weight_sum + i, part) + dn * n, part);
      sum += dn * w * n;
    });
    const Vec<A> mean(sum_lanes(sum) / static_cast<A>(width));
    for_row<A>(width, [&](Size i, auto part) {
      const Vec<A> n = get(x + i, part) * factor;
      const Vec<A> z = get(gate + i, part);
      const Vec<A> g = get(dy + i, part) * z * formulas::sigmoid(z) * get(weight + i, part);
      put(dy + i, formulas::norm_derivative(g, n, Vec<A>(A(0)), mean, factor), part);
    });
  }
}

template <class T>
void sigmoid_gate(const T* x, const T* gate, T* y, Size size) {
  for_row<Acc<T>>(size, [&](Size i, auto part) {
    put(y + i, get(x + i, part) * formulas::sigmoid(get(gate + i, part)), part);
  });
}

template <class T>
void sigmoid_gate_backward(const T* x, T* gate, T* dy, Size size) {
  using A = Acc<T>;
  for_row<A>(size, [&](Size i, auto part) {
    const Vec<A> s = formulas::sigmoid(get(gate + i, part));
    const Vec<A> d = get(dy + i, part);
    put(gate + i, d * get(x + i, part) * s * (Vec<A>(A(1)) - s), part);
    put(dy + i, d * s, part);
  });
}

/// 1 / sqrt(sum of squares + epsilon) of a row.
template <class T>
inline Acc<T> inverse_length(const T* x, Size width) {
  using A = Acc<T>;
  Vec<A> squares(A(0));
  for_row<A>(width, [&](Size i, auto part) {
    const Vec<A> v = get(x + i, part);
    squares += v * v;
  });
  return formulas::inverse_deviation(Vec<A>(sum_lanes(squares)), Vec<A>(A(1e-6))).get(0);
}

template <class T>
void unit_row(const T* x, Acc<T> factor, Acc<T>* y, Size width) {
  using A = Acc<T>;
  const Vec<A> all(inverse_length(x, width) * factor);
  for_row<A>(width, [&](Size i, auto part) { put(y + i, get(x + i, part) * all, part); });
}

template <class T>
void unit_row_backward(const T* x, Acc<T> factor, const Acc<T>* dy, T* dx, Size width) {
  using A = Acc<T>;
  const Vec<A> inverse(inverse_length(x, width));
  Vec<A> sum(A(0));
  for_row<A>(width,
             [&](Size i, auto part) { sum += get(x + i, part) * inverse * get(dy + i, part); });
  const Vec<A> along(sum_lanes(sum));
  const Vec<A> scale = inverse * Vec<A>(factor);
  for_row<A>(width, [&](Size i, auto part) {
    put(dx + i, (get(dy + i, part) - get(x + i, part) * inverse * along) * scale, part);
  });
}

// Kernels over the rows of one chunk, in fp32. Matrices [chunk, chunk] have no gaps.

inline constexpr Size kRows = DeltaShape::kChunk;

/// decay[i][j] = exp(sums[i] - sums[j]) for first[i] <= j <= i, else 0.
inline void chunk_decays(const float* sums, const std::int32_t* first, float* decay) {
  for (Size i = 0; i < kRows; ++i, decay += kRows) {
    for_row<float>(i + 1, [&](Size j, auto part) {
      put(decay + j, xsimd::exp(Vec<float>(sums[i]) - get(sums + j, part)), part);
    });
    for (Size j = 0; j < static_cast<Size>(first[i]); ++j) decay[j] = 0.0F;
    for (Size j = i + 1; j < kRows; ++j) decay[j] = 0.0F;
  }
}

/// keys *= decay without the diagonal, queries *= decay, system = keys * beta per row.
inline void chunk_scores(const float* decay, const float* beta, float* keys, float* queries,
                         float* system) {
  for (Size i = 0; i < kRows; ++i) {
    const Size row = i * kRows;
    keys[row + i] = 0.0F;
    for_row<float>(kRows, [&](Size j, auto part) {
      const Vec<float> d = get(decay + row + j, part);
      const Vec<float> k = get(keys + row + j, part) * d;
      put(keys + row + j, k, part);
      put(queries + row + j, get(queries + row + j, part) * d, part);
      put(system + row + j, k * Vec<float>(beta[i]), part);
    });
  }
}

/// Adds the columns [first, first + lanes) of the product with the strictly lower matrix.
template <class Tag>
inline void solve_columns(const float* system, float* x, Size width, bool flipped, Tag part) {
  for (Size step = 1; step < kRows; ++step) {
    const Size i = flipped ? kRows - 1 - step : step;
    const Size begin = flipped ? i + 1 : 0;
    const Size end = flipped ? kRows : i;
    Vec<float> sum = get(x + i * width, part);
    for (Size j = begin; j < end; ++j) {
      const float factor = flipped ? system[j * kRows + i] : system[i * kRows + j];
      sum -= Vec<float>(factor) * get(x + j * width, part);
    }
    put(x + i * width, sum, part);
  }
}

/// Solves (1 + system) y = x, or with the transposed matrix if `flipped`, in place. Only elements
/// below the diagonal are read. x: [chunk, width].
inline void chunk_solve(const float* system, float* x, Size width, bool flipped) {
  for_row<float>(width,
                 [&](Size i, auto part) { solve_columns(system, x + i, width, flipped, part); });
}

/// Replaces dsystem by the gradient of the products of keys, and dqueries (of the decayed products)
/// by that of the products of queries with keys. Writes the gradients of beta and adds those of the
/// logarithms of decays.
inline void chunk_scores_backward(const ChunkScores& of, float* dsystem, float* dqueries,
                                  float* dbeta, float* dsums) {
  alignas(64) float columns[kRows] = {};
  for (Size i = 0; i < kRows; ++i) {
    const Size row = i * kRows;
    Vec<float> of_beta(0.0F);
    Vec<float> of_sum(0.0F);
    for (Size j = i; j < kRows; ++j) dsystem[row + j] = 0.0F;
    for_row<float>(kRows, [&](Size j, auto part) {
      const Vec<float> ds = get(dsystem + row + j, part);
      const Vec<float> dq = get(dqueries + row + j, part);
      const Vec<float> d = get(of.decay + row + j, part);
      const Vec<float> k = get(of.keys + row + j, part);
      const Vec<float> pair =
          ds * get(of.system + row + j, part) + dq * get(of.queries + row + j, part);
      of_beta += ds * k;
      of_sum += pair;
      put(columns + j, get(columns + j, part) + pair, part);
      put(dsystem + row + j, ds * d * Vec<float>(of.beta[i]), part);
      put(dqueries + row + j, dq * d, part);
    });
    dbeta[i] = sum_lanes(of_beta);
    dsums[i] += sum_lanes(of_sum);
  }
  for (Size i = 0; i < kRows; ++i) dsums[i] -= columns[i];
}

}  // namespace ballast::model::host::BALLAST_KERNEL_ISA
